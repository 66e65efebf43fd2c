"""Table of the calls that a trainer or an administrator makes to a running engine, read by LLM, hosts and the admin
endpoints. A new call is one entry.

A call is a function of the engine and its options, run between two steps. One that needs steps is a generator, which
yields where they must run. What it returns is what its endpoint answers.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import msgspec

from nanovllm.engine.engine_state import TAGS, EngineState, InFlight, Tag
from nanovllm.errors import ReplicaError, refuse, shown
from nanovllm.models.files import weight_files

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig
    from nanovllm.engine.control import EngineControl
    from nanovllm.transfer.receiver import Relay, WeightReceiver

Steps = Generator[None, None, Any]
Options = dict[str, Any]
Mode = Literal["abort", "wait", "keep"]


class CalledEngine(Protocol):
    """Parts of an engine that calls work on."""

    config: "EngineConfig"
    control: "EngineControl"
    state: EngineState

    def info(self) -> dict[str, Any]:
        """Facts about the engine, by name."""


# -- pauses and sleep -----------------------------------------------------------------------------------------------


class Nothing(msgspec.Struct):
    """A call without options."""


class Pause(msgspec.Struct):
    mode: Mode = "abort"
    clear_cache: bool = True


def _pause(engine: CalledEngine, mode: str = "abort", clear_cache: bool = False) -> Steps:
    if mode not in get_args(Mode):
        refuse("mode", mode, "one of " + ", ".join(map(repr, get_args(Mode))))
    yield from engine.control.end_requests(mode, "mode")
    engine.control.pause(mode)
    if clear_cache:
        engine.control.reset_prefix_cache()
    return {"status": "paused"}


def _resume(engine: CalledEngine) -> Any:
    engine.control.resume()
    return {"status": "resumed"}


class Sleep(msgspec.Struct):
    level: Literal[1, 2] = 1
    mode: Mode = "abort"
    tags: list[Tag] | None = None


def _sleep(
    engine: CalledEngine, level: int = 1, mode: str | None = "abort", tags: Iterable[str] | None = None
) -> Steps:
    """`mode` None: refused where requests run. Requests that come meanwhile wait for `wake_up`."""
    engine.control.check_sleep(level, tags)
    if mode is None:
        engine.control.require_rest("sleep")
    else:
        yield from engine.control.end_requests(mode, "mode")
    return {"freed_bytes": engine.control.sleep(level, tags)}


class WakeUp(msgspec.Struct):
    tags: list[Tag] | None = None


def _wake_up(engine: CalledEngine, tags: Iterable[str] | None = None) -> Any:
    engine.control.wake_up(tags)
    return {}


def _reset_prefix_cache(engine: CalledEngine) -> Any:
    engine.control.reset_prefix_cache()
    return {"success": True}


# -- new weights ----------------------------------------------------------------------------------------------------


class JoinTransfer(msgspec.Struct):
    init_info: dict[str, Any]


def _receiver(engine: CalledEngine) -> "WeightReceiver":
    if engine.control.receiver is None:
        from nanovllm.transfer.receiver import WeightReceiver  # torch is there by now

        engine.control.receiver = WeightReceiver(engine.control, engine.config.device)
    return engine.control.receiver


def _join_transfer(engine: CalledEngine, init_info: dict[str, Any]) -> Any:
    """Returns when all ranks of the trainer's group are there; no step runs meanwhile."""
    _receiver(engine).init(init_info)
    return {"message": "weight transfer initialized"}


def _end_in_flight(engine: CalledEngine, asked: str | None) -> Generator[None, None, str]:
    """Ends requests in flight, or leaves them, as `asked`; returns the mode. Default: "keep" within a pause by "keep",
    else "recompute"."""
    in_flight = asked or ("keep" if engine.state.pause_mode == "keep" else "recompute")
    yield from engine.control.end_requests(in_flight, "in_flight")
    return in_flight


class BeginUpdate(msgspec.Struct):
    in_flight: InFlight | None = None
    partial: bool = False


def _begin_update(engine: CalledEngine, in_flight: str | None = None, partial: bool = False) -> Steps:
    engine.control.begin_update((yield from _end_in_flight(engine, in_flight)), partial)
    return {"message": "weight update started"}


class Receive(msgspec.Struct):
    update_info: dict[str, Any]


def _receive(engine: CalledEngine, update_info: dict[str, Any], relay: "Relay" = iter) -> Any:
    """Weights from a trainer, or from a folder."""
    if not engine.state.lacks_weights:
        raise RuntimeError("update_weights: start_weight_update was not called")
    if (folder := update_info.get("weight_dir")) is not None:
        engine.control.update(_folder(folder))
    else:
        _receiver(engine).update(update_info, relay)
    return {"message": "weights updated"}


def _update(engine: CalledEngine, weights: Any = None, folder: str | None = None) -> Any:
    engine.control.update(weights if folder is None else Path(folder))
    return {}


class FinishUpdate(msgspec.Struct):
    weight_version: int | None = None


