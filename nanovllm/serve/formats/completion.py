"""The format of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from nanovllm.serve.api import fields as api
from nanovllm.serve.formats import shapes
from nanovllm.serve.formats.base import ChoicesFormat, num_bytes
from nanovllm.serve.formats.logprobs import TextPlace, completion_logprobs, token_formatter
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Prepared, Row
from nanovllm.serve.served_model import ServedModel


class CompletionFormat(ChoicesFormat):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    fast_suffix = b',"logprobs":null,"finish_reason":null}]}\n\n'

    fields: api.CompletionFields

    def __init__(self, served: ServedModel, call: Call, prepared: Prepared) -> None:
        super().__init__(served, call, prepared)
        as_ids = bool(prepared.fields.return_tokens_as_token_ids)
        self.name = token_formatter(served.tokenizer.token_bytes, as_ids, names_bytes=True)

    def fast_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def _echoed(self, row: Row) -> list[bytes | None]:
        """Log-probabilities of the prompt, where they are part of the text's."""
        lines = row.request.prompt_lines[row.prompt_index]
        return lines or [] if self.fields.echo and row.lines is not None else []

    def head_size(self, row: Row) -> int:
        return num_bytes(self._echoed(row))

    def head(self, row: Row) -> bytes:
        with_ids = bool(self.fields.return_token_ids)
        if not self.fields.echo and not with_ids:
            return b""
        prompt = self.prompts[row.prompt_index]
        logprobs = self._logprobs(row, self._echoed(row)) if self.fields.echo and row.lines is not None else None
        choice = {"index": row.index, "text": prompt.text or "", "logprobs": logprobs, "finish_reason": None}
        if with_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        return self.event(choice, row)

    def delta(self, row: Row, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None if row.lines is None else self._logprobs(row, row.lines)}

    def _logprobs(self, row: Row, lines: Sequence[bytes | None]) -> shapes.TextLogprobs:
        """Log-probabilities of tokens that follow those of the call before."""
        ids = self.prompts[row.prompt_index].token_ids
        if row.state is None:
            before = () if self.fields.echo else ids
            row.state = TextPlace(self.served.tokenizer.detokenizer(False, before).push)
        return completion_logprobs(lines, ids, self.k or 0, self.name, row.state)

    def choice(self, row: Row, text: str) -> dict[str, Any]:
        if self.fields.echo:
            text = (self.prompts[row.prompt_index].text or "") + text
        logprobs = None if row.lines is None else self._logprobs(row, [*self._echoed(row), *row.lines])
        return {"text": text, "logprobs": logprobs, **self.of_prompt(row.request, row.prompt_index)}
