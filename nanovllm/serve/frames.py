"""What front and engine process say to each other: msgpack frames over one inherited socket.

A frame is a length (4 bytes, little-endian) and a tagged array. A request is known by the id of its first completion;
completion i of n has id + i. The front gives the ids, ascending.
"""

import socket
import struct
from functools import partial
from typing import Any

import msgspec

from nanovllm.outputs import EngineStats
from nanovllm.processes import framing

_SOCKET_BYTES = 4 << 20  # that may be on their way to the other end
_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, array_like=True, tag=True):
    """Fields travel in the order in which they are declared."""


# -- down: to the engine --------------------------------------------------------------------------------------------


class Start(Frame):
    """The first frame: what to serve, as options of EngineConfig."""

    model: str
    options: dict[str, Any]


class Add(Frame):
    """Queues a request. `prompt`: int32 token ids; `params`: fields of SamplingParams that are not the default."""

    request_id: int
    prompt: bytes
    params: dict[str, Any]


class Abort(Frame):
    request_id: int


class Control(Frame):
    """A call of admin_calls.py, between two steps."""

    call_id: int
    name: str
    options: dict[str, Any]


# -- up: to the front -----------------------------------------------------------------------------------------------


class Progress(Frame):
    """How far the start is. `folder`: the model's files, once they are there."""

    stage: str
    percent: int
    folder: str = ""


class Ready(Frame):
    """The engine serves. `info`: what it runs on and with, and its limits (see engine_process.describe)."""

    info: dict[str, Any]


class Failed(Frame):
    """The engine ends. `is_users_mistake`: the message is all that there is to say."""

    message: str
    is_users_mistake: bool


class Refused(Frame):
    """A request that add_request refused. `message` None: by a mistake of ours, which the log tells of."""

    request_id: int
    message: str | None


class ControlState(msgspec.Struct, array_like=True):
    """What calls have made of the engine."""

    paused: bool = False
    asleep: list[str] = []
    level: int = 0
    """Of the sleep."""
    lacks_weights: bool = False
    weight_version: int = 0


class Answered(Frame):
    """A Control is done. `status`: 200, or that of an error, which `message` explains (None: by a mistake of ours)."""

    call_id: int
    status: int
    value: dict[str, Any]
    message: str | None
    state: ControlState


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
    num_cached_tokens: int
    queued: float
    prefill: float
    decode: float
    kept: list[list[bytes | None]] = []
    """For each completion, for each of its tokens: int32 ids that it was sampled from; where they were asked for."""


class Step(Frame):
    """What one step brought: two columns for rows that go on, and lists for the few with more to say."""

    rows: list[int]
    tokens: list[int]
    finishes: list[Finish] = []
    done: list[Done] = []
    logprobs: list[tuple[int, bytes]] = []
    """(row, line of LogprobRows), in the order of the row's tokens."""
    prompts: list[tuple[int, list[bytes | None]]] = []
    """(request, a line of LogprobRows for each position of its prompt), once, at the latest with its Done."""
    stats: EngineStats | None = None
    """In frames of their own, now and then."""


DownFrame = Start | Add | Abort | Control
UpFrame = Progress | Ready | Failed | Refused | Answered | Step

_encoder = msgspec.msgpack.Encoder()
down_decoder = msgspec.msgpack.Decoder(DownFrame)
up_decoder = msgspec.msgpack.Decoder(UpFrame)


def opened(link: socket.socket) -> socket.socket:
    """One end of the socket, ready for frames."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return link


def pack(frame: Frame) -> bytes:
    """The frame's bytes, length first."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


FrameBuffer = partial(framing.FrameBuffer, _LENGTH)
"""Cuts a stream into the bodies of frames."""
