"""Calls of the admin endpoints in the engine's process: pauses, sleep, new weights, between two steps.

A call that needs steps of the engine is a generator, which yields where they must run. Calls run one after the other;
`resume` alone overtakes, and ends a call that still waits.
"""

import traceback
from collections import deque
from collections.abc import Callable, Generator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import shown
from nanovllm.serve import frames

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.transfer.receiver import WeightReceiver

Steps = Generator[None, None, dict[str, Any]]
"""A call at work; returns its answer."""


class AdminCalls:
    """The calls on one engine. `put` from any thread, `advance` by the thread that steps."""

    def __init__(self, engine: "LLMEngine", answer: Callable[[frames.Answered], None]) -> None:
        self._engine, self._answer = engine, answer
        self._waiting: deque[frames.Control] = deque()
        self._running: tuple[frames.Control, Steps] | None = None
        self._is_paused_by_call = self._keeps = False
        self._level = 0

    def put(self, call: frames.Control) -> None:
        (self._waiting.appendleft if call.name == "resume" else self._waiting.append)(call)

    @property
    def has_calls(self) -> bool:
        """Whether any was put in that has not begun."""
        return bool(self._waiting)

    def advance(self) -> None:
        """Runs all calls that need no more steps. Raises what the engine cannot go on after."""
        while self._running or self._waiting:
            if self._waiting and self._waiting[0].name == "resume":
                self._cut_short()
            if self._running is None:
                call = self._waiting.popleft()
                self._running = call, self._steps(call)
            if not self._go_on(*self._running):
                return
            self._running = None

    def _cut_short(self) -> None:
        """Ends a call that waits for requests to end."""
        if self._running is not None:
            call, steps = self._running
            self._running = None
            steps.close()
            self._end(call, 409, message=f"{call.name}: resumed before it was done")

    def _steps(self, call: frames.Control) -> Steps:
        made: Steps | dict[str, Any] = getattr(self, "_" + call.name)(**call.options)
        return made if isinstance(made, dict) else (yield from made)

    def _go_on(self, call: frames.Control, steps: Steps) -> bool:
        """Whether the call is done."""
        try:
            next(steps)
        except StopIteration as end:
            self._end(call, 200, end.value)
        except (ValueError, TypeError, OSError) as error:
            self._end(call, 400, message=str(error))
        except RuntimeError as error:
            self._end(call, 409, message=str(error))
            if self._engine.executor.failed:
                raise
        except Exception:
            self._end(call, 500)
            if self._engine.executor.failed:
                raise
            traceback.print_exc()
        else:
            return False
        return True

    def _end(self, call: frames.Control, status: int, value: Any = None, message: str | None = None) -> None:
        """Lets steps run or not, as the engine is now, and answers."""
        engine = self._engine
        must_rest = self._is_paused_by_call or bool(engine.asleep) or engine.lacks_weights
        if must_rest and not engine.is_paused:
            engine.pause_steps()
            engine.settle()
        elif engine.is_paused and not must_rest:
            engine.resume()
        state = frames.ControlState(
            self._is_paused_by_call, sorted(engine.asleep), self._level, engine.lacks_weights, engine.weight_version
        )
        self._answer(frames.Answered(call.call_id, status, value or {}, message, state))

    # -- pauses and sleep ---------------------------------------------------------------------------------------

    def _pause(self, mode: str = "abort") -> Steps:
        yield from self._engine.end_requests(mode, "mode")
        self._is_paused_by_call, self._keeps = True, mode == "keep"
        return {"status": "paused"}

    def _resume(self) -> dict[str, Any]:
        self._is_paused_by_call = self._keeps = False
        return {"status": "resumed"}

    def _sleep(self, level: int = 1, mode: str = "abort", tags: list[str] | None = None) -> Steps:
        """Requests that come meanwhile wait for `wake_up`."""
        self._engine.check_sleep(level, tags)
        yield from self._engine.end_requests(mode, "mode")
        if not self._engine.is_paused:
            self._engine.pause_steps()
            self._engine.settle()
        freed = self._engine.sleep(level, tags)
        self._level = level
        return {"freed_bytes": freed}

    def _wake_up(self, tags: list[str] | None = None) -> dict[str, Any]:
        self._engine.wake_up(tags)
        return {}

    def _reset_prefix_cache(self) -> dict[str, Any]:
        self._engine.reset_prefix_cache()
        return {"success": True}

    # -- new weights --------------------------------------------------------------------------------------------

    @cached_property
    def _receiver(self) -> "WeightReceiver":
        from nanovllm.transfer.receiver import WeightReceiver  # torch is there by now

        return WeightReceiver(self._engine, self._engine.config.device)

    def _init_weight_transfer_engine(self, init_info: dict[str, Any]) -> dict[str, Any]:
        """Returns when all ranks of the trainer's group are there; no step runs meanwhile."""
        self._receiver.init(init_info)
        return {"message": "weight transfer initialized"}

    def _in_flight(self, asked: str | None) -> Generator[None, None, str]:
        """What becomes of requests that have begun. Those of a pause by "keep" keep what they have computed, unless
        something else is asked for."""
        in_flight = asked or ("keep" if self._keeps else "recompute")
        yield from self._engine.end_requests(in_flight, "in_flight")
        return in_flight

    def _start_weight_update(self, in_flight: str | None = None, partial: bool = False) -> Steps:
        self._engine.begin_update((yield from self._in_flight(in_flight)), partial)
        return {"message": "weight update started"}

    def _update_weights(self, update_info: dict[str, Any]) -> dict[str, Any]:
        if not self._engine.lacks_weights:
            raise RuntimeError("update_weights: start_weight_update was not called")
        folder = update_info.get("weight_dir")
        if folder is not None:
            self._engine.update(_folder(folder))
        else:
            self._receiver.update(update_info)
        return {"message": "weights updated"}

    def _finish_weight_update(self, weight_version: int | None = None) -> dict[str, Any]:
        self._receiver.finish(weight_version)
        return {"message": "weight update finished"}

    def _load_weights(self, weight_dir: str, in_flight: str | None = None, weight_version: int | None = None) -> Steps:
        """All weights of a folder, from start to finish."""
        folder = _folder(weight_dir)
        self._engine.load_weights(folder, (yield from self._in_flight(in_flight)), weight_version)
        return {"message": "weights updated"}

    def _checksum(self) -> dict[str, Any]:
        return {"checksums": self._engine.checksum()}

    def _info(self) -> dict[str, Any]:
        plain = (bool, int, float, str)
        return {name: value if type(value) in plain else str(value) for name, value in self._engine.info().items()}


def _folder(name: str) -> Path:
    """Raises ValueError where it is none, before anything is begun."""
    path = Path(name)
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"weight_dir={shown(name)}: must be a folder with *.safetensors")
    return path
