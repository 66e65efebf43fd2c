"""Calls of tools, and what was said and thought beside them, in the form in which a chat template shows all of it."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import blake2b
from itertools import product
from typing import Any, NamedTuple

from nanovllm.text.system_messages import Chat

_SHORT_ID = re.compile("[A-Za-z0-9]{9}")
_PART_OF_THOUGHTS = re.compile(r"""== *['"]thinking['"]""")
_COMMENTARY = "<|end|><|start|>assistant<|channel|>commentary<|message|>"
"""Tokens between thoughts and words before a call in OpenAI's harmony format."""
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*("?)|[{}\[\],:]|[^\s{}\[\],:"]+', re.DOTALL)
"""A token of JSON; the group is the end of a string, which a text may lack."""
_ESCAPE = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u[dD][89a-fA-F]\w\w|\\.")
"""An escape in JSON; one of six characters is half a surrogate pair, which is no text."""


class CallMessages:
    """The form in which a template wants calls, found out by renderings when it is first asked for."""

    def __init__(self, render: Callable[[Chat], str], source: str) -> None:
        """`render`: writes a chat as it is; "" where the template refuses it. `source`: of the template."""
        self._render, self._knows_calls = render, "tool_calls" in source
        self._is_lfm2 = "List of tools: " in source
        self._ways = [_together, _apart]
        if "<|channel|>" in source:
            self._ways.append(_in_channels)
        if _PART_OF_THOUGHTS.search(source):
            self._ways.append(_in_parts)
        self._best: dict[tuple[bool, bool], _Way] = {}

    def placed(self, chat: Chat) -> Chat:
        """The chat as the template shows all of it. Raises ValueError where calls in it would go missing."""
        if not (self._knows_calls or self._is_lfm2) or not any(message.get("tool_calls") for message in chat):
            return chat
        if not self._knows_calls:
            return [_as_words(message) if message.get("tool_calls") else message for message in chat]
        if (form := self._form) is None:
            raise ValueError("messages: the chat template shows no tool call in any form that the server knows")
        groups: list[Chat] = []
        """Messages, each with the results that follow it."""
        for message in chat:
            if message.get("role") == "tool" and groups:
                groups[-1].append(form.result(message))
            else:
                groups.append([form.message(message) if message.get("tool_calls") else message])
        return form.renamed([one for message, *results in groups for one in self._called(form, message, results)])

    def _called(self, form: "_Form", message: dict[str, Any], results: Chat) -> Chat:
        """A message and its results; where the template shows one call of a message, one after the other."""
        calls = message.get("tool_calls") or []
        if not calls:
            return [message, *results]
        if len(calls) == 1 or self._shows_two:
            return [*self._arranged(form, message), *results]
        ids = [call.get("id") for call in calls]
        by_id = len({*ids}) == len(ids) and {*ids}.issuperset(result.get("tool_call_id") for result in results)
        out: Chat = []
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": message["role"], "content": form.empty}
            out += self._arranged(form, {**said, "tool_calls": [call]})
            end = number + 1 if number + 1 < len(calls) else len(results)
            out += [one for one in results if one["tool_call_id"] == ids[number]] if by_id else results[number:end]
        return out

    # -- what the template shows --------------------------------------------------------------------------------

    @cached_property
    def _form(self) -> "_Form | None":
        """The first form in which a call is shown with its arguments."""
        forms = (_Form(*each) for each in product(("", None), (False, True), ("given", "short", "named")))
        return next((form for form in forms if self._count([form.message(_said(1))], form, 1) == 2), None)

    @cached_property
    def _shows_two(self) -> bool:
        form = self._form
        return form is not None and self._count([form.message(_said(2))], form, 2) == 4

    def _arranged(self, form: "_Form", message: dict[str, Any]) -> Chat:
        """A message in the way in which most of what is said and thought beside a call is seen."""
        key = has_words, has_thoughts = bool(message.get("content")), "reasoning_content" in message
        if key not in self._best:
            probe = form.message(_said(1, "probewords" if has_words else "", has_thoughts))
            counts = [self._count(way(probe, form.empty), form, 1) for way in self._ways]
            self._best[key] = self._ways[counts.index(max(counts))]
        return self._best[key](message, form.empty)

    def _count(self, messages: Chat, form: "_Form", num_calls: int) -> int:
        """Number of marks, of `_said`, that the template shows."""
        results = [{"role": "tool", "tool_call_id": _probe_id(i), "content": "x"} for i in range(num_calls)]
        text = self._render(form.renamed([{"role": "user", "content": "x"}, *messages, *map(form.result, results)]))
        return len({*re.findall(r"probe(?:name|value)\d|probewords|probethoughts", text)})


