"""All ranks of one machine: rank 0 in this process, the others in processes that read the command ring."""

import os
import pickle
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.config import EngineConfig
from nanovllm.errors import OutOfMemory, WorkerError, short
from nanovllm.executor.cpu_threads import threads_for
from nanovllm.executor.processes import WorkerProcesses
from nanovllm.executor.resolve import resolve
from nanovllm.executor.store import WatchedStore, open_store
from nanovllm.model_config import ModelConfig
from nanovllm.models.adapter_files import Adapter
from nanovllm.models.drafters import with_drafter
from nanovllm.processes.machine import usable_cores
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.weight_update import merged_checksums, named_tensor
from nanovllm.startup.compile_pool import KernelCompiler
from nanovllm.startup.dry_run import dry_run
from nanovllm.transfer.buckets import Entry, grouped
from nanovllm.transfer.shared import SharedBucket
from nanovllm.wire.sampling import StepScores
from nanovllm.wire.state import StateSize

if TYPE_CHECKING:
    from nanovllm.executor.protocol import Weights

_BUCKET_BYTES = 256 << 20
"""Bytes of new weights that go to the other ranks at a time; more if a larger tensor has come."""

Report = Callable[[str, float], None]
"""Takes a stage of the start and the share of it that is done: "load", "compile", "warm-up" or "capture", in
this order, not all of them on every device."""


