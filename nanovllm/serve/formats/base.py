"""Base of formats: answers that follow OpenAI's schema of choices."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import ApiError
from nanovllm.serve.formats import shapes
from nanovllm.serve.formats.logprobs import prompt_entries, token_formatter
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Format, Prepared, Request, Row
from nanovllm.serve.served_model import ServedModel
from nanovllm.text.stops import VisibleText

_CONSTRAINTS = ("response_format", "structured_outputs", "tools")
"""Fields that a grammar is made of."""


class ChoicesFormat(Format):
    """A response with a choice for each row."""

    object_name = ""
    needs_ids = False
    fast_suffix = b""
    """End of a chunk that holds text alone: all after the text."""

    def __init__(self, served: ServedModel, call: Call, prepared: Prepared) -> None:
        fields, params, syntax, self.given = prepared.fields, prepared.params, prepared.syntax, prepared.given
        self.served, self.fields, self.prompts, self.params = served, fields, prepared.prompts, params
        self.id, self.model = call.given_id or self.id_prefix + call.request_id, fields.model or served.name
        self.created = int(time.time())
        options = fields.stream_options or api.StreamOptions()
        self.include_usage = bool(options.include_usage)
        self.usage_in_chunks = self.include_usage and bool(options.continuous_usage_stats)
        self.k: int | None = params.get("logprobs")
        self.show = token_formatter(served.tokenizer.token_bytes, bool(fields.return_tokens_as_token_ids))
        self._prompt_entries: dict[int, shapes.PromptLogprobs] = {}
        self._begin = b"data: " + msgspec.json.encode(self.common())[:-1] + b',"choices":['
        eos = () if params.get("ignore_eos") else served.info["eos_token_ids"]
        stop = params.get("stop") or ()
        self._skips = params.get("skip_special_tokens", True)
        self._text_options = (
            [stop] if isinstance(stop, str) else stop, params.get("include_stop_str_in_output", False),
            [*params.get("stop_token_ids", ()), *eos], {} if syntax is None else syntax.tags_seen(self._skips),
        )  # fmt: skip

    def row(self, index: int, prompt_index: int) -> Row:
        detokenizer = self.detokenizer(self._skips, self.prompts[prompt_index].token_ids)
        row = Row(index, prompt_index, VisibleText(detokenizer, *self._text_options))
        if self.fields.return_token_ids or self.needs_ids:
            row.ids = []
        if self.k is not None:
            row.lines = []
        row.prefix = self._begin + self.fast_prefix(index)
        return row

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        """A detokenizer for one row of a prompt."""
        return self.served.tokenizer.detokenizer(skip_special_tokens, prompt)

    def explain(self, error: ApiError) -> None:
        if error.code == "invalid_schema":
            given = (name for name in _CONSTRAINTS if getattr(self.fields, name, None) is not None)
            error.param = next(given, error.param)
            error.message = f"{error.param}: {error.message}"

    # -- what differs -------------------------------------------------------------------------------------------

    def common(self) -> dict[str, Any]:
        """Fields that begin a response, and each of its chunks."""
        own = {"id": self.id, "object": self.object_name, "created": self.created, "model": self.model}
        return own | {"system_fingerprint": self.served.fingerprint}

    def fast_prefix(self, index: int) -> bytes:
        """Beginning of the choice in a chunk that holds text alone: all before the text."""
        return b""

    def delta(self, row: Row, text: str) -> dict[str, Any]:
        """A chunk's choice without index and finish_reason."""
        raise NotImplementedError

    def choice(self, row: Row, text: str) -> dict[str, Any]:
        """A choice of an unstreamed response, likewise."""
        raise NotImplementedError

    # -- streamed -----------------------------------------------------------------------------------------------

    def chunk(self, row: Row, text: str) -> bytes:
        if row.end is None and row.ids is None and row.lines is None and not self.usage_in_chunks:
            return row.prefix + msgspec.json.encode(text) + self.fast_suffix
        return self.event(self.with_details(self.delta(row, text), row), row)

    def with_details(self, choice: dict[str, Any], row: Row) -> dict[str, Any]:
        """A chunk's choice with its end and with what was asked for beside the text."""
        choice = self._with_end(choice, row)
        if row.ids:
            if self.fields.return_token_ids:
                choice["token_ids"] = row.ids
            row.ids = []
        if row.lines:
            row.lines = []
        return choice

    def event(self, choice: dict[str, Any], row: Row) -> bytes:
        """A chunk with one choice, and with the usage so far where that is asked for."""
        if self.fields.return_token_ids:
            choice.setdefault("token_ids", [])
        usage = b',"usage":' + msgspec.json.encode(self.usage(row.request)) if self.usage_in_chunks else b""
        return self._begin + msgspec.json.encode(choice) + b"]" + usage + b"}\n\n"

    def _with_end(self, choice: dict[str, Any], row: Row) -> dict[str, Any]:
        choice = {"index": row.index, **choice, "finish_reason": self.finish_reason(row)}
        if row.end is not None and row.end.stop_reason is not None:
            choice["stop_reason"] = row.end.stop_reason
        return choice

    def end(self, request: Request) -> bytes:
        usage = msgspec.json.encode(self.usage(request)) if self.include_usage else b""
        return (self._begin + b'],"usage":' + usage + b"}\n\n" if usage else b"") + super().end(request)

    # -- unstreamed ---------------------------------------------------------------------------------------------

    def whole(self, request: Request) -> bytes:
        choices = []
        for row in request.rows:
            choice = {"stop_reason": None, **self._with_end(self.choice(row, "".join(row.pieces)), row)}
            choice["token_ids"] = row.ids if self.fields.return_token_ids else None
            choices.append(choice)
        about = {"service_tier": None, "kv_transfer_params": None, **self.about(request)}
        return msgspec.json.encode({**self.common(), "choices": choices, "usage": self.usage(request), **about})

    def about(self, request: Request) -> dict[str, Any]:
        """Fields of the whole answer beside its choices."""
        return {}

    def size(self, request: Request) -> tuple[int, int]:
        """Bytes that the answer is written from: of numbers, and about how many of text."""
        lines = [*request.prompt_lines, *(part for row in request.rows for part in (row.lines, row.kept))]
        echo = request.n * sum(len(prompt.text or "") for prompt in request.prompts)
        return sum(num_bytes(part) for part in lines if part is not None), 4 * request.num_output_tokens + echo

    def of_prompt(self, request: Request, prompt_index: int) -> dict[str, Any]:
        """Fields about a prompt; null where the request does not ask for them."""
        found: dict[str, Any] = {"prompt_token_ids": None, "prompt_logprobs": None}
        if self.fields.return_token_ids:
            found["prompt_token_ids"] = self.prompts[prompt_index].token_ids
        if (k := self.fields.prompt_logprobs) is not None:
            if prompt_index not in self._prompt_entries:
                entries = prompt_entries(request.prompt_lines[prompt_index] or [], k, self.show)
                self._prompt_entries[prompt_index] = shapes.written(entries)
            found["prompt_logprobs"] = self._prompt_entries[prompt_index]
        return found

    def usage(self, request: Request) -> shapes.Usage:
        given, output = request.num_prompt_tokens, request.num_output_tokens
        return shapes.Usage(given, output, given + output, shapes.PromptDetails(request.num_cached_tokens))


def num_bytes(lines: Sequence[bytes | None]) -> int:
    """Bytes of the numbers in some lines."""
    return sum(len(line) for line in lines if line is not None)