class _Form(NamedTuple):
    """Form of a message with calls."""

    empty: str | None
    """Content where nothing is said."""
    as_text: bool
    """Whether arguments are a text, not an object."""
    ids: str
    """"given"; "short": nine letters and digits, as Mistral's templates ask for; "named": with the function's name,
    which Kimi-K2's show nowhere else."""

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if not content or (self.empty is None and isinstance(content, str) and not content.strip()):
            content = self.empty
        calls = [self._call(call, number) for number, call in enumerate(message["tool_calls"])]
        return {**message, "content": content, "tool_calls": calls}

    def result(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if self.ids != "short":
            return dict(message)
        return {**message, "tool_call_id": self._id(str(message.get("tool_call_id", 0)))}

    def _call(self, call: Mapping[str, Any], number: int) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        given = function.get("arguments", {})
        found = given if isinstance(given, Mapping) else arguments(given)
        function["arguments"] = json.dumps(found, ensure_ascii=False) if self.as_text else found
        made = {**call, "function": function}
        return made | {"id": self._id(str(call.get("id", number)))} if self.ids == "short" else made

    def renamed(self, chat: Chat) -> Chat:
        """The chat with ids as Kimi-K2 writes them, counted through it, where these are to be named."""
        if self.ids != "named":
            return chat
        names, count, out = dict[Any, str](), 0, []
        for message in chat:
            calls = []
            for call in message.get("tool_calls") or ():
                names[call.get("id")] = name = f"functions.{call['function'].get('name')}:{count}"
                calls.append({**call, "id": name})
                count += 1
            given = message.get("tool_call_id")
            result = {"tool_call_id": names.get(given, given)} if message.get("role") == "tool" else {}
            out.append({**message, **({"tool_calls": calls} if calls else {}), **result})
        return out

    def _id(self, given: str) -> str:
        return given if _SHORT_ID.fullmatch(given) else blake2b(given.encode(errors="replace")).hexdigest()[:9]


_Way = Callable[[dict[str, Any], str | None], Chat]
"""Takes a message with calls, and the content where nothing is said; returns the messages that show it."""


def _together(message: dict[str, Any], empty: str | None) -> Chat:
    return [message]


def _apart(message: dict[str, Any], empty: str | None) -> Chat:
    """Makes what was said and thought a message of its own."""
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return [said, {"role": message["role"], "content": empty, "tool_calls": message["tool_calls"]}]


def _in_channels(message: dict[str, Any], empty: str | None) -> Chat:
    """Puts words behind thoughts as harmony writes them; its template takes one of the two."""
    if not isinstance(message["content"], str):
        return [message]
    said = f"{message.get('thinking', '')}{_COMMENTARY}{message['content']}"
    return [{**message, "content": empty, "thinking": said}]


def _as_words(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its calls as LFM2 writes them, for its first template, which knows no other form."""
    said = _Form("", False, "given").message(message)
    functions = [call["function"] for call in said.pop("tool_calls")]
    pairs = [", ".join(f"{key}={_of_python(value)}" for key, value in each["arguments"].items()) for each in functions]
    calls = ", ".join(f"{each['name']}({given})" for each, given in zip(functions, pairs, strict=True))
    return {**said, "content": f"{said['content']}<|tool_call_start|>[{calls}]<|tool_call_end|>"}


def _of_python(value: Any) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _in_parts(message: dict[str, Any], empty: str | None) -> Chat:
    """Makes what was thought a part of the content, as Ministral 3 wants it."""
    if "thinking" not in message or not isinstance(message["content"], str | None):
        return [message]
    words = [{"type": "text", "text": message["content"]}] if message["content"] else []
    return [{**message, "content": [{"type": "thinking", "thinking": message["thinking"]}, *words]}]


def _said(num_calls: int, words: str = "", thinks: bool = False) -> dict[str, Any]:
    """A message that probes a template."""
    functions = [{"name": f"probename{i}", "arguments": {"x": f"probevalue{i}"}} for i in range(num_calls)]
    calls = [{"id": _probe_id(i), "type": "function", "function": each} for i, each in enumerate(functions)]
    thoughts = dict.fromkeys(("thinking", "reasoning_content"), "probethoughts") if thinks else {}
    return {"role": "assistant", "content": words, **thoughts, "tool_calls": calls}


def _probe_id(number: int) -> str:
    return f"call_probe_{number}"


def arguments(text: str) -> dict[str, Any]:
    """Arguments of a call as an object: of a text that was cut, what is whole in it; any other text as its only
    entry, so that nothing is lost."""
    text = _ESCAPE.sub(lambda found: r"\ufffd" if len(found[0]) == 6 else found[0], text)
    for read in (json.loads, _begun):
        try:
            found = read(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {"arguments": text} if text.strip() else {}


def _begun(text: str) -> Any:
    """The JSON value that a text begins: a string that is cut is closed, other parts that are not whole are left out.
    Raises ValueError where it begins none."""
    end, last, before = 0, "", ""
    closing: list[str] = []
    for found in _TOKEN.finditer(text):
        token = found[0]
        is_value = before == ":" or (before != "" and closing[-1:] == ["]"])
        if token in ("{", "["):
            closing.append("}" if token == "{" else "]")
            end, last = found.end(), ""
        elif token in ("}", "]"):
            if closing[-1:] != [token]:
                raise ValueError(token)
            closing.pop()
            end, last = found.end(), ""
        elif token.startswith('"') and is_value:
            end, last = (found.end(), "") if found[1] else (found.start(), _closed(token))
        elif token not in (",", ":") and is_value and found.end() < len(text):
            end, last = found.end(), ""
        before = token
    return json.loads(text[:end] + last + "".join(reversed(closing)))


def _closed(string: str) -> str:
    """A JSON string that was cut, without the escape in which it was."""
    return re.sub(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$", r"\1", string) + '"'

