"""The part of `LLM` that trainers use: new weights on a live engine, pauses, everything aborted."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.engine.fair_lock import FairLock
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import refuse
from nanovllm.outputs import StepColumns

if TYPE_CHECKING:
    import torch

PAUSES = ("keep", "wait", "abort")


class LLMControl:
    """Methods of LLM. All may be called from any thread: they take effect between two steps."""

    engine: LLMEngine
    _step_lock: FairLock

    def _require_open(self) -> None:
        raise NotImplementedError

    def _dispatch(self, gained: StepColumns) -> None:
        raise NotImplementedError

    # -- new weights --------------------------------------------------------------------------------------------

    def load_weights(
        self,
        weights: "Iterable[tuple[str, torch.Tensor]] | str | Path",
        in_flight: str = "recompute",
        version: int | None = None,
    ) -> None:
        """Replaces all weights in place; graphs stay valid, and the prefix cache is emptied.

        `weights`: (checkpoint name, whole tensor) pairs, on any device (a DTensor is gathered), or a folder with
        *.safetensors. `in_flight`: what becomes of requests that have begun. "recompute": they start over from their
        tokens so far, which is exact; "keep": they go on with the KV of the old weights; "wait": they end first, while
        no other begins; "abort": they end now, with what they have, and so do those that wait. `version`: of these
        weights, see CompletionOutput.weight_versions; default: one more than that of the ones before.

        Raises ValueError naming a missing, surplus or misshapen weight; steps are refused until a call succeeds.
        """
        self._require_open()
        self._let_end(in_flight)
        with self._step_lock:
            try:
                self.engine.load_weights(weights, in_flight, version)
            finally:
                self._let_begin(in_flight)

    def begin_update(self, in_flight: str = "recompute", partial: bool = False) -> None:
        """New weights come, by `update`, any number of times. Steps are refused until finish_update succeeds, or wait
        where the engine is paused. `in_flight`: as in load_weights. `partial`: True where some names may not come, and
        keep their values. Called again, it starts over."""
        self._require_open()
        self._let_end(in_flight)
        with self._step_lock:
            try:
                self.engine.begin_update(in_flight, partial)
            finally:
                self._let_begin(in_flight)

    def update(self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path") -> None:
        """Some of the weights, as in load_weights. Raises ValueError naming one that is unknown, misshapen or was there
        already; those before it are written, and a corrected call can follow."""
        self._require_open()
        with self._step_lock:
            self.engine.update(weights)

    def finish_update(self, version: int | None = None) -> None:
        """Steps go on with the new weights. Raises ValueError naming weights that did not come, or a version that does
        not go up; more calls of `update` can follow then."""
        self._require_open()
        with self._step_lock:
            self.engine.finish_update(version)

    @property
    def weight_version(self) -> int:
        """Of the weights that the next step runs with; 0 for those that the engine started with."""
        return self.engine.weight_version

    def checksum(self) -> dict[str, str]:
        """A checksum of each checkpoint tensor as the ranks hold it (in the engine's type), the same at every number of
        ranks. Raises RuntimeError where two ranks hold different values of one tensor."""
        self._require_open()
        with self._step_lock:
            return self.engine.checksum()

    def _let_end(self, in_flight: str, option: str = "in_flight") -> None:
        """Before new weights: requests that have begun end, or all do."""
        if in_flight == "wait":
            if self.engine.is_paused and self.engine.has_begun():
                raise ValueError(f"{option}='wait': requests that have begun do not end while the engine is paused")
            self._drain()
        elif in_flight == "abort":
            self.abort_all()
            self._drain()

    def _let_begin(self, in_flight: str) -> None:
        if in_flight in ("wait", "abort"):
            self.engine.scheduler.holds_new = False

    def _drain(self) -> None:
        """Runs steps until no request that has begun is left; others do not begin meanwhile."""
        scheduler = self.engine.scheduler
        scheduler.holds_new = True
        while scheduler.holds_new:
            with self._step_lock:
                if self.engine.lacks_weights or not self.engine.is_busy():
                    return
                self._dispatch(self.engine.step())

    def reset_prefix_cache(self) -> None:
        """Requests that begin from here on find nothing in the prefix cache. Those that run keep their blocks."""
        self._require_open()
        with self._step_lock:
            self.engine.reset_prefix_cache()

    # -- sleep --------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None) -> int:
        """Gives memory back to the device until wake_up; returns the bytes. Needs enable_sleep=True.

        `tags`: "weights", "kv_cache" or both, the default. `level` 1 keeps the weights in pinned host memory; 2 drops
        them: after wake_up they come anew, by load_weights or begin_update. Requests that have begun (in a pause) start
        over from their tokens so far. Asleep, steps are refused. On a CPU no memory moves. Activations and graphs
        keep theirs.
        """
        self._require_open()
        with self._step_lock:
            return self.engine.sleep(level, tags)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes the memory again, at the same addresses, so that graphs stay valid; default: of all that sleeps."""
        self._require_open()
        with self._step_lock:
            self.engine.wake_up(tags)

    # -- pauses -------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "keep") -> None:
        """Nothing is computed when this returns, until `resume`. "keep": requests stop where they are, and go on later;
        "wait": those that have begun end first; "abort": all end now, with what they have. New requests wait;
        `generate` returns after `resume` only."""
        self._require_open()
        if mode not in PAUSES:
            refuse("mode", mode, "one of " + ", ".join(map(repr, PAUSES)))
        if mode != "keep":
            self._let_end(mode, "mode")
        self.engine.pause_steps()
        with self._step_lock:
            self.engine.settle()

    def resume(self) -> None:
        """Ends a pause."""
        self._require_open()
        self.engine.resume()

    @property
    def is_paused(self) -> bool:
        return self.engine.is_paused

    def abort_all(self) -> list[int]:
        """Ends every unfinished request with what it has: step() and generate() hand it out with reason "abort".
        Returns the ids."""
        self._require_open()
        return self.engine.abort_all()
