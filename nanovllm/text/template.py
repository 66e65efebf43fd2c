"""Chat templates in a jinja2 sandbox: what the Hugging Face library renders, within a time limit."""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import Namespace

from nanovllm.text.system_messages import SystemMessages

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat; also its tools."""
RENDER_SECONDS = 2.0
_CONTINUE_HERE = "\U0010fffd continue here \U0010fffd"
"""Marks the end of a message that is to go on. A blank after it shows whether the template trims."""
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
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
        self.takes_parts = _walks_content(tree)
        """Whether the template goes through a content's parts; other templates want one text."""
        self._system = SystemMessages(lambda chat: self._fill(RENDER_SECONDS, messages=_readable(chat, self)))
        self.needs_parts = False
        self.needs_parts = self.takes_parts and self._loses_texts()
        literals = [node.data for node in tree.find_all(nodes.TemplateData)]
        literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self.literals = "\0".join(literals)
        """All text that the template itself can write."""

    def _loses_texts(self) -> bool:
        """Whether a content that is one text goes missing, without an error, as with templates that look for images."""
        try:
            return _CONTINUE_HERE not in self.render([{"role": "user", "content": _CONTINUE_HERE}])
        except ValueError:
            return False

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
        chat = self._system.placed(_readable(messages, self))
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        text = self._fill(
            seconds,
            **self.check_kwargs(chat_template_kwargs or {}),
            messages=chat,
            tools=list(tools) if tools else None,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
        )
        return _cut(text) if continue_final_message else text

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


def _readable(messages: Messages, template: ChatTemplate) -> list[dict[str, Any]]:
    """Messages as chat templates read them: nothing that is None, reasoning under each name that is in use, text parts
    joined into one text unless the template goes through parts itself, and one text as a part where it sees nothing
    else, arguments of tool calls as objects, `developer` as `system` unless the template knows it."""
    out = []
    for message in messages:
        message = {name: value for name, value in message.items() if value is not None}
        thoughts = next((message[field] for field in _REASONING_FIELDS if field in message), None)
        if thoughts is not None:
            message = {"thinking": thoughts, **message, "reasoning_content": thoughts}
        content = message.get("content")
        if isinstance(content, list) and not template.takes_parts:
            message["content"] = "\n".join(map(_text_of, content))
        elif isinstance(content, str) and template.needs_parts:
            message["content"] = [{"type": "text", "text": content}]
        if message.get("role") == "developer" and "developer" not in template.source:
            message["role"] = "system"
        if message.get("tool_calls"):
            message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        out.append(message)
    return out


def _text_of(part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError("messages: the parts of a content must be {'type': 'text', 'text': ...}")
    return str(part["text"])


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = json.loads(arguments or "{}")
        except ValueError:
            raise ValueError("messages: the arguments of a tool call must be a JSON object") from None
    return {**call, "function": function}


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


def _walks_content(tree: nodes.Template) -> bool:
    """Whether some loop of a template runs over a message's content, or over a name that was given it."""

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem):
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return isinstance(node, nodes.Getattr) and node.attr == "content"

    assigned = [each.target for each in tree.find_all(nodes.Assign) if is_content(each.node)]
    names = {target.name for target in assigned if isinstance(target, nodes.Name)} | {"content"}
    loops = (loop.iter for loop in tree.find_all(nodes.For))
    return any(is_content(over) or (isinstance(over, nodes.Name) and over.name in names) for over in loops)


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
