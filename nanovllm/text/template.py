"""Chat templates in a jinja2 sandbox: what the Hugging Face library renders, within a time limit."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache, cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from nanovllm.text.call_messages import CallMessages
from nanovllm.text.system_messages import Chat, SystemMessages

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat; also its tools."""
RENDER_SECONDS = 2.0
_CONTINUE_HERE = "\U0010fffd continue here \U0010fffd"
"""Marks the end of a message that is to go on. A blank after it shows whether the template trims."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": ["x"]}
_TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": _PARAMETERS}}]
"""Tools beside which a template shows calls."""
_OWN_VARIABLES = frozenset(
    "messages tools documents add_generation_prompt continue_final_message chat_template tokenize conversation "
    "return_dict return_tensors padding truncation max_length tokenizer_kwargs".split()
)
"""Variables that the renderer sets itself: a request that could set one of them would steer it (CVE-2025-62426)."""


class ChatTemplate:
    """One compiled template. From any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: what the template sees as bos_token, eos_token and so on. Raises ValueError where the
        source is no jinja2."""
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template: not valid jinja2: {error}") from error
        self._fixed = _OWN_VARIABLES.union(self._special_tokens, self._environment.globals)
        self.variables = frozenset(meta.find_undeclared_variables(tree)) - self._fixed
        """Variables that `chat_template_kwargs` may set: those that the template mentions and does not set itself."""
        self._system = SystemMessages(lambda chat: self._probe(_readable(chat, self)))
        self._calls = CallMessages(self._probe_calls, source)
        self.parts_of = cache(self._parts_of)
        """Whether the template goes through the parts of a role's content, where others want one text; and whether it
        shows nothing else, as with templates that look for images."""
        literals = [node.data for node in tree.find_all(nodes.TemplateData)]
        literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literals = "\0".join(literals)
        """All text that the template itself can write."""

    def _probe(self, chat: Chat, **values: Any) -> str:
        """A chat as it is, rendered; "" where the template refuses it."""
        try:
            return self._fill(RENDER_SECONDS, messages=chat, **values)
        except ValueError:
            return ""

    def _probe_calls(self, chat: Chat) -> str:
        """A chat rendered beside tools, or without any where the template wants it so; "" where it refuses both."""
        return self._probe(chat, tools=_TOOLS, add_generation_prompt=True) or self._probe(
            chat, add_generation_prompt=True
        )

    def _parts_of(self, role: str) -> tuple[bool, bool]:
        marks = ("probe1x", "probe2x")
        as_text, as_parts = (
            self._around(role, content, marks)
            for content in ("\n".join(marks), [{"type": "text", "text": mark} for mark in marks])
        )
        takes = as_parts is not None and (as_text is None or as_text == as_parts)
        return takes, takes and as_text is None

    def _around(self, role: str, content: Any, marks: tuple[str, str]) -> tuple[str, str] | None:
        """Text before and after a message's marks in a rendered chat; None where these go missing."""
        user: dict[str, Any] = {"role": "user", "content": "x"}
        called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "x"}}]}
        before = {"assistant": [user], "tool": [user, called]}.get(role, [])
        after = [] if role in ("user", "tool") else [user]
        try:
            message = {"role": role, "content": content, "tool_call_id": "1"}
            text = self._probe_calls(self._calls.placed([*before, message, *after]))
        except ValueError:
            return None
        first, second = text.find(marks[0]), text.find(marks[1])
        return (text[:first], text[second:]) if 0 <= first < second else None

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Selects the `kwargs` that the template mentions. Raises ValueError for the renderer's own variables."""
        own = sorted(self._fixed.intersection(kwargs))
        if own:
            raise ValueError(f"chat_template_kwargs: must not hold {own[0]!r}: the server sets it")
        return {name: value for name, value in kwargs.items() if name in self.variables}

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Any] | None = None,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """The chat as text. Raises ValueError as `check_kwargs`, with what the template says where it refuses the
        messages, and where it takes longer than `seconds`."""
        if not messages:
            raise ValueError("messages: must hold at least one message")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message: cannot be true together with add_generation_prompt")
        chat = self._calls.placed(self._system.placed(_readable(messages, self)))
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        text = self._fill(
            seconds,
            **self.check_kwargs(chat_template_kwargs or {}),
            messages=chat,
            tools=self._shown_tools(tools) if tools else None,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
        )
        return _cut(text) if continue_final_message else text

    def _shown_tools(self, tools: Messages) -> list[Mapping[str, Any]]:
        """Tools as the template takes them: with a description and parameters, where it refuses those without."""
        return list(tools) if self._takes_bare_tools else [{**tool, "function": _whole(tool)} for tool in tools]

    @cached_property
    def _takes_bare_tools(self) -> bool:
        bare = {"name": "look"}, {"name": "look", "parameters": {"type": "object"}}
        chat: Chat = [{"role": "user", "content": "x"}]
        return all(self._probe(chat, tools=[{"type": "function", "function": each}]) for each in bare)

    def _fill(self, seconds: float, **values: Any) -> str:
        """The text that the template writes with these variables. Raises ValueError as `render`."""
        values = {**self._special_tokens, "tools": None, "documents": None, **values}
        try:
            with self._environment.deadline(seconds):
                return self._template.render(values)
        except TimeoutError as error:
            raise ValueError(f"messages: the chat template takes longer than {seconds} s") from error
        except Exception as error:  # whatever a template raises about what it is given
            raise ValueError(f"messages: the chat template cannot render them: {str(error)[:300]}") from error


