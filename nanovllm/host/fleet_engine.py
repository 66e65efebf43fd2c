"""Engine of an LLM over a fleet: the book of requests is here, and engines in other processes compute."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.engine.calls import CALLS
from nanovllm.engine.control import check_version
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.request_book import RequestBook
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step, aborted
from nanovllm.engine.work import Work
from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.engines import Engines
from nanovllm.host.fleet_rows import FleetRows
from nanovllm.host.handle import Lost
from nanovllm.host.pending_call import PendingCall
from nanovllm.model_config import ModelConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1  # longest wait of a step for frames
_MOST_UNSENT = 64 << 20  # bytes of weights that may wait for one engine
_SPIN_SECONDS, _SPIN_REQUESTS = 0.008, 4  # on a GPU: first tokens are polled for this long, if no more requests run


class FleetEngine(Work):
    """Implements Engine. One thread at a time steps and calls; add_request, abort and resume may be called from any."""

    def __init__(self, engines: Engines, config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer) -> None:
        """`engines`: that are ready; this engine closes them. `config`: as the user gave it."""
        super().__init__()
        self.engines, first = engines, engines.ready[0]
        assert engines.fleet is not None
        resolved = EngineConfig(first.info["model"], **first.config)
        self.config = replace(
            resolved, data_parallel_size=engines.count, ray_address=config.ray_address,
            data_parallel_backend=config.data_parallel_backend or "local",
        )  # fmt: skip
        self.model_config, self.tokenizer = model_config, tokenizer
        self.fleet = engines.fleet
        self._requests = self.fleet.requests
        self.state = self.fleet.state
        self.book = RequestBook(self.config, model_config, tokenizer, self._requests.max_total, self.state)
        self._rows = FleetRows(self.book)
        self.owner, self.shares_weights = os.getpid(), False
        self.startup_seconds = 0.0
        self._reads = threading.Lock()

    # -- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: int | None = None,
        output_token_ids: list[int] | None = None,
    ) -> int:  # fmt: skip
        """See Engine.add_request."""
        if not self._requests.num_live:
            self.engines.all[0].rouse()
        return self.book.open(
            *(prompt, params, request_id, output_token_ids), num_waiting=lambda: self.stats().num_waiting,
            queue=lambda seqs: self.ask(partial(self._queue, seqs)),
        )  # fmt: skip

    def abort(self, request_id: int) -> None:
        """See Engine.abort."""
        if self.book.rows_of(request_id) is not None:
            self.ask(partial(self._requests.abort, request_id))

    def abort_all(self) -> list[int]:
        """See Engine.abort_all."""
        ids = [*self.book.unfinished()]
        self.ask(*(partial(self._requests.abort, request_id) for request_id in ids))
        return ids

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._requests.bind()

    def _queue(self, seqs: list[Sequence]) -> None:
        first = seqs[0]
        self._requests.add(first.request_id, first.prompt, wire.params_fields(first.params), first.output_token_ids)
        if self.config.device == "cuda" and self._requests.num_live <= _SPIN_REQUESTS:
            self.engines.reader.spin_until = time.monotonic() + _SPIN_SECONDS

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Takes in results of the engines; waits a moment if there are none."""
        self.raise_failure()
        if not self.state.is_paused:
            self.state.require_awake()
            self.state.require_weights()
        try:
            self._drain_inbox()
            waits = not self._unreported and bool(self._requests.num_live) and not self.state.is_paused
            self._advance(_LOOK_SECONDS if waits and not self._requests.out else 0.0)
        except BaseException as error:
            self._error = self._error or error
            raise
        return self.take_unreported()

    def _advance(self, timeout: float = _LOOK_SECONDS) -> None:
        """Handles the frames that have arrived, after a wait of up to `timeout` seconds for some, and what other
        threads ask for. The next step, or who runs a call, hands out what the engines have computed."""
        self._take_in(timeout)
        self._drain_inbox()
        self._hand_out()

    def _take_in(self, timeout: float) -> None:
        with self._reads:
            self._read(timeout)
        self._hand_out()

    def _read(self, timeout: float) -> bool:
        """See Engines.read. The caller holds _reads, so that the engine is not closed meanwhile."""
        self.raise_failure()
        return self.engines.read(timeout)

    def _hand_out(self) -> None:
        """Writes the fleet's results into the rows of their requests, and into _unreported."""
        for frame in self.engines.take():
            if isinstance(frame, Lost):
                self._error = ReplicaError(frame.reason)
                raise self._error
            if isinstance(frame, wire.Refused):
                frame = aborted(frame.request_id, len(self.book.rows_of(frame.request_id) or ()), frame.message)
            if isinstance(frame, Step):
                self._rows.take(frame)
                self._unreported.extend(frame)
        if self._unreported:
            self.engines.reader.spin_until = 0.0

    # -- work ---------------------------------------------------------------------------------------------------

    def has_unfinished_requests(self) -> bool:
        """See Engine.has_unfinished_requests."""
        return bool(self._inbox or self._requests.num_live or self._unreported or self._requests.out)

    def is_busy(self) -> bool:
        """See Engine.is_busy."""
        if self._inbox or self._unreported or self._requests.out:
            return True
        if not self.state.is_paused and self._requests.num_live:
            return True
        if not self._closed and not self.engines.reader.frames and self._reads.acquire(blocking=False):
            try:
                return self._read(0.0)
            finally:
                self._reads.release()
        return bool(self.engines.reader.frames)

    def wake(self) -> None:
        """See Engine.wake."""
        super().wake()
        self.engines.reader.ring()

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self, name: str, **options: Any) -> Generator[Step, None, Any]:
        """See Engine.call."""
        self.raise_failure()
        weights = options.pop("weights", None)
        if isinstance(weights, (str, Path)):
            options["folder"] = str(Path(weights).absolute())  # replicas may have other working folders
            weights = None
        self._check_call(name, options)
        self._drain_inbox()
        if weights is not None and name == "load_weights":
            return (yield from self._load(weights, **options))
        return (yield from self._call(name, options, weights))

    def _check_call(self, name: str, options: dict[str, Any]) -> None:
        """Raises errors that depend on all engines together."""
        if name == "sleep" and options.get("mode") is None and self._requests.has_begun() and not self.state.is_paused:
            raise RuntimeError("sleep: requests are running: pause(), or abort_all(), first")
        option, mode = CALLS[name].in_flight(options)
        if mode == "wait" and self.state.is_paused and self._requests.has_begun():
            raise ValueError(f"{option}='wait': requests that have begun do not end while the engine is paused")

    def _load(
        self, weights: "Iterable[tuple[str, torch.Tensor]]", in_flight: str, weight_version: int | None
    ) -> Generator[Step, None, Any]:
        check_version(weight_version, self.state.weight_version)
        yield from self._call("begin_update", {"in_flight": in_flight}, None)
        for name, options, given in (
            ("update", {}, weights),
            ("finish_update", {"weight_version": weight_version}, None),
        ):
            pending = self._begin(name, options, given)
            while pending.waiting:  # without a yield: no other thread may step in between
                self._advance()
            pending.result()
        return {}

    def _call(
        self, name: str, options: dict[str, Any], weights: "Iterable[tuple[str, torch.Tensor]] | None"
    ) -> Generator[Step, None, Any]:
        pending = self._begin(name, options, weights)
        try:
            while pending.waiting:
                self._advance()
                yield self.take_unreported()
        except GeneratorExit:
            if CALLS[name].in_flight(options)[1] == "wait":
                self.resume()  # else it would run later, when the requests have ended
            raise
        self._hand_out()
        return pending.result()

    def _begin(
        self, name: str, options: dict[str, Any], weights: "Iterable[tuple[str, torch.Tensor]] | None"
    ) -> PendingCall:
        pending = self.fleet.call(name, options, weights is not None)
        if weights is not None:
            self._send_weights(pending, weights)
        return pending

    def _send_weights(self, pending: PendingCall, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        from nanovllm.host.weights import sent

        try:
            deque(sent(weights, partial(self._send_bucket, pending)), 0)
        except BaseException as error:
            self._send_bucket(pending, None, f"the weights ended: {type(error).__name__}")
            while pending.waiting:
                self._take_in(_LOOK_SECONDS)
            raise
        self._send_bucket(pending, None)

    def _send_bucket(self, pending: PendingCall, data: bytes | None, error: str | None = None) -> None:
        self.fleet.send_bucket(pending, data, error)
        while pending.waiting and any(handle.backlog > _MOST_UNSENT for handle in self.engines.reader.handles.values()):
            self._take_in(_LOOK_SECONDS)

    def notice_new_weights(self, surely: bool = False) -> None:
        """Does nothing: these engines share no module's weights."""

    def resume(self) -> None:
        """See Engine.resume; sent to the engines by the next step."""
        self.fleet.is_resuming, self.state.pause_mode = True, None
        self.ask(lambda: self.fleet.call("resume", {}))

    # -- the rest -----------------------------------------------------------------------------------------------

    @property
    def computed(self) -> tuple[int, int]:
        """See Engine.computed; as of the engines' last counters."""
        return self._requests.computed()

    def stats(self) -> EngineStats:
        """See Engine.stats; tokens and ends are counted here."""
        stats = self._requests.stats()
        waiting = stats.num_waiting + len(self._inbox)
        finished, count = dict(self._rows.num_finished), self._rows.num_generated
        return replace(stats, num_waiting=waiting, generation_tokens=count, finished=finished)

    def info(self) -> dict[str, Any]:
        """Facts about the first engine, sums over all, and the facts of each."""
        there = [self.engines.ready[number].facts for number in self.fleet.numbers]
        return {
            **(there or [self.engines.ready[0].facts])[0],
            "startup_seconds": round(self.startup_seconds, 2),
            "num_kvcache_blocks": sum(info["num_kvcache_blocks"] for info in there),
            "data_parallel_size": self.engines.count,
            "num_replicas": len(there),
            "num_restarts": self.fleet.num_restarts,
            "replicas": there,
        }

    def close(self) -> None:
        """Ends all engines. Does nothing the second time, or in a fork."""
        if self._closed or os.getpid() != self.owner:
            return
        self._closed = True
        self.wake()
        with self._reads:
            self.engines.reader.close()
        self.engines.close()
