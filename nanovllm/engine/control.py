"""What a trainer does to a live engine: new weights, pauses, everything aborted."""

import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.engine.sampling.plan import StepSampling
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step_plan import StepPlan
from nanovllm.errors import is_integer, refuse, short
from nanovllm.outputs import StepColumns

if TYPE_CHECKING:
    import torch

    from nanovllm.executor.local import LocalExecutor

TAGS = ("weights", "kv_cache")
"""What can sleep."""
IN_FLIGHT = ("recompute", "keep", "wait", "abort")
"""What becomes of requests in flight when new weights come: they start over from their tokens so far; they go on with
the KV that the old weights computed; they end first, while no other begins; they are aborted."""


class WeightsIncomplete(RuntimeError):
    """load_weights stopped half-way: until a call of it succeeds, there is no model to run."""


def incomplete(why: str) -> WeightsIncomplete:
    """The error of every step until the weights are there."""
    return WeightsIncomplete(f"{why}: the weights are a mixture; call it again, or begin_update and finish_update")


class Launched(NamedTuple):
    """A step that runs, and what its rows need beyond greedy and temperature."""

    plan: StepPlan
    sampling: StepSampling | None


class EngineControl:
    """The part of LLMEngine that changes what the loop runs with. Between two steps, by the thread that may step; but
    abort_all, pause_steps and resume may be called from any thread."""

    def __init__(self, executor: "LocalExecutor", scheduler: Scheduler) -> None:
        self.executor, self.scheduler = executor, scheduler
        self._work = threading.Condition()
        """Notified when a request or an abort comes in, and when the engine is closed."""
        self._closed = False
        self._error: BaseException | None = None
        self.is_paused = False
        """Whether no step is to be launched for now."""
        self.asleep: set[str] = set()
        """What sleeps, of TAGS."""
        self.weight_version = 0
        """Of the weights that steps run with."""
        self._inbox: deque[tuple[str, list[Sequence]]] = deque()
        self._completions: dict[int, list[Sequence]] = {}
        """The rows of every request that is known, by its id."""
        self._launched: deque[Launched] = deque()
        self._unreported = StepColumns()
        """What load_weights had to collect; the next step hands it out."""

    @property
    def running_step(self) -> StepPlan | None:
        """The oldest one that was launched and not collected."""
        return self._launched[0].plan if self._launched else None

    def _raise_failure(self) -> None:
        if isinstance(self._error, WeightsIncomplete):
            raise self._error
        if self._error is not None:
            raise RuntimeError(f"this engine has failed and cannot go on: {short(self._error)}") from self._error

    def _collect(self, columns: StepColumns) -> None:
        raise NotImplementedError

    # -- new weights --------------------------------------------------------------------------------------------

    def load_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path", in_flight: str, version: int | None
    ) -> None:
        """Replaces all weights in place, on the live engine: LLM.load_weights."""
        self._check_version(version)
        self.begin_update(in_flight, partial=False)
        self._error = incomplete("load_weights did not finish")
        self.update(weights)
        self.finish_update(version)

    def begin_update(self, in_flight: str, partial: bool) -> None:
        """Steps are refused from here on, until finish_update succeeds: LLM.begin_update."""
        if self.executor.shares_weights:
            raise ValueError("load_weights: this engine computes with a module's weights: load them there")
        self._require_awake("weights")
        if in_flight not in IN_FLIGHT:
            refuse("in_flight", in_flight, "one of " + ", ".join(map(repr, IN_FLIGHT)))
        if not self.lacks_weights:
            self._raise_failure()
        self.settle()
        if in_flight == "keep":
            self.scheduler.keep_all()
        else:
            self.scheduler.preempt_all()
        self._error = incomplete("an update of the weights has begun and did not finish")
        self._write_weights(lambda: self.executor.call("begin_weight_update", partial))

    def update(self, weights: "Iterable[tuple[str, torch.Tensor]] | str | Path") -> None:
        """Some of the weights, or a folder's: LLM.update."""
        self._require_update("update")
        if isinstance(weights, (str, Path)):
            self._write_weights(lambda: self.executor.load_folder(Path(weights)))
        else:
            self._write_weights(lambda: self.executor.update_weights(weights))

    def finish_update(self, version: int | None) -> None:
        """All are there: LLM.finish_update."""
        self._require_update("finish_update")
        self._check_version(version)
        self.executor.finish_weight_update()
        self._error = None
        self._note_version(version)

    def _note_version(self, version: int | None) -> None:
        """From here on tokens come from weights of this version."""
        self.weight_version = self.weight_version + 1 if version is None else version
        with self._work:
            for seq in (seq for seqs in self._completions.values() for seq in seqs):
                if seq.status is not SequenceStatus.FINISHED:
                    seq.note_version(self.weight_version)

    @property
    def lacks_weights(self) -> bool:
        """Whether an update has begun and not finished."""
        return isinstance(self._error, WeightsIncomplete)

    def _require_update(self, method: str) -> None:
        self._require_awake("weights")
        if not self.lacks_weights:
            self._raise_failure()
            raise RuntimeError(f"{method}: begin_update was not called")

    def _check_version(self, version: int | None) -> None:
        least = self.weight_version + 1
        if version is not None and (not is_integer(version) or version < least):
            refuse("version", version, f"None or an integer >= {least}, as versions go up")

    def _write_weights(self, write: Any) -> None:
        try:
            write()
        except BaseException as error:
            if self.executor.failed:
                self._error = error  # another call would not help
            raise

    def notice_new_weights(self, surely: bool = False) -> None:
        """Where the weights are a live module's and it was written to (`surely`: it was), requests in flight start over
        from their tokens so far, and the prefix cache is emptied."""
        if self.executor.shares_weights and (self.executor.weights_changed() or surely):
            self._raise_failure()
            self.settle()
            self.scheduler.preempt_all()
            self.executor.call("refresh_weights")

    def checksum(self) -> dict[str, str]:
        """LLM.checksum."""
        self._require_awake("weights")
        self._raise_failure()
        self.settle()
        return self.executor.checksum()

    def reset_prefix_cache(self) -> None:
        """LLM.reset_prefix_cache."""
        self.settle()
        self.scheduler.block_manager.forget_cached()

    def settle(self) -> None:
        """Takes in what the device is still computing; the next step hands it out."""
        while self._launched:
            self._collect(self._unreported)

    def take_unreported(self) -> StepColumns:
        """What the next step would hand out beside what it gains itself."""
        gained, self._unreported = self._unreported, StepColumns()
        return gained

    def check_can_step(self) -> None:
        """Raises RuntimeError where a step would compute without weights or memory."""
        if self._closed:
            raise RuntimeError("this engine is closed")
        if not self.is_paused:
            self._require_awake(*TAGS)
        if not (self.is_paused and self.lacks_weights):
            self._raise_failure()

    def has_begun(self) -> bool:
        """Whether any unfinished request was computed in part."""
        return self.scheduler.has_begun()

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
        self.settle()
        self.scheduler.preempt_all()
        freed = sum(self.executor.call("sleep", wanted, level == 1))
        self.asleep |= set(wanted)
        if level == 2 and "weights" in wanted:
            self._error = incomplete("sleep(level=2) has dropped the weights")
        return freed

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """LLM.wake_up."""
        if not self.lacks_weights:
            self._raise_failure()
        wanted = tuple(sorted(self.asleep)) if tags is None else self._tags(tags)
        if not wanted or not self.asleep.issuperset(wanted):
            raise RuntimeError(f"wake_up: not asleep: {', '.join(sorted(set(wanted) - self.asleep)) or 'the engine'}")
        self.executor.call("wake_up", wanted)
        self.asleep -= set(wanted)
        with self._work:
            self._work.notify_all()

    def _tags(self, tags: Iterable[str] | None) -> tuple[str, ...]:
        wanted = TAGS if tags is None else tuple(dict.fromkeys([tags] if isinstance(tags, str) else tags))
        if not wanted or not set(wanted) <= set(TAGS):
            refuse("tags", tags, "some of " + ", ".join(map(repr, TAGS)))
        return wanted

    def _require_awake(self, *tags: str) -> None:
        if asleep := self.asleep.intersection(tags):
            raise RuntimeError(f"this engine is asleep ({', '.join(sorted(asleep))}): call wake_up first")

    # -- pauses -------------------------------------------------------------------------------------------------

    def pause_steps(self) -> None:
        """No step is launched until `resume`."""
        with self._work:
            self.is_paused = True

    def resume(self) -> None:
        """Steps go on, and requests begin again."""
        with self._work:
            self.is_paused = self.scheduler.holds_new = False
            self._work.notify_all()

    def abort_all(self) -> list[int]:
        """Ends all requests that are unfinished now, with what they have; returns their ids."""
        with self._work:
            ids = [
                request_id
                for request_id, seqs in self._completions.items()
                if any(seq.status is not SequenceStatus.FINISHED for seq in seqs)
            ]
            self._inbox += [("abort", self._completions[request_id]) for request_id in ids]
            self._work.notify_all()
        return ids
