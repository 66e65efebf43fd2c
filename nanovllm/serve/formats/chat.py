"""The format of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

import msgspec

from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats import shapes
from nanovllm.serve.formats.base import ChoicesFormat
from nanovllm.serve.formats.logprobs import chat_entries
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import Delta, joined
from nanovllm.serve.parsers.tags import MarkedDetokenizer
from nanovllm.serve.request import Prepared, Request, Row
from nanovllm.serve.served_model import ServedModel


class ChatFormat(ChoicesFormat):
    id_prefix = "chatcmpl-"
    fast_suffix = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def __init__(self, served: ServedModel, call: Call, prepared: Prepared) -> None:
        assert prepared.syntax is not None
        self.syntax = prepared.syntax
        self.texts: list[MarkedDetokenizer] = []
        """Detokenizers that count the tokens of reasoning."""
        self.object_name = "chat.completion.chunk" if prepared.fields.stream else "chat.completion"
        super().__init__(served, call, prepared)

    def row(self, index: int, prompt_index: int) -> Row:
        row = super().row(index, prompt_index)
        row.reader = self.syntax.reader()
        return row

    def explain(self, error: ApiError) -> None:
        super().explain(error)
        if error.code == "invalid_schema" and (self.syntax.choice is not None or self.syntax.reasoning != "none"):
            # without the grammar that the schemas were made part of
            name, why = self.syntax.blame(error.message.rpartition(" must compile, but: ")[2])
            error.param = error.param if name is None else "tools"
            error.message = f"{error.param}: " + ("" if name is None else f"function {name!r}: ") + why
        if error.param == "logprobs":
            error.param, error.message = "top_logprobs", f"top_{error.message}"

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        if self.syntax.program is None:
            return super().detokenizer(skip_special_tokens, prompt)
        self.texts.append(self.syntax.detokenizer(skip_special_tokens, prompt))
        return self.texts[-1]

    def fast_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"delta":{"content":' % index

    def head(self, row: Row) -> bytes:
        choice = {"index": row.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        head = self.event({**choice, "finish_reason": None}, row)
        if self.fields.return_token_ids:
            ids = msgspec.json.encode({"prompt_token_ids": self.prompts[0].token_ids})
            head = head.removesuffix(b"}\n\n") + b"," + ids[1:] + b"\n\n"
        return head

    def delta(self, row: Row, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}, "logprobs": self._logprobs(row)}

    def chunk(self, row: Row, text: str) -> bytes:
        """The chunk for a text; with a reader, one for each kind of thing that it found in the text."""
        if row.reader is None:
            return super().chunk(row, text)
        found = self.read(row, text)
        if row.end is None and not row.lines and not row.ids and not self.usage_in_chunks:
            if not found:
                return b""
            if len(found) == 1 and found[0].kind == "content":
                return row.prefix + msgspec.json.encode(found[0].text) + self.fast_suffix
        *before, last = [_delta(each) for each in joined(found)] or [{}]
        shape = {"index": row.index, "finish_reason": None, "logprobs": None}
        events = [self.event({**shape, "delta": delta}, row) for delta in before]
        choice = {"delta": last, "logprobs": self._logprobs(row)}
        return b"".join([*events, self.event(self.with_details(choice, row), row)])

    def read(self, row: Row, text: str) -> list[Delta]:
        """Reads a text: content, reasoning and calls in it."""
        if row.reader is None:
            return [Delta("content", text)] if text else []
        deltas: list[Delta] = row.reader.push(text)
        return deltas if row.end is None else deltas + row.reader.finish()

    def choice(self, row: Row, text: str) -> dict[str, Any]:
        return {"message": _message(joined(self.read(row, text))), "logprobs": self._logprobs(row)}

    def about(self, request: Request) -> dict[str, Any]:
        return self.of_prompt(request, 0)

    def finish_reason(self, row: Row) -> str | None:
        return None if row.end is None else self.syntax.finish_reason(row.end.reason, row.reader)

    def usage(self, request: Request) -> shapes.Usage:
        usage = super().usage(request)
        if self.syntax.reasoning != "none":
            count = sum(text.num_reasoning_tokens for text in self.texts)
            usage.completion_tokens_details = shapes.OutputDetails(count)
        return usage

    def _logprobs(self, row: Row) -> dict[str, Any] | None:
        return None if row.lines is None else {"content": self.entries(row.lines), "refusal": None}

    def entries(self, lines: list[bytes]) -> list[shapes.ContentToken]:
        """Log-probabilities as chats show them."""
        return chat_entries(lines, self.k or 0, self.show, self.served.tokenizer.token_bytes)


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
