"""Requests of OpenAI's Responses API, as chat completion requests. formats/responses.py has the answers."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from nanovllm.serve.api.fields import INSTEAD, DialectFields, DialectFormat, Likeliest, Positive
from nanovllm.serve.api.messages import LeftOut, function
from nanovllm.serve.api.responses_input import Item, messages_of
from nanovllm.serve.api.responses_tools import ResponsesTools, Tool, flat_name
from nanovllm.serve.errors import bad_request
from nanovllm.serve.limits import MESSAGES
from nanovllm.serve.parsers.tools import MAX_TOOLS


class ToolChoice(msgspec.Struct):
    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[dict[str, Any]] = []


class TextOptions(msgspec.Struct):
    format: DialectFormat | None = None
    verbosity: str | None = None


_LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_INCLUDABLE = {ENCRYPTED, _LOGPROBS}.union(
    "file_search_call.results web_search_call.results web_search_call.action.sources message.input_image.image_url "
    "computer_call_output.output.image_url code_interpreter_call.outputs".split()
)
_NOT_STORED = "nothing is stored between requests"


class ResponsesFields(DialectFields, kw_only=True):
    """Body of /v1/responses."""

    meaningless = frozenset(
        "store user service_tier safety_identifier prompt_cache_key prompt_cache_retention "
        "prompt_cache_options stream_options request_id moderation".split()
    )
    refused: ClassVar[Mapping[str, str]] = {
        **INSTEAD,
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "background"), _NOT_STORED),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "use max_output_tokens"),
        **dict.fromkeys(("response_format", "output_config", "output_format"), "use text.format"),
        "logprobs": f"use top_logprobs and include=[{_LOGPROBS!r}]",
    }
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES)]
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    """Comes back in the answer."""
    max_output_tokens: Positive | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    top_logprobs: Likeliest | None = None


def tools_of(fields: ResponsesFields) -> list[Tool]:
    """The request's tools, and those that are among its input; of each name the first."""
    items = fields.input if isinstance(fields.input, list) else ()
    found: dict[Any, Tool] = {}
    for number, tool in enumerate([*(fields.tools or ()), *(tool for item in items for tool in item.tools or ())]):
        found.setdefault((tool.type, tool.name) if tool.name else number, tool)
    return [*found.values()]


def chat_request(fields: ResponsesFields, tools: ResponsesTools, left_out: LeftOut) -> dict[str, Any]:
    """The chat completion request for a Responses request. Raises ApiError (400) naming the field that is wrong."""
    for name in fields.include or ():
        if name not in _INCLUDABLE:
            left_out.note(name, "include")
    request = fields.as_chat()
    if fields.max_output_tokens is not None:
        request["max_completion_tokens"] = fields.max_output_tokens
    request["messages"] = messages_of(fields.instructions, fields.input, left_out)
    choice = _tool_choice(fields.tool_choice)
    if tools.functions:
        request["tools"], request["tool_choice"] = tools.functions, choice
        if fields.parallel_tool_calls is not None:
            request["parallel_tool_calls"] = fields.parallel_tool_calls
    elif choice not in (None, "auto", "none"):
        raise bad_request("tool_choice: must be absent, 'auto' or 'none' where no tools are given")
    if effort := (fields.reasoning or {}).get("effort"):
        request["reasoning_effort"] = effort
    if fields.text is not None and (form := fields.text.format) is not None:
        request["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema}}
    if fields.truncation == "auto":
        request["truncate_prompt_tokens"] = -1
    if _LOGPROBS in (fields.include or ()):
        request["logprobs"], request["top_logprobs"] = True, fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise bad_request(f"top_logprobs: needs include=[{_LOGPROBS!r}]")
    return request


def _tool_choice(choice: str | ToolChoice | None) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "allowed_tools":
        return function(name=flat_name(choice.name or "", choice.namespace))
    listed = [function(name=flat_name(str(one.get("name")), one.get("namespace"))) for one in choice.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": listed}}
