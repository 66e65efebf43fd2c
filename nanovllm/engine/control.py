"""Control of a live engine by a trainer: new weights, sleep, pauses, abort of everything."""

import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.engine.engine_state import IN_FLIGHT, TAGS, EngineState, LoadedAdapter
from nanovllm.engine.loop import EngineLoop
from nanovllm.engine.request_book import RequestBook
from nanovllm.errors import UnknownName, is_integer, refuse, shown

if TYPE_CHECKING:
    from nanovllm.executor.protocol import Weights
    from nanovllm.models.adapter_files import Adapter
    from nanovllm.transfer.receiver import WeightReceiver

_DROPPED = "sleep(level=2) has dropped the weights"
_LOOK_SECONDS = 0.001  # between two looks at an adapter that is read


class EngineControl:
    """Changes the weights, the memory and the pauses of a loop. The thread that may step calls it, between two steps;
    abort_all and resume may be called from any thread."""

    def __init__(self, loop: EngineLoop, book: RequestBook, state: EngineState) -> None:
        self._loop, self._book, self._state = loop, book, state
        self._executor, self._scheduler = loop.executor, loop.scheduler
        self._held: set[str] = set()
        """Digests of the adapters that the ranks hold."""
        self._is_reading = False
        """Whether the ranks read an adapter."""
        self.receiver: WeightReceiver | None = None
        """Receiver of a trainer's calls; None until the first of them."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that steps run with."""
        return self._state.weight_version

    # -- new weights --------------------------------------------------------------------------------------------

    def check_load(self, weights: Any, in_flight: str, version: int | None) -> None:
        """Raises ValueError for weights that cannot be loaded, or a version that does not go up, before anything is
        begun."""
        check_version(version, self.weight_version)
        self._check_update(in_flight)
        self._executor.check_weights(weights)

    def load_weights(self, weights: "Weights", in_flight: str, version: int | None) -> None:
        """Replaces all weights in place, on the live engine: LLM.load_weights."""
        self.check_load(weights, in_flight, version)
        self.begin_update(in_flight, partial=False)
        self._state.incomplete = "load_weights did not finish"
        self.update(weights)
        self.finish_update(version)

    def begin_update(self, in_flight: str, partial: bool) -> None:
        """LLM.begin_update: refuses steps until finish_update succeeds."""
        self._check_update(in_flight)
        self._loop.settle(self._scheduler.keep_all if in_flight == "keep" else self._scheduler.preempt_all)
        self._state.incomplete = "an update of the weights has begun and did not finish"
        self._executor.call("weights.begin_update", partial)

    def _check_update(self, in_flight: str) -> None:
        if self._executor.shares_weights:
            raise ValueError("load_weights: this engine computes with a module's weights: load them there")
        self._state.require_awake(["weights"])
        if in_flight not in IN_FLIGHT:
            refuse("in_flight", in_flight, "one of " + ", ".join(map(repr, IN_FLIGHT)))
        self._loop.raise_failure()

    def update(self, weights: "Weights") -> None:
        """Replaces some of the weights: see LLM.update."""
        self._require_update("update")
        self._executor.update_weights(weights)

    def finish_update(self, version: int | None) -> None:
        """LLM.finish_update: the weights are complete, and steps may follow."""
        self._require_update("finish_update")
        check_version(version, self.weight_version)
        self._executor.finish_weight_update()
        self._state.incomplete = ""
        self._book.set_version(self.weight_version + 1 if version is None else version)

    def _require_update(self, method: str) -> None:
        self._state.require_awake(["weights"])
        self._loop.raise_failure()
        if self._state.incomplete in ("", _DROPPED):
            raise RuntimeError(f"{method}: begin_update was not called")

    def notice_new_weights(self, surely: bool = False) -> None:
        """Checks whether a live module's weights were written to (`surely`: they were). If so, requests in flight start
        over from their tokens so far, and the prefix cache is emptied."""
        if self._executor.shares_weights and (self._executor.weights_changed() or surely):
            self._loop.raise_failure()
            self._loop.settle(self._scheduler.preempt_all)
            self._executor.call("weights.refresh")

    # -- adapters -----------------------------------------------------------------------------------------------

    def load_adapter(
        self, name: str, given: "Path | Adapter", replaces: bool, digest: str | None = None, keeps: Iterable[str] = ()
    ) -> Generator[None, None, str]:
        """Loads an adapter from a folder or from memory on all ranks, while steps go on; returns its digest. replaces:
        another may have the name now. digest: that it must have. keeps: see _drop_adapters. Raises ValueError, with
        nothing changed."""
        self._require_adapters("load_adapter")
        while self._is_reading:
            yield from self._let_steps_run()
        self._is_reading = True
        try:
            self._executor.read_adapter(given)
            while any(self._executor.call("adapters.is_reading")):
                yield from self._let_steps_run()
            answers = self._executor.call("adapters.put")
        finally:
            self._is_reading = False
        said = next((error for _, error in answers if error), None)
        found, before = answers[0][0], self._state.adapters.get(name)
        path = str(given) if isinstance(given, Path) else ""
        if said is None and (len({*answers}) > 1 or digest not in (None, found)):
            said = f"lora_path={shown(path)}: its files have changed meanwhile"
        elif said is None and before is not None and before.digest != found and not replaces:
            said = f"lora_name={shown(name)}: another adapter is already loaded; load_inplace=True replaces it"
        self._held.update(one for one, _ in answers if one)
        if said is None:
            self._state.adapters = {**self._state.adapters, name: LoadedAdapter(found, path)}
        self._drop_adapters(keeps)
        if said is not None:
            raise ValueError(said)
        return found

    def _let_steps_run(self) -> Generator[None, None, None]:
        """Yields for a step, where one can run; where there is nothing to compute, after a pause."""
        stands = bool(self._state.asleep) or self._state.lacks_weights
        if stands or not self._loop.is_busy():
            time.sleep(_LOOK_SECONDS)
        if not stands:
            yield

    def remove_adapter(self, name: str, keeps: Iterable[str] = ()) -> None:
        """Lets no more requests have an adapter; those that have it end with it. keeps: see _drop_adapters. Raises
        ValueError for unknown ones."""
        self._require_adapters("remove_adapter")
        if name not in self._state.adapters:
            raise UnknownName(f"lora_name={shown(name)}: no adapter of this name is loaded")
        self._state.adapters = {key: one for key, one in self._state.adapters.items() if key != name}
        self._drop_adapters(keeps)

    def _require_adapters(self, method: str) -> None:
        if not self._executor.config.enable_lora:
            raise ValueError(f"{method}: needs an engine that was started with enable_lora=True")
        self._loop.raise_failure()

    def _drop_adapters(self, keeps: Iterable[str]) -> None:
        """Has the ranks forget adapters that have no name and no row any more. keeps: digests of others that stay until
        the next call, since requests that have not come here yet have them."""
        self._state.kept_adapters = sorted(self._held.intersection(keeps))
        used = {one.digest for one in self._state.adapters.values()} | self._book.adapters()
        used.update(self._state.kept_adapters)
        if self._is_reading:  # what is read may be one of these; load_adapter drops the others at its end
            return
        if unused := sorted(self._held - used):
            self._held -= {*unused}
            self._executor.call("adapters.drop", unused)

    def checksum(self) -> dict[str, str]:
        """Checksums of the weights: see LLM.checksum."""
        self._state.require_awake(["weights"])
        self._loop.raise_failure()
        self._state.require_weights()
        self._loop.settle()
        return self._executor.checksum()

    def reset_prefix_cache(self) -> None:
        """LLM.reset_prefix_cache."""
        self._loop.settle(self._scheduler.reset_prefix_cache)

    # -- sleep --------------------------------------------------------------------------------------------------

    def check_sleep(self, level: int, tags: Iterable[str] | None) -> tuple[str, ...]:
        """Returns the tags that are to sleep. Raises as `sleep` does."""
        self._loop.raise_failure()
        config = self._executor.config
        if not config.enable_sleep:
            raise ValueError("sleep: needs an engine that was started with enable_sleep=True")
        if self._executor.shares_weights:
            raise ValueError("sleep: this engine computes with a module's weights, which stay where they are")
        if level not in (1, 2) or isinstance(level, bool):
            refuse("level", level, "1 or 2")
        wanted = self._tags(tags)
        if asleep := [tag for tag in self._state.asleep if tag in wanted]:
            raise RuntimeError(f"sleep: {', '.join(asleep)} asleep already")
        return wanted

    def require_rest(self, method: str) -> None:
        """Raises RuntimeError where requests are running."""
        if self._scheduler.has_begun() and not self._loop.is_held:
            raise RuntimeError(f"{method}: requests are running: pause(), or abort_all(), first")

    def sleep(self, level: int, tags: Iterable[str] | None) -> int:
        """Lets memory sleep: see LLM.sleep. Requests that have begun start over from their tokens so far."""
        wanted = self.check_sleep(level, tags)
        self._loop.settle(self._scheduler.preempt_all)
        freed = self._executor.sleep(wanted, keep_weights=level == 1)
        self._state.asleep, self._state.level = sorted({*self._state.asleep, *wanted}), level
        if level == 2 and "weights" in wanted:
            self._state.incomplete = _DROPPED
        return freed

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Wakes memory up: see LLM.wake_up."""
        self._loop.raise_failure()
        asleep = set(self._state.asleep)
        wanted = tuple(self._state.asleep) if tags is None else self._tags(tags)
        if not wanted or not asleep.issuperset(wanted):
            raise RuntimeError(f"wake_up: not asleep: {', '.join(sorted(set(wanted) - asleep)) or 'the engine'}")
        self._executor.wake_up(wanted)
        self._state.asleep = sorted(asleep.difference(wanted))
        self._loop.wake()

    def _tags(self, tags: Iterable[str] | None) -> tuple[str, ...]:
        wanted = TAGS if tags is None else tuple(dict.fromkeys(tags))
        if not wanted or not set(wanted) <= set(TAGS):
            refuse("tags", tags, "some of " + ", ".join(map(repr, TAGS)))
        return wanted

    # -- pauses -------------------------------------------------------------------------------------------------

    def end_requests(self, mode: str, option: str) -> Generator[None, None, None]:
        """Ends requests before new weights or a pause. "abort": ends all requests now, also where no step can run.
        "wait": yields for each step that is needed until the requests that have begun have ended; no other begins
        meanwhile. Any other mode ends none.

        `option`: the user's name for the mode. Raises ValueError where waiting would never end."""
        if mode == "abort":
            self.abort_all()
            self._loop.take_in()
        if mode != "wait":
            return
        if self._loop.is_held and self._scheduler.has_begun():
            raise ValueError(f"{option}='wait': requests that have begun do not end while the engine is paused")
        self._scheduler.holds_new = True
        try:
            while self._scheduler.holds_new and self._loop.is_busy() and not self._state.lacks_weights:
                yield
            if not self._scheduler.holds_new:
                raise RuntimeError(f"{option}='wait': resumed before it was done")
        finally:
            self._scheduler.holds_new = False
            self._loop.wake()

    def pause(self, mode: str) -> None:
        """LLM.pause, after end_requests has ended requests as `mode` says."""
        self._state.pause_mode = mode
        self._loop.settle()

    def resume(self) -> None:
        """LLM.resume: lets steps go on and waiting requests begin."""
        self._state.pause_mode = None
        self._scheduler.holds_new = False
        self._loop.wake()

    def abort_all(self) -> list[int]:
        """Ends all requests that are unfinished now, with what they have; returns their ids."""
        unfinished = self._book.unfinished()
        self._loop.abort(unfinished.values())
        return [*unfinished]


def check_version(version: int | None, before: int) -> None:
    """Raises ValueError where weights of a version cannot follow those of the version before."""
    if version is not None and (not is_integer(version) or version <= before):
        refuse("version", version, f"None or an integer >= {before + 1}, as versions go up")