def _whole(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's function with all that OpenAI's API leaves to the client."""
    given = {name: value for name, value in tool.get("function", {}).items() if value is not None}
    parameters = {"type": "object", "properties": {}, **given.get("parameters", {})}
    return {"description": "", **given, "parameters": parameters}


def _readable(messages: Messages, template: ChatTemplate) -> Chat:
    """Messages as chat templates read them: nothing that is None, reasoning under each name that is in use, text parts
    joined into one text beside calls and unless the template goes through parts itself, and one text as a part where
    it sees nothing else, `developer` as `system` unless the template knows it."""
    out = []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        thoughts = next((message[field] for field in _REASONING_FIELDS if field in message), None)
        if thoughts is not None:
            message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
        if message.get("role") == "developer" and "developer" not in template.source:
            message["role"] = "system"
        content, (takes_parts, needs_parts) = message.get("content"), template.parts_of(str(message.get("role")))
        if isinstance(content, list) and (message.get("tool_calls") or not takes_parts):
            message["content"] = content = "\n".join(map(_text_of, content))
        if isinstance(content, str) and needs_parts:
            message["content"] = [{"type": "text", "text": content}]
        out.append(message)
    return out


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError("messages: the parts of a content must be {'type': 'text', 'text': ...}")
    return str(part["text"])


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The last message with a mark at the place from which it is to go on."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _CONTINUE_HERE + " "}
    texts = [i for i, part in enumerate(content or ()) if isinstance(part, Mapping) and "text" in part]
    if not texts:
        raise ValueError("continue_final_message: the last message has no text to go on from")
    parts = list(content or ())
    parts[texts[-1]] = {**parts[texts[-1]], "text": parts[texts[-1]]["text"] + _CONTINUE_HERE + " "}
    return {**message, "content": parts}


def _cut(text: str) -> str:
    """The rendered text up to the mark."""
    at = text.rfind(_CONTINUE_HERE)
    if at < 0:
        raise ValueError("continue_final_message: the chat template leaves out the last message")
    trims = not text.startswith(" ", at + len(_CONTINUE_HERE))
    return text[:at].rstrip() if trims else text[:at]


class _Deadline(threading.local):
    at = float("inf")


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with what chat templates expect to find, and a look at the clock at every access to a value."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._deadline = _Deadline()
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": _PlainDict(),
            "namespace": _PlainNamespace,
        }

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Limits the seconds for which the calling thread may render."""
        self._deadline.at = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline.at = float("inf")

    def _look_at_clock(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise TimeoutError

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._look_at_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._look_at_clock()
        return super().getitem(obj, argument)

    def call(self, /, *args: Any, **kwargs: Any) -> Any:
        self._look_at_clock()
        return super().call(*args, **kwargs)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %} marks what an assistant says, for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it off the class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _PlainDict:
    """`dict` for templates, with nothing of its Python type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterator[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _PlainNamespace(Namespace):
    """`namespace` for templates, closed to names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` may be an attribute
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace must not hold {name!r}")
