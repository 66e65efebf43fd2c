"""Tools of the Responses API as functions of a chat, and calls of them back: namespaces, and custom tools, whose input
is text."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from nanovllm.errors import shown
from nanovllm.serve.api.messages import function
from nanovllm.serve.errors import bad_request
from nanovllm.serve.parsers.text_grammar import lark_of
from nanovllm.serve.parsers.tools import MAX_TOOLS


class Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    """Format of a custom tool's input."""
    tools: Annotated[list["Tool"], Meta(max_length=MAX_TOOLS)] | None = None
    """Tools of a namespace."""


class Called(NamedTuple):
    """Tool of the request that a function of the chat stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class ResponsesTools:
    """The tools of one request."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        """Raises ApiError (400) naming what is wrong."""
        self.functions: list[dict[str, Any]] = []
        """Functions in the form of a chat completion request."""
        self.ignored: list[str] = []
        """Kinds of tools that are ignored: those that a provider runs itself."""
        self.text_grammars: dict[str, str] = {}
        """Lark grammars of the inputs of custom tools, by the names of their functions."""
        self._called: dict[str, Called] = {}
        for i, tool in enumerate(tools):
            self._add(tool, f"tools[{i}]", None)

    def _add(self, tool: Tool, where: str, namespace: str | None) -> None:
        if tool.type not in ("function", "custom", "namespace") or (tool.type == "namespace" and namespace):
            self.ignored.append(f"tools.{tool.type}"[:100])
            return
        if not tool.name:
            raise bad_request(f"{where}.name: is required", code="missing_required_parameter")
        if tool.type == "namespace":
            for i, inner in enumerate(tool.tools or ()):
                self._add(inner, f"{where}.tools[{i}]", tool.name)
            return
        flat = flat_name(tool.name, namespace)
        self._called[flat] = Called(tool.name, namespace, tool.type == "custom")
        if tool.type == "custom":
            self.functions.append(self._custom(flat, tool, f"{where}.format"))
        else:
            about = {"description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
            self.functions.append(function(name=flat, **about))

    def _custom(self, flat: str, tool: Tool, where: str) -> dict[str, Any]:
        """A function of one text."""
        form, text = tool.format or {"type": "text"}, tool.description or ""
        if form.get("type") == "grammar":
            try:
                self.text_grammars[flat] = lark_of(form)
            except ValueError as error:
                raise bad_request(f"{where}: {error}") from None
            text += f"\n\nThe input follows this grammar ({form['syntax']}):\n{form['definition']}"
        elif form.get("type") != "text":
            raise bad_request(f"{where}.type={shown(form.get('type'))}: must be 'text' or 'grammar'")
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        return function(name=flat, description=text.strip(), parameters={**schema, "additionalProperties": False})

    def item(self, number: str, call_id: str, flat: str) -> dict[str, Any]:
        """The output item of a call that begins."""
        called = self._called.get(flat, Called(flat))
        kind, prefix, content = "function_call", "fc", "arguments"
        if called.is_custom:
            kind, prefix, content = "custom_tool_call", "ctc", "input"
        item = {"id": f"{prefix}_{number}", "type": kind, "call_id": call_id, "name": called.name, content: ""}
        return item if called.namespace is None else {**item, "namespace": called.namespace}


def flat_name(name: str, namespace: str | None) -> str:
    """A tool's name as a function of the chat."""
    return f"{namespace}__{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """The text that a call of a custom tool brings; "" of one that was cut."""
    try:
        return str(json.loads(arguments)["input"])
    except (ValueError, KeyError, TypeError):
        return ""
