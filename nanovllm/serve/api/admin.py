"""The admin endpoints, by vLLM's names: pauses, sleep, aborts, new weights, what the server runs with.

They are there where the server was given an admin key, and take that key and no other. Options come in the query or in
the body, which may be empty.
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec

from nanovllm.engine.calls import CALLS
from nanovllm.engine.engine_state import EngineState, InFlight
from nanovllm.serve.api.fields import Struct, convert
from nanovllm.serve.errors import bad_request
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call


class UpdateWeights(msgspec.Struct):
    """`update_info` in an update that was started; `weight_dir` alone is one from start to finish."""

    update_info: dict[str, Any] | None = None
    weight_dir: str | None = None
    in_flight: InFlight | None = None
    weight_version: int | None = None


class WeightChecker(msgspec.Struct):
    action: Literal["checksum", "compare"]
    baseline: dict[str, str] | None = None


class AbortRequests(msgspec.Struct):
    request_ids: list[str] | None = None


async def _options(front: Front, call: Call, kind: type[Struct]) -> Struct:
    """The call's options. Raises ApiError (400) naming the one that is wrong."""
    query = parse_qs(call.query, keep_blank_values=True)
    values: dict[str, Any] = {name: found if name == "tags" else found[-1] for name, found in query.items()}
    if call.method == "POST":
        await call.receive(or_empty=True)
        if call.size:
            values = await front.pool.read(call, lambda body: {**body, **values})
    return convert(kind, values, strict=False)


async def _control(front: Front, call: Call) -> None:
    """A call of engine/calls.py, whose answer is its own."""
    name, kind = _NAMES[call.path]
    options = msgspec.structs.asdict(await _options(front, call, kind))
    given = {key: value for key, value in options.items() if value is not None}
    await call.respond_json(await front.control(name, **given))


_STATE: dict[str, Callable[[EngineState], dict[str, Any]]] = {
    "/is_paused": lambda state: {"is_paused": state.is_paused},
    "/is_sleeping": lambda state: {"is_sleeping": bool(state.asleep)},
    "/weight_info": lambda state: {"weight_version": state.weight_version},
    "/get_world_size": lambda _: {"world_size": 1},  # of a trainer's group: ranks and replicas get weights from rank 0
}
"""Values of the engines' state, by path."""


async def _state(front: Front, call: Call) -> None:
    await call.respond_json(_STATE[call.path](front.engines.state))


async def abort_requests(front: Front, call: Call) -> None:
    """Ends requests with what they have: those of these ids, or all where none are given."""
    ids = (await _options(front, call, AbortRequests)).request_ids
    count = front.book.abort_all(lambda request: ids is None or request.id in ids or request.call.request_id in ids)
    await call.respond_json({"status": "aborted", "aborted": count})


async def update_weights(front: Front, call: Call) -> None:
    given = await _options(front, call, UpdateWeights)
    if (given.update_info is None) == (given.weight_dir is None):
        raise bad_request("update_info, weight_dir: exactly one of them must be given", "update_info")
    if given.update_info is not None:
        for name in ("in_flight", "weight_version"):
            if getattr(given, name) is not None:
                where = "start_weight_update" if name == "in_flight" else "finish_weight_update"
                raise bad_request(f"{name}: beside update_info it must be left out; {where} takes it")
        await call.respond_json(await front.control("receive", update_info=given.update_info))
        return
    options = {name: value for name, value in msgspec.structs.asdict(given).items() if value is not None}
    await call.respond_json(await front.control("load_weights", **options))


async def weight_checker(front: Front, call: Call) -> None:
    """Checksums by name, or the names whose checksums are not those of `baseline`."""
    given = await _options(front, call, WeightChecker)
    if given.action == "compare" and given.baseline is None:
        raise bad_request("baseline: is required where action is 'compare'")
    answer = await front.control("checksum")
    if given.baseline is not None:
        found, wanted = answer["checksums"], given.baseline
        differ = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        answer = {"match": not differ, "mismatches": differ}
    await call.respond_json(answer)


async def server_info(front: Front, call: Call) -> None:
    """Answers with what runs and with which options; keys are left out. vLLM's clients look below "vllm_config"."""
    engine = await front.control("info")
    options = {name: value for name, value in asdict(front.options).items() if not name.endswith("api_keys")}
    info = front.model.info
    config = {
        "model_config": {"model": front.model.path}
        | {name: info[name] for name in ("dtype", "max_model_len", "logprobs_mode")},
        "parallel_config": {name: info[name] for name in ("tensor_parallel_size", "data_parallel_size")},
        "weight_transfer_config": {},
    }
    current = front.engines.state
    state = msgspec.structs.asdict(current) | {"paused": current.is_paused, "lacks_weights": current.lacks_weights}
    await call.respond_json({"vllm_config": config, "engine": engine, "server": options, "state": state})


_NAMES = {spec.path: (name, spec.options) for name, spec in CALLS.items() if spec.path and spec.options}
ROUTES: dict[tuple[str, str], Callable[[Front, Call], Awaitable[None]]] = {
    **{("POST", path): _control for path in _NAMES},
    **{("GET", path): _state for path in _STATE},
    ("POST", "/abort_requests"): abort_requests,
    ("POST", "/update_weights"): update_weights,
    ("POST", "/weight_checker"): weight_checker,
    ("GET", "/server_info"): server_info,
}
"""Handler of each admin call."""
