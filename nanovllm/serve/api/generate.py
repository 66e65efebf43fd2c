"""POST /inference/v1/generate: token ids in, token ids out, as vLLM's endpoint for trainers; nothing is tokenized."""

from collections.abc import Sequence
from typing import Any

import msgspec

from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.api import fields as api
from nanovllm.serve.api import shapes
from nanovllm.serve.api.answer import Answer, Prepared, answer, fit
from nanovllm.serve.api.completions import token_ids
from nanovllm.serve.api.logprobs import id_entries
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Completion
from nanovllm.serve.served_model import ServedModel
from nanovllm.text.no_tokenizer import NoText

_FILTERS = ("temperature", "top_p", "top_k", "min_p")


class GenerateAnswer(Answer):
    needs_ids = True

    def common(self) -> dict[str, Any]:
        return {"request_id": self.id}

    def fast_prefix(self, index: int) -> bytes:
        return b""

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        return NoText()

    def chunk(self, completion: Completion, text: str) -> bytes:
        choice = self._choice(completion)
        completion.ids, completion.lines = [], None if completion.lines is None else []
        return self._event(choice)

    def _choice(self, completion: Completion) -> dict[str, Any]:
        lines, reason = completion.lines, completion.finish_reason
        logprobs = None if lines is None else {"content": id_entries(lines, self.k or 0)}
        ids = completion.ids or []
        found = {"index": completion.index, "token_ids": ids, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            versions = completion.weight_versions or [(0, 0, completion.num_tokens)]
            found["stop_reason"] = completion.stop_reason
            found["weight_versions"] = [{"version": str(v), "start": begin, "end": end} for v, begin, end in versions]
        if self.params.get("sampling_mask"):
            found["sampling_mask"] = [_written(ids) for ids in completion.kept]
        return found

    def response(self) -> bytes:
        about = {"request_id": self.id, "output_mode": "tokens", "created": self.created, "model": self.model}
        choices = [self._choice(each) for each in self.completions]
        return msgspec.json.encode({**about, "choices": choices, "usage": self.usage(), **self.of_prompt(0)})


def _written(ids: bytes) -> list[int]:
    return shapes.written(memoryview(ids).cast("i").tolist())


def _prepare(model: ServedModel, call: Call, body: dict[str, Any]) -> Prepared:
    """Checks a request; what `GenerateAnswer` is made of. Raises ApiError."""
    given = read(model, call, api.GenerateFields, body)
    wanted = dict(given.sampling_params)
    masked = wanted.pop("sampling_mask", False)
    if masked is not False and (masked is not True or given.stream):
        raise bad_request("sampling_mask: must be true or false, and not with stream=true")
    names = ("model", "stream", "stream_options", "cache_salt", "priority", "return_token_ids")
    wanted |= {name: value for name in names if (value := getattr(given, name)) is not None}
    fields = read(model, call, api.CompletionFields, wanted | {"prompt": given.token_ids})
    if (asked := api.max_tokens(fields)) == 0:
        raise bad_request("max_tokens=0: must be >= 1", "sampling_params")
    prompt, room = fit(model, token_ids(model, given.token_ids), fields, asked, fields.logprobs)
    params = api.sampling_fields(fields, model, asked, fields.logprobs, api.structured(fields))
    if masked:
        if not SamplingParams(**{name: params[name] for name in _FILTERS if name in params}).filters:
            raise bad_request("sampling_mask: needs top_p, top_k or min_p: all ids are kept")
        params["sampling_mask"] = True
    if given.request_id is not None:
        call.name(given.request_id)
    return Prepared(fields, [prompt], params, [room])


async def generate(front: Front, call: Call) -> None:
    front.admission.admit(call.key)
    await call.receive()
    prepared = await front.pool.read(call, lambda body: _prepare(front.model, call, body))
    await answer(GenerateAnswer(front, call, prepared))
