"""Fills Triton's cache at an engine's first start: many processes compile what one alone would compile in turn.

Rank 0 makes a dry run (dry_run.py): it goes through every kind of step without launching a kernel, and notes which
ones it would need. compile_server.py compiles them side by side while the weights are loaded; the warm-up then finds
them in the cache. What goes wrong here costs time and nothing else, for the engine compiles what it does not find.

A stamp in the cache's folder says that all this has been done for a build, a device and a set of options. No torch
here: the processes start before rank 0 imports it, and all import at once.
"""

import hashlib
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Pipe
from pathlib import Path

from nanovllm.config import EngineConfig
from nanovllm.model_config import ModelConfig
from nanovllm.processes.child import end, no_standard_numbers, start_python
from nanovllm.startup.compile_server import CompileJob

logger = logging.getLogger(__name__)

_SERVER_MODULE = "nanovllm.startup.compile_server"
_MIN_CORES = 4
_MAX_PROCESSES = 24
_PATIENCE = 60.0  # seconds to wait for the processes, from when there is nothing else left to do
_NO_KERNELS = frozenset(
    "model tokenizer skip_tokenizer_init revision download_dir seed step_timeout trace max_queued_requests "
    "max_logprobs logprobs_mode data_parallel_size data_parallel_backend ray_address gpu_memory_utilization "
    "cpu_kvcache_gib enable_prefix_caching max_num_partial_prefills max_long_partial_prefills "
    "long_prefill_token_threshold".split()
)
"""Options that no kernel depends on."""
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")


class KernelCompiler:
    """The processes, and the jobs that they were given."""

    def __init__(self, num_processes: int, stamp: Path | None = None) -> None:
        self._stamp = stamp
        self._owner = os.getpid()
        self._seen: set[tuple[str, str, str]] = set()
        self.num_jobs = self._num_done = 0
        self.failures: list[str] = []
        """Names of kernels that could not be compiled, and of what else went wrong."""
        self._outbox: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        with no_standard_numbers():
            self._control, theirs = Pipe()
        try:
            args = map(str, (theirs.fileno(), num_processes, os.getpid()))
            self._process: subprocess.Popen[bytes] = start_python(_SERVER_MODULE, *args, pass_fds=(theirs.fileno(),))
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        # A thread of its own: while the server imports, it reads nothing, and a pipe does not hold much.
        self._sender = threading.Thread(target=self._send, name="nanovllm-compile", daemon=True)
        self._sender.start()

    def submit(self, job: CompileJob) -> None:
        """Has a kernel compiled, once however often it is asked for."""
        key = (job.module, job.name, job.specialization)
        if key not in self._seen:
            self._seen.add(key)
            self.num_jobs += 1
            self._outbox.put(job)

    def _send(self) -> None:
        with suppress(OSError):  # the server is gone; wait() finds out
            while (job := self._outbox.get()) is not None:
                self._control.send(job)

    def wait(self, patience: float = _PATIENCE, progress: Callable[[float], None] = lambda share: None) -> bool:
        """Waits until all jobs are done, `patience` seconds at most; tells `progress` which share is. True: all of them
        were compiled."""
        deadline = time.monotonic() + patience
        try:
            while self._num_done < self.num_jobs:
                if not self._control.poll(max(0.0, deadline - time.monotonic())):
                    self.failures.append(f"{self.num_jobs - self._num_done} not compiled after {patience:.0f} s")
                    break
                name, exit_code = self._control.recv()
                self._num_done += 1
                progress(self._num_done / self.num_jobs)
                if exit_code:
                    self.failures.append(f"{name}: exit code {exit_code}")
        except (EOFError, OSError):
            self.failures.append("the compiling process ended early")
        if self.failures:
            logger.warning("kernels are compiled one by one: %s", "; ".join(self.failures))
        return not self.failures

    def mark_complete(self) -> None:
        """Writes the stamp, so that later starts find the cache filled; only where nothing failed."""
        if self._stamp is None or self.failures or self._num_done < self.num_jobs:
            return
        with suppress(OSError):  # a cache that cannot be written to: every start compiles anyway
            self._stamp.parent.mkdir(parents=True, exist_ok=True)
            self._stamp.touch()

    def close(self) -> None:
        """Ends the processes, whatever they do. Harmless when called again."""
        if os.getpid() != self._owner or self._control.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the leader of its own group, not waited for yet
        end(self._process, 0.0)
        self._outbox.put(None)
        self._sender.join(1.0)  # it may still send to a process that a driver holds
        self._control.close()


def start_compiler(config: EngineConfig, model: ModelConfig) -> KernelCompiler | None:
    """The processes, importing already; None where there is nothing for them to do."""
    if config.device == "cpu" or not (config.uses("parallel_compile") and config.uses("fused_kernels")):
        return None
    if os.environ.get("TRITON_INTERPRET") == "1" or not any(os.path.exists(path) for path in _DEVICE_FILES):
        return None
    num_processes = process_count(len(os.sched_getaffinity(0)))
    stamp = stamp_path(config, model)
    if num_processes == 0 or stamp.exists():
        return None
    try:
        return KernelCompiler(num_processes, stamp)
    except OSError as error:
        logger.warning("kernels are compiled one by one: %s", error)
        return None


def process_count(num_cores: int) -> int:
    """Kernels to compile at once. A core is left to the ranks, whose loading of weights waits for disks."""
    return 0 if num_cores < _MIN_CORES else min(_MAX_PROCESSES, num_cores - 1)


def stamp_path(config: EngineConfig, model: ModelConfig) -> Path:
    """The stamp of this build, these options and this device, beside the kernels in Triton's cache."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    for package in ("torch", "triton", "flash-attn-4"):
        with suppress(PackageNotFoundError):
            digest.update(f"{package} {version(package)}\n".encode())
    options = {entry.name: getattr(config, entry.name) for entry in fields(config) if entry.name not in _NO_KERNELS}
    for name, value in options.items():
        if callable(value):  # its repr has an address
            options[name] = f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    digest.update(f"{options} {model} {_device_names()}".encode())
    return _triton_cache_dir() / f"nanovllm-{digest.hexdigest()[:32]}"


def _device_names() -> list[str]:
    """Names of the GPUs as the kernel driver lists them. Empty if it does not: then a cache shared by different devices
    has one stamp for all, and the second kind compiles on its own."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            names += [line for line in path.read_text().splitlines() if line.startswith("Model:")]
        except OSError:
            continue
    return names


def _triton_cache_dir() -> Path:
    """Triton's cache folder (asking Triton itself would cost an import)."""
    if folder := os.environ.get("TRITON_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~")) / ".triton" / "cache"
