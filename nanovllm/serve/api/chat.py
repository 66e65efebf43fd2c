"""POST /v1/chat/completions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api import shapes
from nanovllm.serve.api.answer import Answer, Prepared, answer, check_characters, check_size, fit
from nanovllm.serve.api.logprobs import chat_entries
from nanovllm.serve.api.messages import LeftOut, bytes_left_out, template_values
from nanovllm.serve.api.reading import note_ignored, read
from nanovllm.serve.errors import ApiError, bad_request, refusing
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.parsers import Delta, check_tools, joined
from nanovllm.serve.parsers.tags import MarkedDetokenizer
from nanovllm.serve.request import Completion
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import SHORT

Result = TypeVar("Result")


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    fast_suffix = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def __init__(self, front: Front, call: Call, prepared: Prepared) -> None:
        assert prepared.plan is not None
        self.plan = prepared.plan
        self.texts: list[MarkedDetokenizer] = []
        """Detokenizers that count the tokens of reasoning."""
        super().__init__(front, call, prepared)
        for completion in self.completions:
            completion.reader = self.plan.reader()

    def explain(self, error: ApiError) -> None:
        super().explain(error)
        if error.param == "logprobs":
            error.param, error.message = "top_logprobs", f"top_{error.message}"

    @property
    def object_name(self) -> str:  # type: ignore[override]
        return "chat.completion.chunk" if self.fields.stream else "chat.completion"

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        if self.plan.program is None:
            return super().detokenizer(skip_special_tokens, prompt)
        self.texts.append(self.plan.detokenizer(skip_special_tokens, prompt))
        return self.texts[-1]

    def fast_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def head(self, completion: Completion) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = {"prompt_token_ids": self.prompts[0].token_ids} if self.fields.return_token_ids else {}
        return self._event(choice, **ids)

    def delta(self, completion: Completion, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(completion)}

    def chunk(self, completion: Completion, text: str) -> bytes:
        """The chunk for a text; with a reader, one for each kind of thing that it found in the text."""
        if completion.reader is None:
            return super().chunk(completion, text)
        found = self.read(completion, text)
        if completion.finish_reason is None and not completion.lines and not completion.ids:
            if not found:
                return b""
            if len(found) == 1 and found[0].kind == "content" and not self.usage_in_chunks:
                return completion.prefix + msgspec.json.encode(found[0].text) + self.fast_suffix
        *before, last = [_delta(each) for each in joined(found)] or [{}]
        shape = {"index": completion.index, "finish_reason": None, "logprobs": None}
        events = [self._event({**shape, "delta": delta}) for delta in before]
        choice = {"delta": last, "logprobs": self._logprobs(completion)}
        return b"".join([*events, self._event(self._with_details(choice, completion))])

    def read(self, completion: Completion, text: str) -> list[Delta]:
        """Reads a text: content, reasoning and calls in it."""
        if completion.reader is None:
            return [Delta("content", text)] if text else []
        deltas: list[Delta] = completion.reader.push(text)
        return deltas if completion.finish_reason is None else deltas + completion.reader.finish()

    def choice(self, completion: Completion, text: str) -> dict[str, Any]:
        message = _message(joined(self.read(completion, text)))
        return {"message": message, "logprobs": self._logprobs(completion)}

    def about(self) -> dict[str, Any]:
        return super().about() | self.of_prompt(0)

    def finish_reason(self, completion: Completion) -> str | None:
        reason = completion.finish_reason
        return None if reason is None else self.plan.finish_reason(reason, completion.reader)

    def usage(self, output: int | None = None) -> shapes.Usage:
        usage = super().usage(output)
        if self.plan.reasoning != "none":
            count = sum(text.num_reasoning_tokens for text in self.texts)
            usage.completion_tokens_details = shapes.OutputDetails(count)
        return usage

    def _logprobs(self, completion: Completion) -> dict[str, Any] | None:
        return None if completion.lines is None else {"content": self.entries(completion.lines), "refusal": None}

    def entries(self, lines: list[bytes]) -> list[shapes.ContentToken]:
        """Log-probabilities as chats show them."""
        return chat_entries(lines, self.k or 0, self.show, self.front.model.tokenizer.token_bytes)


def _delta(found: Delta) -> dict[str, Any]:
    """A reader's piece as a chunk's delta. Reasoning goes out under both names that clients know."""
    if found.kind == "reasoning":
        return {"reasoning_content": found.text, "reasoning": found.text}
    if found.kind == "content":
        return {"content": found.text}
    call = _call(found) if found.kind == "call" else {"function": {"arguments": found.text}}
    return {"tool_calls": [{"index": found.call_index, **call}]}


def _call(found: Delta) -> dict[str, Any]:
    """A call that has begun."""
    return {"id": found.id, "type": "function", "function": {"name": found.name, "arguments": ""}}


def _message(found: list[Delta]) -> dict[str, Any]:
    """The message of a whole answer, from all that was found in it."""
    content = "".join(each.text for each in found if each.kind == "content")
    reasoning = "".join(each.text for each in found if each.kind == "reasoning")
    calls: list[dict[str, Any]] = []
    for each in found:
        if each.kind == "call":
            calls.append(_call(each))
        elif each.kind == "arguments":
            calls[each.call_index]["function"]["arguments"] += each.text
    return {
        "role": "assistant",
        "content": content if content or not calls else None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        "reasoning": reasoning or None,
        **({"tool_calls": calls} if calls else {}),
        "refusal": None,
    }


def _template_kwargs(options: ServeOptions, fields: api.ChatFields) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if (effort := fields.reasoning_effort) is not None:
        kwargs["reasoning_effort"] = effort
        if effort != "minimal":
            kwargs["enable_thinking"] = effort != "none"
    return {**options.default_chat_template_kwargs, **kwargs, **(fields.chat_template_kwargs or {})}


def encode(model: ServedModel, call: Call, fields: api.ChatFields) -> tuple[str, list[int]]:
    """A chat's text and token ids. Raises ApiError."""
    source, continues = fields.chat_template, bool(fields.continue_final_message)
    if source is not None and not model.options.trust_request_chat_template:
        raise bad_request("chat_template: not taken from requests (--trust-request-chat-template)")
    left_out = LeftOut("messages")
    messages = template_values(fields.messages, left_out)
    note_ignored(model.options, call, left_out.names)
    check_characters(model, sum(_characters(message["content"]) for message in messages), "messages")
    tokenizer = model.tokenizer
    with refusing():
        return (tokenizer if source is None else tokenizer.with_template(source)).encode_chat(
            messages,
            None if fields.tool_choice == "none" else fields.tools,
            add_generation_prompt=not continues if (asked := fields.add_generation_prompt) is None else asked,
            continue_final_message=continues,
            chat_template_kwargs=_template_kwargs(model.options, fields),
            trust_special_tokens=model.options.trust_special_tokens,
        )


