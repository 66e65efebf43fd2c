"""A walk through every kind of step that launches no kernel: it finds out which ones have to be compiled.

Done with the engine's own tensors and by its own code, so that the answer is exactly what the warm-up will look up,
down to the alignment of each pointer, and cannot become outdated.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.kernels.step.input import expand_rows_reference
from nanovllm.startup.compile_server import CompileJob
from nanovllm.wire.step import StepCounts, dummy_step

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

_patching = threading.Lock()


def dry_run(runner: "ModelRunner", submit: Callable[[CompileJob], None]) -> None:
    """Hands every kernel that start-up needs to `submit`. Rank 0 alone does it; weights need not be there yet, for
    nothing computed here means anything. Afterwards the runner is as before, but for memory in torch's cache."""
    config, work = runner.config, runner.work
    with torch.inference_mode(), runner.io.stream_context(), runner.group.muted(), launching_nothing(submit):
        runner.allocate_state(runner.state_memory.size(1))
        try:
            with runner.model.few_layers():
                if runner.no_graphs_because is None:
                    runner._new_graphs().run_all()
                runner.warm_up_attention()
                num_tokens = min(config.max_num_batched_tokens, 2 * config.max_num_seqs)
                has_lines = bool(runner.state_memory.num_lines)
                for has_adapters in {False, config.enable_lora}:
                    sizes = config.max_num_seqs, num_tokens, runner.max_model_len
                    _run_largest(runner, dummy_step(*sizes, has_lines, has_adapters))
            if runner.model_config.pooling is None:  # last, for its kernels are small: none is left compiling alone
                local_ids = runner.model.lm_head.weight.shape[0]
                runner.option_sampler.dry_run(local_ids, runner.dtype, work.buffers, work.state)
        finally:
            work.captured_logits.clear()
    runner.io.synchronize()


def _run_largest(runner: "ModelRunner", packed: np.ndarray) -> None:
    """A step at its exact size. FlashAttention, where it is there, does run (it compiles its own kernels, in this
    process), so its inputs must make sense: they are filled in by plain PyTorch."""
    counts, step, work = StepCounts.of(packed), runner.io.upload(packed), runner.work
    sizes = (runner.config.max_num_seqs, work.state, runner.block_size)
    buffers = work.buffers.narrow(counts.num_rows, counts.num_tokens)
    expand_rows_reference(step, *sizes, buffers, counts.num_decode_rows)
    runner.state_memory.begin(step, packed)
    work.run_exact(step, packed)
    if runner.config.speculation is not None:
        work.finish(step, counts, True, 1, counts.num_decode_rows, None, None)


@contextmanager
def launching_nothing(submit: Callable[[CompileJob], None]) -> Iterator[None]:
    """Context in which a launch of a Triton kernel by this thread does nothing; one that would have to be compiled
    first is handed to `submit`. Other threads launch as ever."""
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    me = threading.get_ident()
    target = driver.active.get_current_target()
    launch, hook_before = JITFunction.run, knobs.runtime.jit_cache_hook

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or threading.get_ident() == me, **options)

    def hook(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool | None:
        if threading.get_ident() != me:
            return hook_before(fn=fn, compile=compile, **rest) if hook_before is not None else None
        where = (target.backend, target.arch, target.warp_size)
        submit(CompileJob(fn.module, fn.name, compile["specialization_data"], where))
        return True  # do not compile it here

    with _patching:
        JITFunction.run, knobs.runtime.jit_cache_hook = run, hook
        try:
            yield
        finally:
            JITFunction.run, knobs.runtime.jit_cache_hook = launch, hook_before
