"""Tools of a request: checked, and as pieces of a grammar."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from nanovllm.engine.sampling.grammar_limits import JSON_BLANKS, check_text
from nanovllm.engine.sampling.json_schema import Schema, schemas_in
from nanovllm.serve.parsers.text_grammar import before, in_json
from nanovllm.serve.parsers.values import Document

MAX_TOOLS = 128
MAX_GRAMMAR_BYTES = 120 * 1024
"""Maximum bytes of the schemas of all tools together; the engine takes grammars of 128 KiB."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_REGULAR = re.compile(r"\(\?<?[=!]|\\[bBckZ0-9]|\[\^?\]")
"""Matches parts of patterns that no grammar can say: look-around, ends of words, references, JavaScript's own."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Schema
    """A JSON schema of its arguments."""
    strict: bool = False
    """Whether what of the schema no grammar can say is refused; if not, it is left out."""
    text_grammar: str | None = None
    """Lark grammar of its text, where that is all that it takes: {"input": text}."""
    is_held: bool = True
    """Whether its arguments are held to the schema; if not, they may be any JSON object."""

    @cached_property
    def document(self) -> Document:
        """The schema of its arguments, by its parts."""
        return Document(self.parameters, self.strict)

    @cached_property
    def arguments(self) -> str:
        """The arguments as a term of a Lark grammar. Raises ValueError where there is none."""
        if self.text_grammar is not None:
            return f'/\\{{ ?"input" ?: ?"/ {self.text_term()} /" ?\\}}/'
        return json_term(self.parameters if self.is_held else {"type": "object"}, lenient=not self.strict)

    def text_bound(self, schema: Any) -> str | None:
        """The texts that a part of its schema admits, see Document.text. Raises ValueError naming the tool."""
        try:
            return self.document.text(schema)
        except ValueError as error:
            raise ValueError(f"tools: function {self.name!r}: {error}") from None

    def text_term(self, end: str | None = None) -> str:
        """The term of the tool's text: with the term `end` behind it, or as JSON writes it. Raises ValueError where
        there is none."""
        assert self.text_grammar is not None
        try:
            return in_json(self.text_grammar) if end is None else before(end, self.text_grammar)
        except ValueError as error:
            raise ValueError(f"tools: the format of {self.name!r}: {error}") from None


@dataclass(frozen=True)
class ToolChoice:
    """Tools that may be called in an answer, and whether they must be."""

    tools: tuple[Tool, ...]
    """Tools, with their schemas; if these are too long together, only strict ones are held to theirs."""
    mode: Literal["auto", "required", "named"]
    parallel: bool
    """Whether an answer may hold more than one call."""

    def freed(self) -> "ToolChoice":
        """The choice whose tools may have any arguments, unless they are strict."""
        tools = (replace(tool, is_held=tool.strict or tool.text_grammar is not None) for tool in self.tools)
        return replace(self, tools=tuple(tools))


def json_term(schema: Mapping[str, Any], lenient: bool = False) -> str:
    """JSON that a schema admits, as a term of a Lark grammar."""
    options = {"whitespace_pattern": JSON_BLANKS, **({"lenient": True} if lenient else {})}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def check_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any = None,
    parallel_tool_calls: bool | None = None,
    text_grammars: Mapping[str, str] | None = None,
) -> ToolChoice | None:
    """The tools that an answer may call; None for none (no tools, or tool_choice "none"). Raises ValueError naming the
    field and its bound. `text_grammars`: Lark grammars of tools that take one text, by their names."""
    if tools is None:
        if tool_choice not in (None, "none"):
            raise ValueError("tool_choice: must be absent or 'none' where no tools are given")
        return None
    if not isinstance(tools, Sequence) or not 1 <= len(tools) <= MAX_TOOLS:
        raise ValueError(f"tools: must be a list of 1 to {MAX_TOOLS} tools")
    checked = tuple(_checked(tool, f"tools[{i}]", text_grammars or {}) for i, tool in enumerate(tools))
    names = [tool.name for tool in checked]
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
        raise ValueError(f"tools: must have different names, {twice!r} is there twice")
    mode, checked = _chosen(tool_choice, checked)
    if mode == "none":
        return None
    choice = ToolChoice(checked, mode, parallel_tool_calls is not False and mode != "named")
    is_long = sum(len(tool.text_grammar or tool.arguments) for tool in checked) > MAX_GRAMMAR_BYTES
    return choice.freed() if is_long else choice


def _chosen(choice: Any, tools: tuple[Tool, ...]) -> tuple[Any, tuple[Tool, ...]]:
    """The mode of a tool_choice, and the tools that it names, each once."""
    known = {tool.name: tool for tool in tools}
    if choice is None or choice in ("none", "auto", "required"):
        return choice or "auto", tools
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools")
        allowed = allowed if isinstance(allowed, Mapping) else {}
        listed = allowed.get("tools")
        if isinstance(listed, list) and listed and allowed.get("mode") in ("auto", "required"):
            names = dict.fromkeys(_named(one, known) for one in listed)
            return allowed["mode"], tuple(known[name] for name in names)
    elif isinstance(choice, Mapping):
        return "named", (known[_named(choice, known)],)
    raise ValueError("tool_choice: must be 'none', 'auto', 'required' or the name of a function")


def _named(choice: Any, known: Collection[str]) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"tool_choice: function.name={str(name)[:64]!r}: must be the name of one of the tools")
    return name


def _checked(tool: Any, where: str, text_grammars: Mapping[str, str]) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise ValueError(f'{where}: must be {{"type": "function", "function": {{...}}}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}.function.name={str(name)[:80]!r}: must be 1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("description"), (str, type(None))):
        raise ValueError(f"{where}.function.description: must be a text")
    strict, parameters = function.get("strict"), function.get("parameters")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError(f"{where}.function.strict: must be true or false")
    parameters = {"type": "object"} if parameters is None else parameters
    check_schema(parameters, f"{where}.function.parameters")
    _check_form(parameters, f"{where}.function.parameters")
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"{where}.function.parameters: must be the schema of an object")
    if not strict:
        parameters = deepcopy(parameters)
        for part in schemas_in(parameters):
            if isinstance(pattern := part.get("pattern"), str) and _NOT_REGULAR.search(pattern):
                del part["pattern"]
    return Tool(name, {**parameters, "type": "object"}, bool(strict), text_grammars.get(name))


def check_schema(schema: Any, where: str) -> None:
    """Bounds of a JSON schema that a client sends. Raises ValueError naming `where` and the bound."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: must be a JSON schema, an object")
    try:
        check_text("json", json.dumps(schema))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_form(schema: Mapping[str, Any], where: str) -> None:
    """Checks that what parsers read of a schema has the types that they expect. Raises ValueError naming the entry."""
    if not isinstance(schema.get("required"), (list, type(None))):
        raise ValueError(f"{where}.required: must be a list")
    for name in ("properties", "$defs", "definitions"):
        entries = schema.get(name)
        if not isinstance(entries, (Mapping, type(None))):
            raise ValueError(f"{where}.{name}: must be an object")
        for key, value in (entries or {}).items():
            if isinstance(value, Mapping) and not isinstance(value.get("enum"), (list, type(None))):
                raise ValueError(f"{where}.{name}.{key[:80]}.enum: must be a list")
