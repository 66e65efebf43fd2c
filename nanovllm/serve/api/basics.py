"""The small endpoints: models, health, version, load, metrics, tokenize, detokenize."""

from typing import Any

import msgspec

import nanovllm
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import check_characters
from nanovllm.serve.api.anthropic import model_list
from nanovllm.serve.api.chat import check_body, encode, is_short
from nanovllm.serve.api.reading import read
from nanovllm.serve.errors import bad_request, refusing
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call
from nanovllm.serve.parsers import check_tools
from nanovllm.serve.served_model import ServedModel

_SILENT_SECONDS = 20.0  # of engines, which give a sign of life each second
_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


async def health(front: Front, call: Call) -> None:
    """200 when requests are served, or wait for new weights; 503 while the engine loads, while the server drains, when
    it has failed, while no engine gives a sign of life, and when a trainer has sent nothing for too long."""
    state, wait, now = front.admission.state, front.admission.weight_wait, front.now()
    if state != "ready":
        progress = front.admission.progress if state == "loading" else ()
        await call.respond_json({"status": state, **dict(zip(("stage", "percent"), progress, strict=False))}, 503)
    elif front.engines.silent_for > _SILENT_SECONDS:
        await call.respond_json({"status": "silent"}, 503)
    else:
        waiting, is_over = wait.text(now), wait.is_over(now)
        answer = {"status": "incomplete" if is_over else "ok", **({"stage": waiting} if waiting else {})}
        await call.respond_json(answer, 503 if is_over else 200)


async def version(front: Front, call: Call) -> None:
    await call.respond_json({"version": nanovllm.__version__})


async def load(front: Front, call: Call) -> None:
    stats = front.engines.stats
    counts = {"running": stats.num_running, "waiting": stats.num_waiting, "kv_cache_usage": stats.kv_cache_usage}
    await call.respond_json({"server_load": front.book.num_rows, **counts})


async def metrics(front: Front, call: Call) -> None:
    await call.respond(front.metrics.text(), content_type=_METRICS_TYPE)


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    about: dict[str, Any] = {"created": model.created, "owned_by": "nanovllm", "root": model.path}
    if (adapter := model.adapters().get(name)) is not None:
        about |= {"root": adapter.path, "parent": model.name}
    return {"id": name, "object": "model", **about, "max_model_len": model.info.get("max_model_len")}


async def models(front: Front, call: Call) -> None:
    if call.header(b"anthropic-version") is not None:
        served = front.model
        await call.respond_json(model_list(served.all_names, served.created, served.info.get("max_model_len")))
        return
    await call.respond_json({"object": "list", "data": [_entry(front.model, name) for name in front.model.all_names]})


async def model(front: Front, call: Call) -> None:
    name = call.path.removeprefix("/v1/models/")
    front.model.check_name(name)
    await call.respond_json(_entry(front.model, name))


def _require_tokenizer(front: Front) -> None:
    """Raises ApiError where there is none, or not yet."""
    if not front.model.info:
        front.admission.admit()
    if front.options.skip_tokenizer_init:
        raise bad_request("skip_tokenizer_init: the server has no tokenizer")


async def tokenize(front: Front, call: Call) -> None:
    """Token ids of a text ("prompt") or of a chat ("messages"), as vLLM's endpoint of this name."""
    _require_tokenizer(front)
    await call.receive()

    def work(body: dict[str, Any]) -> bytes:
        check_body(front.model, call, body, "prompt")
        fields: api.TokenizeChatFields | api.TokenizeFields
        if "messages" in body:
            fields = chat = read(front.model, call, api.TokenizeChatFields, body)
            with refusing():
                check_tools(chat.tools)
            _, ids = encode(front.model, call, chat)
        else:
            fields = read(front.model, call, api.TokenizeFields, body)
            check_characters(front.model, len(fields.prompt), "prompt")
            ids = front.model.tokenizer.encode(fields.prompt, fields.add_special_tokens is not False)
        names = None
        if fields.return_token_strs:
            names = [front.model.tokenizer.backend_tokenizer.id_to_token(each) or "" for each in ids]
        about = {"count": len(ids), "max_model_len": front.model.info["max_model_len"]}
        return msgspec.json.encode({**about, "tokens": ids, "token_strs": names})

    await call.respond(await front.pool.read(call, work, is_short))


async def detokenize(front: Front, call: Call) -> None:
    _require_tokenizer(front)
    most, vocab = front.model.info["max_model_len"], front.model.info["vocab_size"]

    def work(body: dict[str, Any]) -> str:
        tokens = read(front.model, call, api.DetokenizeFields, body).tokens
        if len(tokens) > most:
            raise bad_request(f"tokens: must have at most {most} items")
        if max(tokens, default=0) >= vocab:
            raise bad_request(f"tokens: must be a list of token ids in 0..{vocab - 1}")
        return front.model.tokenizer.decode(tokens, False)

    await call.receive()
    await call.respond_json({"prompt": await front.pool.read(call, work, is_short)})
