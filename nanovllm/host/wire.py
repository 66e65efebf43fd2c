"""Frames between an engine in another process and its driver, the process that sends it requests.

A frame is a length (8 bytes, little-endian) and a tagged msgpack array. The driver numbers the requests, ascending: a
request has the id of its first completion, and completion i of n is row id + i. Results are engine/step.py's.
"""

from array import array
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from nanovllm.config import EngineConfig
from nanovllm.engine.engine_state import EngineState
from nanovllm.engine.prefix_keys import Extras
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.step import Step
from nanovllm.errors import OutOfMemory, UnknownName, WeightsIncomplete
from nanovllm.processes.framing import LENGTH
from nanovllm.sampling_params import SamplingParams, StructuredOutput


class Frame(msgspec.Struct, array_like=True, tag=True):
    """Base of all frames. Fields are encoded by position."""


# -- down: to the engine --------------------------------------------------------------------------------------------


class Start(Frame):
    """First frame: the model and the options of EngineConfig, including those of replicas."""

    model: str
    options: dict[str, Any]
    number: int = 0
    """Number of this replica, 0 to data_parallel_size - 1."""


class Add(Frame):
    """Queues a request. Token ids travel as uint32, which is faster to decode than msgpack's numbers."""

    request_id: int
    token_ids: bytes
    """Token ids of the prompt. Its text is not sent."""
    extras: Extras
    """See Prompt.extras."""
    params: dict[str, Any]
    """Fields of SamplingParams that differ from their defaults (params_fields)."""
    known: bytes
    """Token ids that the output begins with, which the engine continues."""
    adapter: str | None
    """See Prompt.adapter."""

    @classmethod
    def of(cls, request_id: int, prompt: Prompt, params: dict[str, Any], known: Sequence[int] = ()) -> "Add":
        """Packs a request whose output begins with the ids in `known`."""
        token_ids, known_ids = array("I", prompt.token_ids).tobytes(), array("I", known).tobytes() if known else b""
        return cls(request_id, token_ids, prompt.extras, params, known_ids, prompt.adapter)

    def prompt(self) -> Prompt:
        """Unpacks the prompt."""
        return Prompt(array("I", self.token_ids).tolist(), self.extras, adapter=self.adapter)

    def known_ids(self) -> list[int]:
        """Unpacks `known`."""
        return array("I", self.known).tolist() if self.known else []


class Abort(Frame):
    request_id: int


class Call(Frame):
    """Runs a call of engine/calls.py between two steps. An Answer with the same number follows."""

    number: int
    name: str
    options: dict[str, Any]
    takes_weights: bool = False
    """Whether its weights follow in Buckets of this number."""
    relays: bool = False
    """Whether the engine sends the weights that it receives from a trainer up as Buckets, for the other engines."""


class Bucket(Frame):
    """Part of the weights of a call: pickled (name, tensor) pairs. The last one has None, and an error if the weights
    are incomplete. Sent down to an engine, and up by one that relays."""

    number: int
    data: bytes | None
    error: str | None = None


class Rouse(Frame):
    """Wakes an idle engine, because a request is about to follow."""


# -- up: to the driver ----------------------------------------------------------------------------------------------


class Alive(Frame):
    """Sign of life, sent once a second from the start of the process on."""


class Progress(Frame):
    """Progress of the start. `folder`: the model's files, once they have been found."""

    stage: str
    percent: int
    folder: str = ""


class Ready(Frame):
    """End of the start: the engine takes requests."""

    info: dict[str, Any]
    """Sizes and limits (program.describe)."""
    config: dict[str, Any] = {}
    """Options of EngineConfig, all defaults resolved."""
    facts: dict[str, Any] = {}
    """LLM.engine_info of this engine."""


class Failed(Frame):
    """Error that ends the engine. `kind`: its name in KINDS if it is the user's mistake, else None."""

    message: str
    kind: str | None = None


class Refused(Frame):
    """Refusal of a request. `message`: the user's mistake; None for an internal error, which is in the log."""

    request_id: int
    message: str | None


class Answer(Frame):
    """Result of a call. All tokens computed before it have been sent. `kind`: name of its error in KINDS; "" for an
    internal error, which is in the log; None if there was none."""

    number: int
    value: Any
    state: EngineState
    kind: str | None = None
    message: str = ""


Down = Start | Add | Abort | Call | Bucket | Rouse
Up = Alive | Progress | Ready | Failed | Refused | Answer | Bucket | Step

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        UnknownName, ValueError, TypeError, FileNotFoundError, OSError, ImportError, WeightsIncomplete, OutOfMemory,
        RuntimeError,
    )
}
"""Errors that the driver raises again: an error is of the first kind that fits."""


def kind_of(error: BaseException) -> str | None:
    """Name of an error's kind in KINDS; None for other errors."""
    return next((name for name, kind in KINDS.items() if isinstance(error, kind)), None)


_encoder = msgspec.msgpack.Encoder(enc_hook=str)
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)


def pack(frame: Down | Up) -> bytes:
    """Encodes a frame, with its length in front."""
    body = _encoder.encode(frame)
    return LENGTH.pack(len(body)) + body


def config_fields(config: EngineConfig) -> dict[str, Any]:
    """Options that differ from their defaults, for Start and Ready. Raises ValueError for functions, which cannot be
    sent."""
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
    """Fields that differ from their defaults, for Add. A cache_salt is left out: it is part of the prompt."""
    found = {name: value for name, default in _PARAMS if (value := getattr(params, name)) != default}
    found.pop("cache_salt", None)
    if not params.logit_bias:
        del found["logit_bias"]
    if params.structured_outputs is not None:
        found["structured_outputs"] = params.structured_outputs.given
    return found


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Inverse of params_fields. Raises ValueError as SamplingParams does."""
    if (wanted := given.get("structured_outputs")) is not None:
        given = {**given, "structured_outputs": StructuredOutput(**wanted)}
    return SamplingParams(**given)
