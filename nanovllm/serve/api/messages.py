"""Checks a chat's messages; only text is taken, and nothing that they name is ever fetched."""

from typing import Any

from nanovllm.serve import limits
from nanovllm.serve.errors import bad_request

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates take them. Raises ApiError (400) naming the one that is wrong."""
    if not messages:
        raise bad_request("messages: must have at least one message", "messages")
    if len(messages) > limits.MESSAGES:
        raise bad_request(f"messages: must have at most {limits.MESSAGES}, found {len(messages)}", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role={str(role)[:50]!r}: must be one of {', '.join(ROLES)}", "messages")
    found: dict[str, Any] = {"role": role}
    calls = message.get("tool_calls")
    content = message.get("content")
    if content is None:
        if role != "assistant" or not calls:
            raise bad_request(f"{where}.content: is required", "messages")
        found["content"] = ""
    else:
        found["content"] = _content(content, f"{where}.content")
    if calls and role == "assistant":
        found["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise bad_request(f"{where}.{name}: must be a text", "messages")
            found[name] = value
    return found


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where}: must be a text, or a list of parts that is not empty", "messages")
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise bad_request(
                f"{where}[{index}].type={str(kind)[:50]!r}: must be 'text'; only text is taken", "messages"
            )
        text = part.get(kind)
        if not isinstance(text, str):
            raise bad_request(f"{where}[{index}].{kind}: must be a text", "messages")
        parts.append({"type": "text", "text": text})
    return parts


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > limits.TOOL_CALLS:
        raise bad_request(f"{where}: must be a list of at most {limits.TOOL_CALLS} calls", "messages")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}[{index}].function: must be an object with a name", "messages")
        if not isinstance(function.get("arguments", ""), (str, dict)):
            raise bad_request(f"{where}[{index}].function.arguments: must be a text", "messages")
    return calls
