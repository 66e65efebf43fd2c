"""The frames between an engine elsewhere and who drives it: the only wire of an engine.

A frame is a length (8 bytes, little-endian) and a tagged msgpack array. A request is known by the id of its first
completion; completion i of n is row id + i. The driver gives the ids, ascending.
"""

from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from nanovllm.config import EngineConfig
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.prefix_keys import Extras
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import OutOfMemory, WeightsIncomplete
from nanovllm.processes.framing import LENGTH
from nanovllm.sampling_params import SamplingParams, StructuredOutput


class Frame(msgspec.Struct, array_like=True, tag=True):
    """Fields travel in the order in which they are declared."""


# -- down: to the engine --------------------------------------------------------------------------------------------


class Start(Frame):
    """The first frame: what to serve, as options of EngineConfig, those of replicas included."""

    model: str
    options: dict[str, Any]
    number: int = 0
    """Number of this replica, of data_parallel_size."""


class Add(Frame):
    """Queues a request. Token ids travel as bytes, 4 for each, which an engine reads in less time than msgpack's
    numbers."""

    request_id: int
    token_ids: bytes
    """Token ids of the prompt, whose text stays behind."""
    extras: Extras
    """See Prompt.extras."""
    params: dict[str, Any]
    """Fields of SamplingParams that are not the default (params_fields)."""
    known: bytes
    """Token ids that the output begins with."""

    @classmethod
    def of(cls, request_id: int, prompt: Prompt, params: dict[str, Any], known: Sequence[int] = ()) -> "Add":
        """The frame of a request whose output begins with the ids in `known`."""
        token_ids, known_ids = array("I", prompt.token_ids).tobytes(), array("I", known).tobytes() if known else b""
        return cls(request_id, token_ids, prompt.extras, params, known_ids)

    def prompt(self) -> Prompt:
        """The prompt, without its text."""
        return Prompt(array("I", self.token_ids).tolist(), self.extras)

    def known_ids(self) -> list[int]:
        """Token ids that the output begins with."""
        return array("I", self.known).tolist() if self.known else []


class Abort(Frame):
    request_id: int


class Call(Frame):
    """Call of engine/calls.py, run between two steps; answered by an Answer of the same number."""

    number: int
    name: str
    options: dict[str, Any]
    takes_weights: bool = False
    """Weights follow in Buckets of this number; the last one has none."""
    relays: bool = False
    """The weights that this call receives are sent up as Buckets, for the other engines."""


class Bucket(Frame):
    """Weights of a call, pickled (name, tensor) pairs; None: there are no more, because of `error` if there is one.
    Down to an engine, and up from one that relays."""

    number: int
    data: bytes | None
    error: str | None = None


class Rouse(Frame):
    """A request is likely to come in a moment: an engine that sleeps wakes up meanwhile."""


# -- up: to the driver ----------------------------------------------------------------------------------------------


class Alive(Frame):
    """A sign of life, once a second from the start of the process on."""


class Progress(Frame):
    """Progress of the start. `folder`: the model's files, once they are there."""

    stage: str
    percent: int
    folder: str = ""


class Ready(Frame):
    """The engine serves."""

    info: dict[str, Any]
    """Facts about the engine, and its limits (program.describe)."""
    config: dict[str, Any] = {}
    """Options of EngineConfig with nothing left open."""
    facts: dict[str, Any] = {}
    """LLM.engine_info of this engine."""


class Failed(Frame):
    """The engine ends. `kind`: of the user's mistake that it was (KINDS); None: it was none."""

    message: str
    kind: str | None = None


class Refused(Frame):
    """A request that the engine does not take. `message` None: by a mistake of ours, which the log tells of."""

    request_id: int
    message: str | None


class Answer(Frame):
    """A call is over, and all that was gained before has been sent. `kind`: of the error (KINDS); "": of a mistake of
    ours, which the log tells of; None: there was none."""

    number: int
    value: Any
    state: EngineState
    kind: str | None = None
    message: str = ""


class Finish(msgspec.Struct, array_like=True):
    """A completion's end, with its last token where the step brought one."""

    row: int
    token: int | None
    reason: str
    stop_reason: int | str | None
    weight_versions: list[tuple[int, int, int]] = []
    """See CompletionOutput.weight_versions; none where all tokens are from the weights of the start."""


class Done(msgspec.Struct, array_like=True):
    """All completions of a request have ended. Times in seconds, of the first completion."""

    request_id: int
    num_cached_tokens: int = 0
    queued: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    kept: list[list[bytes | None]] = []
    """Ids that each token of each completion was sampled from, int32; where they were asked for."""


class Step(Frame):
    """Results of one step: two columns for rows that go on, and lists for the few with more to say."""

    rows: list[int]
    tokens: list[int]
    finishes: list[Finish] = []
    done: list[Done] = []
    logprobs: list[tuple[int, bytes]] = []
    """(row, line of LogprobRows), in the order of the row's tokens."""
    prompts: list[tuple[int, list[bytes | None]]] = []
    """(request, a line of LogprobRows for each position of its prompt), once, at the latest with its Done."""
    stats: EngineStats | None = None
    """Counters of the engine, sent now and then."""
    computed: tuple[int, int] = (0, 0)
    """Prompt tokens, and tokens of rows with one to compute, since the start; sent with stats."""


Down = Start | Add | Abort | Call | Bucket | Rouse
Up = Alive | Progress | Ready | Failed | Refused | Answer | Bucket | Step

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError, TypeError, FileNotFoundError, OSError, ImportError, WeightsIncomplete, OutOfMemory, RuntimeError,
    )
}
"""Errors that are raised again on the other side, the first that fits."""


def kind_of(error: BaseException) -> str | None:
    """Name in KINDS of an error's type."""
    return next((name for name, kind in KINDS.items() if isinstance(error, kind)), None)


_encoder = msgspec.msgpack.Encoder(enc_hook=str)
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)


def pack(frame: Frame) -> bytes:
    """The frame's bytes, length first."""
    body = _encoder.encode(frame)
    return LENGTH.pack(len(body)) + body


def aborted(request_id: int, n: int) -> Step:
    """The end of a request that no engine has computed."""
    rows = range(request_id, request_id + n)
    return Step([], [], [Finish(row, None, "abort", None) for row in rows], [Done(request_id)])


def config_fields(config: EngineConfig) -> dict[str, Any]:
    """Options that are not the default, for Start and Ready. Raises ValueError for functions, which cannot travel."""
    for name in ("score_mod", "mask_mod"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}: needs an engine in the caller's process (data_parallel_size=1, no backend)")
    return {
        each.name: value
        for each in fields(config)
        if each.name != "model" and (value := getattr(config, each.name)) != each.default and value != {}
    }


_PARAMS = [(each.name, SamplingParams.__dict__.get(each.name)) for each in fields(SamplingParams)]


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """Fields that are not the default, for Add; what a cache_salt changes is in the prompt."""
    found = {name: value for name, default in _PARAMS if (value := getattr(params, name)) != default}
    found.pop("cache_salt", None)
    if not params.logit_bias:
        del found["logit_bias"]
    if params.structured_outputs is not None:
        found["structured_outputs"] = params.structured_outputs.given
    return found


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """The inverse. Raises ValueError as SamplingParams does."""
    if (wanted := given.get("structured_outputs")) is not None:
        given = {**given, "structured_outputs": StructuredOutput(**wanted)}
    return SamplingParams(**given)
