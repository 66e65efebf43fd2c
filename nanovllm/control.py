"""What all of `LLM` has in common, its turn at the engine, and what trainers use: new weights, sleep, pauses."""

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.engine.fair_lock import FairLock
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import refuse
from nanovllm.outputs import StepColumns
from nanovllm.terminal import interrupt_between_steps

if TYPE_CHECKING:
    import torch

PAUSES = ("keep", "wait", "abort")

_CLOSE_PATIENCE = 5.0  # seconds that close() lets another thread's step take to end


class LLMControl:
    """An engine, and threads that take turns at it. All methods may be called from any thread: they take effect between
    two steps, and Ctrl-C waits for their end; a second one does not."""

    def _take_over(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._step_lock = FairLock()
        self._foreign = StepColumns()
        """What requests of add_request gained while generate() was stepping; handed out by the next step()."""
        self._generating: set[int] = set()
        self._ended: set[int] = set()
        """Those of them with all completions ended, until their generate() returns."""
        # Interpreter exit must not depend on when this object is collected, nor keep it alive until then.
        self._close_at_exit = weakref.finalize(self, _close, self.engine, self._step_lock)
        self._close_at_exit.atexit = True
        try:
            if engine.tokenizer.is_there:
                _ = engine.tokenizer.hf  # has been loading meanwhile; raises where it cannot be loaded
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers and frees the devices; nothing remains. Harmless when called again."""
        self._close_at_exit()

    def _require_open(self) -> None:
        if not self._close_at_exit.alive:
            raise RuntimeError("this engine is closed")
        if os.getpid() != (owner := self.engine.executor.owner):  # waiting for what is the owner's would never end
            raise RuntimeError(f"this engine is process {owner}'s: a fork of it cannot use it")

    @contextmanager
    def _turn(self) -> Iterator[LLMEngine]:
        """The engine, while no other thread has it."""
        self._require_open()
        with interrupt_between_steps(), self._step_lock:
            yield self.engine

    @contextmanager
    def _turn_after(self, mode: str, option: str = "in_flight") -> Iterator[LLMEngine]:
        """The same, when requests have ended as `mode` says (EngineControl.end_requests)."""
        with closing(self.engine.end_requests(mode, option)) as steps:
            while True:
                with self._turn() as engine:
                    if next(steps, steps) is steps:
                        yield engine
                        return
                    self._dispatch(engine.step())

    def _dispatch(self, gained: StepColumns) -> None:
        """Keeps what belongs to add_request's callers for step(), and notes which requests of generate() have ended,
        of this thread or another."""
        knows, generating = self.engine.knows, self._generating
        if generating:
            for request_id in {gained.request_ids[entry] for entry in gained.endings}:
                if request_id in generating and knows(request_id) and self.engine.is_finished(request_id):
                    self._ended.add(request_id)
        # Unknown are those whose generate() was interrupted.
        foreign = [n for n, number in enumerate(gained.request_ids) if number not in generating and knows(number)]
        self._foreign.extend(gained, None if len(foreign) == len(gained) else foreign)
        if foreign and generating:
            self.engine.wake()

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

        Raises ValueError naming a missing, surplus or misshapen weight. Of one engine nothing is written then, and it
        goes on with the weights that it has, unless `weights` can be read but once, as a generator can: steps are then
        refused until a call succeeds, as they are after any other failure.
        """
        with self._turn_after(in_flight) as engine:
            engine.load_weights(weights, in_flight, version)

    def begin_update(self, in_flight: str = "recompute", partial: bool = False) -> None:
        """New weights come, by `update`, any number of times. Steps are refused until finish_update succeeds, or wait
        where the engine is paused. `in_flight`: as in load_weights. `partial`: True where some names may not come, and
        keep their values. Called again, it starts over."""
        with self._turn_after(in_flight) as engine:
            engine.begin_update(in_flight, partial)

    def update(self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path") -> None:
        """Some of the weights, as in load_weights. Raises ValueError naming one that is unknown, misshapen or was there
        already; those before it are written, and a corrected call can follow."""
        with self._turn() as engine:
            engine.update(weights)

    def finish_update(self, version: int | None = None) -> None:
        """Steps go on with the new weights. Raises ValueError naming weights that did not come, or a version that does
        not go up; more calls of `update` can follow then."""
        with self._turn() as engine:
            engine.finish_update(version)

    @property
    def weight_version(self) -> int:
        """Of the weights that the next step runs with; 0 for those that the engine started with."""
        return self.engine.weight_version

    def weights_changed(self) -> None:
        """Says that the module of from_module was written to: requests in flight start over from their tokens so far,
        and the prefix cache is emptied. Needed after writes that torch does not count, through a parameter's `.data`;
        the next request notices all others by itself."""
        with self._turn() as engine:
            engine.notice_new_weights(surely=True)

    def checksum(self) -> dict[str, str]:
        """A checksum of each checkpoint tensor as the ranks hold it (in the engine's type), the same at every number of
        ranks. Raises RuntimeError where two ranks hold different values of one tensor."""
        with self._turn() as engine:
            return engine.checksum()

    def reset_prefix_cache(self) -> None:
        """Requests that begin from here on find nothing in the prefix cache. Those that run keep their blocks."""
        with self._turn() as engine:
            engine.reset_prefix_cache()

    # -- sleep --------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None) -> int:
        """Gives memory back to the device until wake_up; returns the bytes. Needs enable_sleep=True.

        `tags`: "weights", "kv_cache" or both, the default. `level` 1 keeps the weights in pinned host memory; 2 drops
        them: after wake_up they come anew, by load_weights or begin_update. Requests that have begun (in a pause) start
        over from their tokens so far. Asleep, steps are refused. On a CPU no memory moves. Activations and graphs
        keep theirs.
        """
        with self._turn() as engine:
            return engine.sleep(level, tags)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes the memory again, at the same addresses, so that graphs stay valid; default: of all that sleeps."""
        with self._turn() as engine:
            engine.wake_up(tags)

    # -- pauses -------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "keep") -> None:
        """Nothing is computed when this returns, until `resume`. "keep": requests stop where they are, and go on later;
        "wait": those that have begun end first; "abort": all end now, with what they have. New requests wait;
        `generate` returns after `resume` only."""
        if mode not in PAUSES:
            refuse("mode", mode, "one of " + ", ".join(map(repr, PAUSES)))
        with self._turn_after(mode, "mode") as engine:
            engine.pause_steps()
            engine.settle()

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


def _close(engine: LLMEngine, step_lock: FairLock) -> None:
    """Closes between two steps of other threads; but a step that hangs does not keep us."""
    with step_lock.within(_CLOSE_PATIENCE):
        engine.close()
