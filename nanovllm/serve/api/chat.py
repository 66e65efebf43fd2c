"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import check_characters, check_size, fit
from nanovllm.serve.api.messages import LeftOut, bytes_left_out, template_values
from nanovllm.serve.api.reading import note_ignored, read
from nanovllm.serve.errors import bad_request, refusing
from nanovllm.serve.http.call import Call
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.parsers import check_tools
from nanovllm.serve.request import Prepared
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import SHORT


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
    note_ignored(model.options, call, *left_out.names)
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


def is_short(call: Call, body: dict[str, Any]) -> bool:
    """Whether there is little to render and to tokenize."""
    return call.size <= 2 * SHORT and not {"tools", "chat_template"} & body.keys()


def check_body(model: ServedModel, call: Call, body: dict[str, Any], name: str) -> None:
    """Raises ApiError where the body of a chat is longer than the context is worth. `name`: of its longest field."""
    if call.size > limits.TEXT_BYTES:
        size = call.size - bytes_left_out(body.get("messages")) - bytes_left_out(body.get("input"))
        check_size(model, size, "bytes of text, tools and template variables", name)


def prepare(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks and tokenizes a request; what its answer is made of. Raises ApiError."""
    check_body(model, call, body, "messages")
    return prepare_chat(model, call, body)


def prepare_chat(
    model: ServedModel, call: Call, body: dict[str, Any], text_grammars: Mapping[str, str] | None = None
) -> Prepared:
    """Likewise, of a chat in any dialect. `text_grammars`: see check_tools."""
    fields = read(model, call, api.ChatFields, body)
    if fields.top_logprobs and not fields.logprobs:
        raise bad_request("top_logprobs: needs logprobs=true")
    asked = api.max_tokens(fields)
    k = None if not fields.logprobs else fields.top_logprobs or 0
    with refusing():
        choice = check_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls, text_grammars)
        wanted = api.structured(fields)
        params = api.sampling_fields(fields, model.defaults, asked, k, wanted)
        text, ids = encode(model, call, fields)
        prompt, room = fit(model, ids, fields, model.default_max_tokens if asked is None else asked, k)
        syntax = model.parser.syntax(text, choice, wanted)
    if syntax.structured is not None:
        params["structured_outputs"] = syntax.structured.given
    return Prepared(fields, [prompt], params, [room], syntax)