def _characters(content: Any) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


async def work_on_chat(front: Front, call: Call, work: Callable[[dict[str, Any]], Result], text: str) -> Result:
    """Returns what `work`, which renders and tokenizes, makes of the body of a chat. Raises ApiError. `text`: the field
    that is too long where the body is."""
    await call.receive()

    def sized(body: dict[str, Any]) -> Result:
        if call.size > limits.TEXT_BYTES:
            dropped = bytes_left_out(body.get("messages")) + bytes_left_out(body.get("input"))
            check_size(front.model, call.size - dropped, text)
        return work(body)

    return await front.pool.read(
        call, sized, lambda body: call.size <= 2 * SHORT and not {"tools", "chat_template"} & body.keys()
    )


def prepare(
    model: ServedModel, call: Call, body: dict[str, Any], text_grammars: Mapping[str, str] | None = None
) -> Prepared:
    """Checks and tokenizes a request; what `ChatAnswer` is made of. Raises ApiError. `text_grammars`: see
    check_tools."""
    fields = read(model, call, api.ChatFields, body)
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs: needs logprobs=true")
    asked = api.max_tokens(fields)
    k = None if not fields.logprobs else fields.top_logprobs or 0
    with refusing():
        choice = check_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls, text_grammars)
        wanted = api.structured(fields)
        params = api.sampling_fields(fields, model, asked, k, wanted)
        text, ids = encode(model, call, fields)
        prompt, room = fit(model, ids, fields, model.default_max_tokens if asked is None else asked, k)
        plan = model.parser.plan(text, choice, wanted)
    if plan.structured is not None:
        params["structured_outputs"] = plan.structured.given
    return Prepared(fields, [prompt], params, [room], plan)


async def chat(front: Front, call: Call) -> None:
    front.admission.admit(call.key)
    prepared = await work_on_chat(front, call, lambda body: prepare(front.model, call, body), "messages")
    await answer(ChatAnswer(front, call, prepared))