def _finish_update(engine: CalledEngine, weight_version: int | None = None) -> Any:
    if engine.control.receiver is None:
        engine.control.finish_update(weight_version)
    else:
        engine.control.receiver.finish(weight_version)
    return {"message": "weight update finished"}


class LoadWeights(msgspec.Struct):
    weight_dir: str
    in_flight: InFlight | None = None
    weight_version: int | None = None


def _load_weights(
    engine: CalledEngine, weights: Any = None, folder: str | None = None, weight_dir: str | None = None,
    in_flight: str | None = None, weight_version: int | None = None,
) -> Steps:  # fmt: skip
    """All weights, from start to finish: `weights`, or a folder's, which an administrator calls weight_dir."""
    given = weights if folder is None else Path(folder)
    given = given if weight_dir is None else _folder(weight_dir)
    engine.control.check_load(given, in_flight or "recompute", weight_version)
    engine.control.load_weights(given, (yield from _end_in_flight(engine, in_flight)), weight_version)
    return {"message": "weights updated"}


def _folder(name: str) -> Path:
    """Raises ValueError where it is none, before anything is begun."""
    path = Path(name)
    if not weight_files(path):
        raise ValueError(f"weight_dir={shown(name)}: must be a folder with *.safetensors")
    return path


# -- adapters -------------------------------------------------------------------------------------------------------


class LoadAdapter(msgspec.Struct):
    lora_name: str
    lora_path: str | None = None
    load_inplace: bool = False
    lora_config: dict[str, Any] | None = None
    update_info: dict[str, Any] | None = None
    lora_id: str = ""

    def __post_init__(self) -> None:
        self.lora_id = token_hex()  # one for all engines, and never that of other bytes


class RemoveAdapter(msgspec.Struct):
    lora_name: str


def _load_adapter(
    engine: CalledEngine, lora_name: str, lora_path: str | None = None, load_inplace: bool = False,
    lora_config: dict[str, Any] | None = None, update_info: dict[str, Any] | None = None, lora_id: str | None = None,
    digest: str | None = None, keeps: Iterable[str] = (), weights: Any = None, relay: "Relay" = iter,
) -> Steps:  # fmt: skip
    """A folder's adapter, or one of `weights` or those of a trainer's `update_info`, with `lora_config`, which engines
    know by `lora_id`. `digest`: that of the adapter which other engines have. `keeps`: see CallSpec.drops_adapters."""
    given: Any = Path(lora_path or "").absolute()
    if {lora_config is not None, weights is not None or update_info is not None} != {not lora_path}:
        refuse("lora_path", lora_path, "a folder, or left out beside lora_config and the tensors' update_info")
    if lora_config is not None:
        from nanovllm.models.adapter_files import Adapter

        if update_info is not None:
            weights = relay(_receiver(engine).tensors(update_info))
        given = Adapter(lora_id or token_hex(), lora_config, dict(weights))
    try:
        return {"digest": (yield from engine.control.load_adapter(lora_name, given, load_inplace, digest, keeps))}
    finally:
        if update_info is not None:
            _receiver(engine).forget_buckets()


def _remove_adapter(engine: CalledEngine, lora_name: str, keeps: Iterable[str] = ()) -> Any:
    engine.control.remove_adapter(lora_name, keeps)
    return {"status": "removed"}


def _missed_adapters(late: EngineState, others: EngineState) -> list[Options]:
    return [
        {"lora_name": name, "lora_path": one.path, "load_inplace": True, "digest": one.digest}
        for name, one in others.adapters.items() if late.adapters.get(name) != one
    ]  # fmt: skip


def _missed_removals(late: EngineState, others: EngineState) -> list[Options]:
    return [{"lora_name": name} for name in late.adapters if name not in others.adapters]


def _one_digest(answers: list[Any]) -> Any:
    """Raises RuntimeError where engines have read different bytes."""
    if len({answer["digest"] for answer in answers}) > 1:
        raise RuntimeError("load_adapter: replicas have read different adapters: its files have changed meanwhile")
    return answers[0]


def _checksum(engine: CalledEngine) -> Any:
    return {"checksums": engine.control.checksum()}


def _info(engine: Any) -> Any:
    plain = (bool, int, float, str)
    return {name: value if type(value) in plain else str(value) for name, value in engine.info().items()}


# -- calls to several engines ---------------------------------------------------------------------------------------


def _sleeps(state: EngineState, options: Options) -> bool:
    """Whether any memory that a call names is asleep."""
    return not set(options.get("tags") or TAGS).isdisjoint(state.asleep)


def _missed_pause(late: EngineState, others: EngineState) -> list[Options]:
    return [{"mode": "keep"}] if others.is_paused and not late.is_paused else []


def _missed_resume(late: EngineState, others: EngineState) -> list[Options]:
    return [{}] if late.is_paused and not others.is_paused else []


def _first(answers: list[Any]) -> Any:
    return answers[0]


def _sum_of_bytes(answers: list[Any]) -> Any:
    return {"freed_bytes": sum(answer["freed_bytes"] for answer in answers)}


