"""What a trainer does to a live engine: new weights, sleep, pauses, everything aborted."""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.sequence import SequenceStatus
from nanovllm.errors import is_integer, refuse

if TYPE_CHECKING:
    import torch

TAGS = ("weights", "kv_cache")
"""What can sleep."""
IN_FLIGHT = ("recompute", "keep", "wait", "abort")
"""What becomes of requests in flight when new weights come: they start over from their tokens so far; they go on with
the KV that the old weights computed; they end first, while no other begins; they are aborted."""
_DROPPED = "sleep(level=2) has dropped the weights"


class EngineControl(EngineLoop):
    """The loop, and what changes its weights, its memory and whether it runs. Called between two steps, by the thread
    that may step; but abort_all, pause_steps and resume may be called from any thread."""

    weight_version = 0
    """Of the weights that steps run with."""

    # -- new weights --------------------------------------------------------------------------------------------

    def load_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path", in_flight: str, version: int | None
    ) -> None:
        """Replaces all weights in place, on the live engine: LLM.load_weights."""
        self._check_version(version)
        self._check_update(in_flight)
        self.executor.check_weights(weights)
        self.begin_update(in_flight, partial=False)
        self._incomplete = "load_weights did not finish"
        self.update(weights)
        self.finish_update(version)

    def begin_update(self, in_flight: str, partial: bool) -> None:
        """Steps are refused from here on, until finish_update succeeds: LLM.begin_update."""
        self._check_update(in_flight)
        self.settle(self.scheduler.keep_all if in_flight == "keep" else self.scheduler.preempt_all)
        self._incomplete = "an update of the weights has begun and did not finish"
        self.executor.call("begin_weight_update", partial)

    def _check_update(self, in_flight: str) -> None:
        if self.executor.shares_weights:
            raise ValueError("load_weights: this engine computes with a module's weights: load them there")
        self._require_awake("weights")
        if in_flight not in IN_FLIGHT:
            refuse("in_flight", in_flight, "one of " + ", ".join(map(repr, IN_FLIGHT)))
        self._raise_failure()

    def update(self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path") -> None:
        """Some of the weights, or a folder's: LLM.update."""
        self._require_update("update")
        if isinstance(weights, (str, Path)):
            self.executor.load_folder(Path(weights))
        else:
            self.executor.update_weights(weights)

    def finish_update(self, version: int | None) -> None:
        """All are there: LLM.finish_update."""
        self._require_update("finish_update")
        self._check_version(version)
        self.executor.finish_weight_update()
        self._incomplete = None
        self.weight_version = self.weight_version + 1 if version is None else version
        with self._work:
            for seq in (seq for seqs in self._completions.values() for seq in seqs):
                if seq.status is not SequenceStatus.FINISHED:
                    seq.note_version(self.weight_version)

    @property
    def lacks_weights(self) -> bool:
        """Whether an update has begun and not finished, or sleep has dropped them."""
        return self._incomplete is not None

    def _require_update(self, method: str) -> None:
        self._require_awake("weights")
        self._raise_failure()
        if self._incomplete in (None, _DROPPED):
            raise RuntimeError(f"{method}: begin_update was not called")

    def _check_version(self, version: int | None) -> None:
        least = self.weight_version + 1
        if version is not None and (not is_integer(version) or version < least):
            refuse("version", version, f"None or an integer >= {least}, as versions go up")

    def notice_new_weights(self, surely: bool = False) -> None:
        """Where the weights are a live module's and it was written to (`surely`: it was), requests in flight start over
        from their tokens so far, and the prefix cache is emptied."""
        if self.executor.shares_weights and (self.executor.weights_changed() or surely):
            self._raise_failure()
            self.settle(self.scheduler.preempt_all)
            self.executor.call("refresh_weights")

    def checksum(self) -> dict[str, str]:
        """LLM.checksum."""
        self._require_awake("weights")
        self._raise_failure()
        self._require_weights()
        self.settle()
        return self.executor.checksum()

    def reset_prefix_cache(self) -> None:
        """LLM.reset_prefix_cache."""
        self.settle(self.scheduler.block_manager.forget_cached)

    # -- sleep --------------------------------------------------------------------------------------------------

    def check_sleep(self, level: int, tags: Iterable[str] | None) -> tuple[str, ...]:
        """What is to sleep. Raises as `sleep` does, but for requests that run."""
        self._raise_failure()
        config = self.executor.config
        if not config.enable_sleep:
            raise ValueError("sleep: needs an engine that was started with enable_sleep=True")
        if self.executor.shares_weights:
            raise ValueError("sleep: this engine computes with a module's weights, which stay where they are")
        if level not in (1, 2) or isinstance(level, bool):
            refuse("level", level, "1 or 2")
        wanted = self._tags(tags)
        if asleep := self.asleep.intersection(wanted):
            raise RuntimeError(f"sleep: {', '.join(sorted(asleep))} asleep already")
        return wanted

    def sleep(self, level: int, tags: Iterable[str] | None) -> int:
        """LLM.sleep."""
        wanted = self.check_sleep(level, tags)
        if self.has_begun() and not self.is_paused:
            raise RuntimeError("sleep: requests are running: pause(), or abort_all(), first")
        self.settle(self.scheduler.preempt_all)
        freed = sum(self.executor.call("sleep", wanted, level == 1))
        self.asleep |= set(wanted)
        if level == 2 and "weights" in wanted:
            self._incomplete = _DROPPED
        return freed

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """LLM.wake_up."""
        self._raise_failure()
        wanted = tuple(sorted(self.asleep)) if tags is None else self._tags(tags)
        if not wanted or not self.asleep.issuperset(wanted):
            raise RuntimeError(f"wake_up: not asleep: {', '.join(sorted(set(wanted) - self.asleep)) or 'the engine'}")
        self.executor.call("wake_up", wanted)
        self.asleep -= set(wanted)
        self.wake()

    def _tags(self, tags: Iterable[str] | None) -> tuple[str, ...]:
        wanted = TAGS if tags is None else tuple(dict.fromkeys([tags] if isinstance(tags, str) else tags))
        if not wanted or not set(wanted) <= set(TAGS):
            refuse("tags", tags, "some of " + ", ".join(map(repr, TAGS)))
        return wanted

    # -- pauses -------------------------------------------------------------------------------------------------

    def end_requests(self, mode: str, option: str) -> Generator[None, None, None]:
        """Before new weights or a pause: yields where a step must run, until requests that have begun have ended
        ("wait"), or all have ("abort"; any other mode: none need to). No request begins meanwhile.

        `option`: what the user calls the mode. Raises ValueError where it would take for ever."""
        if mode == "abort":
            self.abort_all()
        elif mode != "wait":
            return
        elif self.is_paused and self.has_begun():
            raise ValueError(f"{option}='wait': requests that have begun do not end while the engine is paused")
        self.scheduler.holds_new = True
        try:
            while self.scheduler.holds_new and self.is_busy() and not self.lacks_weights:
                yield
        finally:
            self.scheduler.holds_new = False
            self.wake()

    def pause_steps(self) -> None:
        """No step is launched until `resume`."""
        with self._work:
            self.is_paused = True

    def resume(self) -> None:
        """Steps go on, and requests begin again."""
        with self._work:
            self.is_paused = self.scheduler.holds_new = False
        self.wake()

    def abort_all(self) -> list[int]:
        """Ends all requests that are unfinished now, with what they have; returns their ids."""
        with self._work:
            ids = [
                request_id
                for request_id, seqs in self._completions.items()
                if any(seq.status is not SequenceStatus.FINISHED for seq in seqs)
            ]
            self._inbox += [("abort", self._completions[request_id]) for request_id in ids]
        self.wake()
        return ids