class LocalExecutor:
    """All ranks as one object: rank 0 in this process, the others reached through the command ring.

    Runs packed steps on every rank, and rare calls. Any failure ends it: then every method raises.
    """

    config: EngineConfig
    """The options, with no "auto" left."""
    state_size: StateSize
    """Memory that each rank has for rows: as many blocks as the rank with the fewest."""
    tokens_per_step: int

    def __init__(
        self, config: EngineConfig, model: ModelConfig, processes: WorkerProcesses, compiler: KernelCompiler | None,
        module: torch.nn.Module | None, report: Report,
    ) -> None:  # fmt: skip
        """`processes`: of the other ranks, which are this executor's to close from here on. `compiler`: compiles the
        kernels, where there is one; it is the caller's to close. `module`: see ModelRunner. `report`: called as stages
        of the start begin, and as the first goes on."""
        self.seconds: dict[str, float] = {}
        self._report = report
        self._runner: ModelRunner | None = None
        self._store: WatchedStore | None = None
        self._failure: str | None = None
        self.shares_weights = module is not None
        """Whether the weights are a live module's, whose owner writes to them."""
        self._buckets: list[SharedBucket] = []
        """None, or two buckets in which new weights go to the other ranks: the last is filled while these read the
        first."""
        self._dropped_weights = False
        """Whether a sleep has dropped all weights."""
        self._is_being_read = False
        """Whether the other ranks have yet to answer that they have read what was sent last."""
        self.owner = os.getpid()
        """The process whose workers, threads and locks these are; a fork of it cannot use them."""
        self.processes = processes
        try:
            self.config = resolve(config, model)
            model = with_drafter(self.config, model)
            self.tokens_per_step = self.config.tokens_per_step
            self._start(model, compiler if self.config.device == "cuda" else None, module)
        except BaseException as error:
            self._close_ranks()
            _forget_frames(error)
            self._close_store()
            raise

    def _start(self, model: ModelConfig, compiler: KernelCompiler | None, module: torch.nn.Module | None) -> None:
        size = self.config.tensor_parallel_size
        if size > 1:
            self._store = WatchedStore(open_store(self.processes.store), self.processes.check)
        cores = min(torch.get_num_threads(), usable_cores()) // size
        self._num_threads = threads_for(model.hidden_size, cores)
        with self._phase("load"), self._failures_explained():
            self.processes.send_call("load", self.config, pickle.dumps(model), self._num_threads)
            self.processes.replies()  # every worker has imported: from here on ranks wait for each other only briefly
            with self._share_of_threads():
                self._runner = ModelRunner(self.config, model, 0, self._store, module=module)
                self.processes.on_failure = self._runner.group.abort
                self.processes.check()  # of what has failed before
                if compiler is not None:
                    _dry_run(self._runner, compiler)
                self._runner.weights.load(lambda share: self._report("load", share))
            self.processes.replies()
            self.processes.is_loading = False
        if compiler is not None:
            with self._phase("compile"):
                compiler.wait(progress=lambda share: self._report("compile", share))
                compiler.close()
        with self._phase("warm-up"):
            sizes: list[StateSize] = self.call("measure_state")
            self.state_size = min(sizes, key=lambda size: size.num_blocks)
            assert all(size.groups == self.state_size.groups for size in sizes)
            self.state_size = self.state_size._replace(num_lines=min(size.num_lines for size in sizes))
            self.call("allocate_state", self.state_size)
        with self._phase("capture"):
            self.call("capture_graphs", self.runner.planner.rules)
        self.processes.is_starting = False
        if compiler is not None:
            compiler.mark_complete()

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("this engine is closed")
        return self._runner

    @property
    def failed(self) -> bool:
        """Whether every further call raises."""
        return self._failure is not None or self.processes.failed

    def check(self) -> None:
        """Raises where a rank has failed, and says how."""
        self.processes.check()
        if self._failure is not None:
            raise RuntimeError(f"this engine has failed and cannot go on: {self._failure}")

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._report(name, 0.0)
        yield
        self.seconds[name] = time.perf_counter() - begin

    @contextmanager
    def _failures_explained(self) -> Iterator[None]:
        """Context for work on all ranks. An error here is often the echo of a worker's end: then that worker's own
        error is raised."""
        self.check()
        try:
            yield
        except BaseException as error:  # if only an interrupt: ranks that are out of step cannot go on
            self._failure = short(error)
            if isinstance(error, (RuntimeError, OSError)) and not isinstance(error, (WorkerError, FileNotFoundError)):
                self.processes.wait_for_failure(seconds=2.0)
            raise

    @contextmanager
    def _share_of_threads(self) -> Iterator[None]:
        """Context in which rank 0, in the caller's process, computes with no more threads than its share of the cores
        (with all of them a step of two ranks on two cores took up to four times as long) and than the model needs. The
        caller's setting is restored."""
        before = torch.get_num_threads()
        if self.config.device != "cpu" or before <= self._num_threads:
            yield
            return
        torch.set_num_threads(self._num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every rank's runner, or of a part of it ("weights.load_folder"); returns what they return,
        in rank order."""
        with self._failures_explained():
            self.processes.send_call(method, *args)
            with self._share_of_threads():
                mine = attrgetter(method)(self.runner)(*args)
            return [mine, *self.processes.replies()]

    def launch(self, packed: np.ndarray) -> None:
        """Starts a packed step (wire/step.py) on every rank; does not wait for it (a CPU, which has no queue, computes
        it here)."""
        with self._failures_explained():
            self.processes.send_step(packed)
            with self._share_of_threads():
                self.runner.launch(packed)

    def has_result(self) -> bool:
        """Whether `collect` would not wait."""
        return self.runner.io.has_result()

    def collect(self) -> tuple[list[int], StepScores | None]:
        """Waits for the oldest step not yet collected: the token that each of its first rows gained, -1 for none, and
        what it brings beside them, if anything."""
        with self._failures_explained():
            return self.runner.io.collect(self.config.step_timeout, self.processes.check)

    def check_weights(self, weights: "Weights") -> None:
        """Raises ValueError where these cannot replace all weights: one is missing, unknown or misshapen;
        FileNotFoundError for a folder without any. What can be read only once, such as a generator, is not looked
        at."""
        if isinstance(weights, (str, Path)):
            self.runner.weights.open_folder(Path(weights), "weights")
        elif isinstance(weights, Collection):
            self.runner.weights.check_all([named_tensor(item, gathered=False) for item in weights])

    def finish_weight_update(self) -> None:
        """Raises ValueError naming the weights that are missing."""
        self.runner.weights.update.finish()
        self._free_buckets()

    def sleep(self, tags: tuple[str, ...], keep_weights: bool) -> int:
        """Gives the memory of "weights" and "kv_cache" back; returns the bytes. Raises OutOfMemory, with nothing
        changed, where the host has no room for weights that are to be kept."""
        self._dropped_weights |= "weights" in tags and not keep_weights
        if keep_weights and "weights" in tags:
            _require_memory("sleep", self.call("sleepable.prepare_sleep"))
        return sum(self.call("sleepable.sleep", tags, keep_weights))

    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Takes the memory again. Raises OutOfMemory, with nothing changed, where a rank's device has too little."""
        answers = self.call("sleepable.prepare_wake_up", tags)
        if any(answers):
            self.call("sleepable.give_up_wake_up", tags)
        _require_memory("wake_up", answers)
        self.call("sleepable.wake_up", tags)
        if self._dropped_weights and "weights" in tags:  # the caller brings the model's own
            self.call("weights.load_drafter")
            self._dropped_weights = False

    def checksum(self) -> dict[str, str]:
        """A checksum of each checkpoint tensor, the same at every number of ranks. Raises RuntimeError where ranks hold
        different values of one tensor."""
        return merged_checksums(self.call("weights.checksums"))

    def update_weights(self, weights: "Weights") -> None:
        """Writes tensors, whole ones or those of a folder, in place. Raises ValueError naming what cannot be loaded,
        before anything of a folder is written, if it is no value; whole tensors that came before it are.

        Each rank reads its own byte ranges of a folder. Rank 0 looks at names and shapes first, since a worker that
        raised would be gone."""
        if isinstance(weights, (str, Path)):
            self.check_weights(weights)
            folder = Path(weights).absolute()  # ranks may have other working folders
            if wrong := [said for said in self.call("weights.load_folder", folder) if said]:
                raise ValueError(wrong[0])
            return
        try:
            named = map(named_tensor, weights)
            for bucket in grouped(named, _BUCKET_BYTES, lambda item: Entry.of(*item).nbytes, within=True):
                self._send_weights(bucket)
                bucket.clear()
        finally:
            self._await_readers()

    def _send_weights(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        self.runner.weights.update.check(bucket)
        if self.config.tensor_parallel_size == 1:
            self.call("weights.take", bucket)
            return
        size = sum(tensor.nbytes for _, tensor in bucket)
        if not self._buckets or self._buckets[-1].nbytes < size:
            self._free_buckets()
            self._buckets = [SharedBucket(max(size, _BUCKET_BYTES), self.runner.device) for _ in range(2)]
        message = self._buckets[-1].fill(bucket)
        self._await_readers()
        self._buckets.reverse()
        with self._failures_explained():
            self._is_being_read = True
            self.processes.send_call("weights.take_from_bucket", message)
            with self._share_of_threads():
                self.runner.weights.take(bucket)

    def _await_readers(self) -> None:
        if self._is_being_read and self._failure is None:
            self._is_being_read = False
            with self._failures_explained():
                self.processes.replies()

    def _free_buckets(self, ranks_live: bool = True) -> None:
        """Frees the buckets. ranks_live: the other ranks, which have mapped them, let them go first."""
        if self._buckets and ranks_live:
            self._await_readers()
            self.call("weights.forget_buckets")
        for bucket in self._buckets:
            bucket.close()
        self._buckets = []

    def read_adapter(self, given: Path | Adapter) -> None:
        """Has all ranks begin to read an adapter ("adapters.is_reading"), from a folder or from memory."""
        if isinstance(given, Path) or self.config.tensor_parallel_size == 1:
            self.call("adapters.read", given)
            return
        tensors = [*given.tensors.items()]
        bucket = SharedBucket(max(1, sum(tensor.nbytes for _, tensor in tensors)), "cpu")
        try:
            self.call("adapters.read", given._replace(tensors={}), bucket.fill(tensors))
        finally:
            bucket.close()  # ranks have mapped it

    def weights_changed(self) -> bool:
        """Whether shared weights (`shares_weights`) were written to since the last call of "weights.refresh". Raises
        RuntimeError if the module has other tensors by now."""
        live_module = self.runner.weights.live_module
        return live_module is not None and live_module.has_changed()

    def info(self) -> dict[str, Any]:
        """Facts for engine_info: those of rank 0, sizes, versions and the times of the start's phases."""
        return {
            **self.runner.info(),
            "tensor_parallel_size": self.config.tensor_parallel_size,
            "num_kvcache_blocks": self.state_size.num_blocks,
            "torch": torch.__version__,
            "phase_seconds": {name: round(seconds, 2) for name, seconds in self.seconds.items()},
        }

    def close(self) -> None:
        """Ends the workers and frees what this rank holds. Does nothing the second time."""
        if os.getpid() != self.owner:
            return  # a fork of the process whose engine this is: nothing here is ours
        self._close_ranks()
        self._free_buckets(ranks_live=False)  # of an update that failed
        self._close_store()

    def _close_ranks(self) -> None:
        runner, self._runner = self._runner, None
        try:
            self.processes.close()
        finally:
            self.processes.on_failure = lambda: None
            if runner is not None:
                runner.close(failed=self.failed)

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
        self.processes.close_store()


def _require_memory(call: str, answers: list[str | None]) -> None:
    """Raises OutOfMemory where one of `answers`, of each rank, is a reason why it has none."""
    if failed := [f"rank {rank}: {why}" for rank, why in enumerate(answers) if why is not None]:
        raise OutOfMemory(f"{call}: {'; '.join(failed)}; nothing has changed, and the call may be made again")


def _dry_run(runner: ModelRunner, compiler: KernelCompiler) -> None:
    """Has the kernels of start-up compiled elsewhere; where that fails, the warm-up compiles them here."""
    try:
        dry_run(runner, compiler.submit)
    except ValueError:
        raise  # an option that cannot be served, found out early
    except Exception as error:
        compiler.failures.append(f"{type(error).__name__}: {error}")


def _forget_frames(error: BaseException | None) -> None:
    """Frees what the frames of a failed start hold (weights, a port), though a notebook keeps its last traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
