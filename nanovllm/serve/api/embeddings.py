"""POST /v1/embeddings: vectors of texts, by a server whose model has a pooling (--runner pooling)."""

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import msgspec

from nanovllm.model_config import Pooling
from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api import shapes
from nanovllm.serve.api.answer import Answer, Prepared, answer, fit
from nanovllm.serve.api.completions import as_list, token_ids_of
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import ApiError, bad_request, refusing
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import SHORT
from nanovllm.text.no_tokenizer import NoText


class WholeAnswer(Answer):
    """An answer that is sent as a whole, and shows none of the tokens that are sampled for it."""

    object_name = "list"

    def fast_prefix(self, index: int) -> bytes:
        return b""

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        return NoText()


class EmbeddingAnswer(WholeAnswer):
    id_prefix = "embd-"

    def __init__(self, front: Front, call: Call, prepared: Prepared, given: api.EmbeddingFields) -> None:
        super().__init__(front, call, prepared)
        self._given, self._normalizes = given, front.model.info["pooling"]["normalizes"]

    @property
    def size(self) -> tuple[int, int]:
        return sum(len(each.pooled or b"") for each in self.completions), 0

    def response(self) -> bytes:
        data = []
        for each in self.completions:
            if each.pooled is None:
                raise aborted()
            shown = self._shown(each.pooled)
            data.append({"object": "embedding", "index": each.index, "embedding": shapes.written(shown)})
        return msgspec.json.encode({**self.common(), "data": data, "usage": self.usage()})

    def _shown(self, vector: bytes) -> str | list[float]:
        """The vector, as bytes of float32, in the form that was asked for."""
        if (count := self._given.dimensions) is not None:
            numbers = array("f", vector[: 4 * count])
            if self._normalizes:
                norm = math.sqrt(math.fsum(number * number for number in numbers)) or 1.0
                numbers = array("f", [number / norm for number in numbers])
            vector = numbers.tobytes()
        if self._given.encoding_format == "base64":
            return b64encode(vector).decode()
        return array("f", vector).tolist()


def aborted() -> ApiError:
    """Error of an answer that cannot be given: a part of it was aborted by a trainer or an administrator."""
    return ApiError(503, "the request was aborted", "request_aborted")


def _prepare(model: ServedModel, call: Call, body: dict[str, Any]) -> tuple[Prepared, api.EmbeddingFields]:
    """Checks and tokenizes a request. Raises ApiError."""
    fields = read(model, call, api.EmbeddingFields, body)
    given, size = as_list(fields.input, "input"), model.info["hidden_size"]
    if (asked := fields.dimensions or size) > size:
        raise bad_request(f"dimensions={asked}: must be in 1..{size}")
    if len(given) > limits.INPUTS:
        raise bad_request(f"input: {len(given)} texts, must be at most {limits.INPUTS}")
    if (total := len(given) * asked) > limits.EMBEDDINGS:
        raise bad_request(f"input: {len(given)} texts of {asked} numbers each are {total}, at most {limits.EMBEDDINGS}")
    with refusing():
        before = Pooling(**model.info["pooling"]).prompt(fields.prompt_name)
    texts = [before + each if isinstance(each, str) else each for each in given]
    ids = token_ids_of(model, texts, fields.add_special_tokens is not False, "input")
    cut, salt = fields.truncate_prompt_tokens, fields.cache_salt
    common = api.CommonFields(model=fields.model, truncate_prompt_tokens=cut, cache_salt=salt)
    prompts = [fit(model, each, common, 0, None, "input")[0] for each in ids]
    return Prepared(common, prompts, {}, [0] * len(prompts)), fields


async def embeddings(front: Front, call: Call) -> None:
    front.admission.admit(call.key)
    await call.receive()
    work = front.pool.read(call, lambda body: _prepare(front.model, call, body), lambda _: call.size <= SHORT)
    await answer(EmbeddingAnswer(front, call, *await work))
