"""POST /v1/chat/completions."""

from typing import TYPE_CHECKING, Any

from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import Answer, answer, check_characters, fit
from nanovllm.serve.api.logprobs import chat_entries
from nanovllm.serve.api.messages import check_messages
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.call import Call
from nanovllm.serve.streams import Completion

if TYPE_CHECKING:
    from nanovllm.serve.front import Front


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    fast_suffix = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    @property
    def object_name(self) -> str:  # type: ignore[override]
        return "chat.completion.chunk" if self.fields.stream else "chat.completion"

    def fast_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def head(self, completion: Completion) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return self._event({"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None})

    def delta(self, completion: Completion, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(completion)}

    def choice(self, completion: Completion, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(completion)}

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        if completion.lines is None:
            return None
        entries = chat_entries(completion.lines, self.k or 0, self.show, self.front.tokenizer.token_bytes)
        return {"content": entries, "refusal": None}


def _max_tokens(fields: api.ChatFields | api.CompletionFields, least: int) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := getattr(fields, name)) is not None:
            if value < least:
                raise bad_request(f"{name}={value}: must be >= {least}", name)
            return int(value)
    return None


def _check(front: "Front", fields: api.ChatFields) -> None:
    if fields.top_logprobs is not None and not fields.logprobs and fields.top_logprobs != 0:
        raise bad_request("top_logprobs: needs logprobs=true", "top_logprobs")
    if fields.top_logprobs is not None and not 0 <= fields.top_logprobs <= 20:
        raise bad_request(f"top_logprobs={fields.top_logprobs}: must be in 0..20", "top_logprobs")
    if fields.chat_template is not None and not front.options.trust_request_chat_template:
        raise bad_request("chat_template: not taken from requests (--trust-request-chat-template)", "chat_template")
    if fields.add_generation_prompt and fields.continue_final_message:
        raise bad_request("continue_final_message: not together with add_generation_prompt", "continue_final_message")
    if fields.tools is not None:
        raise bad_request("tools: not supported", "tools", "unsupported_field")


def template_kwargs(front: "Front", fields: api.ChatFields) -> dict[str, Any]:
    kwargs = {**front.options.default_chat_template_kwargs, **(fields.chat_template_kwargs or {})}
    if (effort := fields.reasoning_effort) is not None:
        kwargs.setdefault("reasoning_effort", effort)
        if effort == "none":
            kwargs.setdefault("enable_thinking", False)
    return kwargs


async def encode(front: "Front", fields: api.ChatFields) -> tuple[str, list[int]]:
    """A chat's text and token ids. Raises ApiError, and ValueError for what the template refuses."""
    messages = check_messages(fields.messages)
    check_characters(front, sum(_characters(message["content"]) for message in messages), "messages")
    continues = bool(fields.continue_final_message)
    return await front.in_pool(
        lambda: front.tokenizer.encode_chat(
            messages,
            fields.tools,
            add_generation_prompt=not continues
            if fields.add_generation_prompt is None
            else fields.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=template_kwargs(front, fields),
            trust_special_tokens=front.options.trust_special_tokens,
        )
    )


def _characters(content: Any) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


async def chat(front: "Front", call: Call) -> None:
    front.admit()
    fields, ignored = api.read(api.ChatFields, await call.json(), front.options.strict_fields)
    front.note_ignored(call, ignored)
    front.check_model(fields.model)
    _check(front, fields)
    asked = _max_tokens(fields, 1)
    k = None if not fields.logprobs else fields.top_logprobs or 0
    params = api.sampling_fields(fields, front.defaults, max(asked or 1, fields.min_tokens or 0), k)
    _, prompt = await encode(front, fields)
    prompt, max_tokens = fit(front, prompt, fields, asked if asked is not None else front.default_max_tokens)
    await answer(call, ChatAnswer(front, call, fields, [prompt], params), params, [max_tokens])