def _equal_checksums(answers: list[Any]) -> Any:
    """Raises RuntimeError where two engines hold different values of one tensor."""
    if not answers:
        raise ReplicaError("checksum: every replica was lost meanwhile")
    first, *others = (answer["checksums"] for answer in answers)
    for other in others:
        if different := [name for name in first if other.get(name) != first[name]]:
            raise RuntimeError(f"checksum: replicas hold different values of {different[0]}")
    return answers[0]


@dataclass(frozen=True)
class CallSpec:
    """Entry of the table of calls."""

    run: Callable[..., Any]
    """(engine, **options) -> its answer, or a generator that returns it."""
    options: type[msgspec.Struct] | None = Nothing
    """Options that an administrator may give; None: the call is not open to administrators."""
    path: str | None = None
    """Path of the endpoint that offers the call with these options."""
    merge: Callable[[list[Any]], Any] = _first
    """The answers of several engines -> theirs."""
    by_first: bool = False
    """True: of several engines only the first runs it, since a trainer's group has one rank for all of them."""
    empties_cache: bool = False
    """Nothing that was cached before is a hit afterwards."""
    brings_weights: bool = False
    """A trainer makes it on the way to new weights."""
    replaces_weights: Callable[[Options], bool] = lambda options: False
    """(options) -> whether all weights come, whatever an engine has had before."""
    compares: bool = False
    """True: the answers are compared, so that engines which wait for the weights of the others are left out."""
    counts_version: bool = False
    """Option `weight_version` is the version of the new weights that it ends with, one for all engines."""
    runs_beside: bool = False
    """Whether it lets steps run and waits for none of their requests: a `resume` behind it waits for its end."""
    drops_adapters: bool = False
    """Option `keeps` names, by digest, the adapters of requests that an engine may not have got yet."""
    by_caught_up: bool = False
    """True: engines that are being started are left out, and do it later where they must (`missed`)."""
    relayed_as: Callable[[Options], str | None] = lambda options: None
    """(options) -> the call of the other engines, with all options but update_info, to which the first passes on the
    weights that it receives; None: all have the same call."""
    is_due: Callable[[EngineState, Options], bool] = lambda state, options: True
    """(state of an engine, options) -> whether it has this still to do. The call goes to these alone, and to all where
    there are none."""
    missed: Callable[[EngineState, EngineState], list[Options]] = lambda late, others: []
    """(state of an engine that was started later, that of the others) -> options of each such call that it needs to be
    as they are. Weights and sleep are left out: it is started when these allow it."""

    def in_flight(self, options: Options) -> tuple[str, str | None]:
        """The option that says what becomes of requests in flight, and its value; ("", None) where there is none."""
        for field in msgspec.structs.fields(self.options or Nothing):
            if field.name in ("mode", "in_flight"):
                return field.name, options.get(field.name, field.default)
        return "", None


CALLS: dict[str, CallSpec] = {
    "pause": CallSpec(_pause, Pause, "/pause", missed=_missed_pause),
    "resume": CallSpec(_resume, Nothing, "/resume", missed=_missed_resume),
    "sleep": CallSpec(
        _sleep, Sleep, "/sleep", merge=_sum_of_bytes, empties_cache=True,
        is_due=lambda state, options: not _sleeps(state, options),
    ),
    "wake_up": CallSpec(_wake_up, WakeUp, "/wake_up", brings_weights=True, is_due=_sleeps),
    "reset_prefix_cache": CallSpec(_reset_prefix_cache, Nothing, "/reset_prefix_cache", empties_cache=True),
    "join_transfer": CallSpec(_join_transfer, JoinTransfer, "/init_weight_transfer_engine", by_first=True),
    "begin_update": CallSpec(
        _begin_update, BeginUpdate, "/start_weight_update", empties_cache=True, brings_weights=True,
        replaces_weights=lambda options: not options.get("partial"),
    ),
    "receive": CallSpec(
        _receive, Receive, brings_weights=True,
        relayed_as=lambda options: None if "weight_dir" in options["update_info"] else "update",
    ),
    "update": CallSpec(_update, None),
    "finish_update": CallSpec(
        _finish_update, FinishUpdate, "/finish_weight_update", empties_cache=True, brings_weights=True,
        counts_version=True,
    ),
    "load_weights": CallSpec(
        _load_weights, LoadWeights, empties_cache=True, brings_weights=True, replaces_weights=lambda options: True,
        counts_version=True,
    ),
    "load_adapter": CallSpec(
        _load_adapter, LoadAdapter, "/v1/load_lora_adapter", merge=_one_digest, missed=_missed_adapters,
        runs_beside=True, drops_adapters=True,
        relayed_as=lambda options: "load_adapter" if "update_info" in options else None,
    ),
    "remove_adapter": CallSpec(
        _remove_adapter, RemoveAdapter, "/v1/unload_lora_adapter", missed=_missed_removals, drops_adapters=True,
        by_caught_up=True,
    ),
    "checksum": CallSpec(_checksum, merge=_equal_checksums, compares=True),
    "info": CallSpec(_info),
}  # fmt: skip
