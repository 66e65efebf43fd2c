"""Start of an engine from its options."""

import time
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.trace import Trace
from nanovllm.executor.cpu_threads import let_waiting_threads_sleep
from nanovllm.executor.processes import WorkerProcesses
from nanovllm.model_config import ModelConfig
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.startup.compile_pool import start_compiler
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from nanovllm.executor.local import Report


def start_one(config: EngineConfig, report: "Report | None" = None) -> LLMEngine:
    """Loads the model of `config` on all ranks of one replica; returns the engine over them. `report`: see
    LocalExecutor."""
    config = resolve_model_folder(config)
    model_config = read_model_config(config)
    return start_ranks(config, model_config, Tokenizer(config), report=report)  # which loads in a thread of its own


def start_ranks(
    config: EngineConfig, model_config: ModelConfig, tokenizer: Tokenizer, module: "torch.nn.Module | None" = None,
    report: "Report | None" = None,
) -> LLMEngine:  # fmt: skip
    """Starts the ranks of `config`; returns the engine over them. module: see ModelRunner."""
    begin = time.perf_counter()
    if config.device != "cuda":
        let_waiting_threads_sleep()
    trace = Trace(config.trace) if config.trace is not None else None
    processes = WorkerProcesses(config.tensor_parallel_size, config.step_timeout)
    compiler = None
    try:
        if model_config.implementation == "native":
            compiler = start_compiler(config, model_config)
        # Torch comes in here, and in all other processes at the same time, while the tokenizer is loading.
        from nanovllm.executor.local import LocalExecutor

        report = report or (lambda stage, share: None)
        executor = LocalExecutor(config, model_config, processes, compiler, module, report)
        try:
            model_config = model_config.with_end(tokenizer.own.eos_token_id)  # has been loading meanwhile
        except ValueError:
            executor.close()
            raise
    except BaseException:
        processes.close()
        processes.close_store()
        raise
    finally:
        if compiler is not None:
            compiler.close()
    engine = LLMEngine(executor, model_config, tokenizer, trace)
    engine.startup_seconds = time.perf_counter() - begin
    return engine
