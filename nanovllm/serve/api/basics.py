"""The small endpoints: models, health, version, load, metrics, tokenize, detokenize."""

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import nanovllm
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import check_characters
from nanovllm.serve.api.chat import encode
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.call import Call

if TYPE_CHECKING:
    from nanovllm.serve.front import Front

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


async def health(front: "Front", call: Call) -> None:
    """200 when requests are served; 503 while the engine loads, while the server drains, and when it has failed."""
    await call.respond_json(front.state_report(), 200 if front.state == "ready" else 503)


async def version(front: "Front", call: Call) -> None:
    await call.respond_json({"version": nanovllm.__version__})


async def load(front: "Front", call: Call) -> None:
    stats = front.metrics.engine
    await call.respond_json(
        {"server_load": front.streams.num_rows, "running": stats.num_running, "waiting": stats.num_waiting}
        | {"kv_cache_usage": stats.kv_cache_usage}
    )


async def metrics(front: "Front", call: Call) -> None:
    await call.respond(front.metrics.text(), content_type=_METRICS_TYPE)


def _model(front: "Front", name: str) -> dict[str, Any]:
    model = {"id": name, "object": "model", "created": front.created, "owned_by": "nanovllm"}
    return model | {"root": front.model, "max_model_len": front.info.get("max_model_len")}


async def models(front: "Front", call: Call) -> None:
    await call.respond_json({"object": "list", "data": [_model(front, name) for name in front.names]})


async def model(front: "Front", call: Call) -> None:
    name = unquote(call.path.removeprefix("/v1/models/"))
    front.check_model(name)
    await call.respond_json(_model(front, name))


async def tokenize(front: "Front", call: Call) -> None:
    """Token ids of a text ("prompt") or of a chat ("messages"), as vLLM's endpoint of this name."""
    front.require_tokenizer()
    body = await call.json()
    fields: api.TokenizeChatFields | api.TokenizeFields
    if "messages" in body:
        fields = chat = front.read(call, api.TokenizeChatFields, body)
        _, ids = await encode(front, chat)
    else:
        fields = api.convert(api.TokenizeFields, body)
        front.check_model(fields.model)
        text, special = fields.prompt, fields.add_special_tokens is not False
        check_characters(front, len(text), "prompt")
        ids = await front.in_pool(lambda: front.tokenizer.encode(text, special), len(text))
    answer = {"count": len(ids), "max_model_len": front.info["max_model_len"], "tokens": ids, "token_strs": None}
    if fields.return_token_strs:
        answer["token_strs"] = [front.tokenizer.token_bytes(each).decode("utf-8", "replace") for each in ids]
    await call.respond_json(answer)


async def detokenize(front: "Front", call: Call) -> None:
    front.require_tokenizer()
    fields = api.convert(api.DetokenizeFields, await call.json())
    front.check_model(fields.model)
    most, vocab = front.info["max_model_len"], front.info["vocab_size"]
    if len(fields.tokens) > most:
        raise bad_request(f"tokens: must have at most {most} items")
    if max(fields.tokens, default=0) >= vocab:
        raise bad_request(f"tokens: must be a list of token ids in 0..{vocab - 1}")
    text = await front.in_pool(lambda: front.tokenizer.decode(fields.tokens, False), len(fields.tokens))
    await call.respond_json({"prompt": text})
