"""TRL's trainers sample their completions with this engine, in the trainer's own process ("colocate").

    from nanovllm.integrations.trl import install
    install()
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))

After `install`, GRPO, RLOO and the other trainers that hold a VLLMGeneration build `Generation` in its place, and the
online DPO trainer an `OnlineEngine`. The arguments that they bring keep their meaning. Tested with TRL 1.16.
"""

import sys
from collections.abc import Iterable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from trl.experimental.online_dpo import online_dpo_trainer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer, rloo_trainer  # noqa: F401 (loaded, so that install finds them)

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams, StructuredOutput

_ITS_CLASS = vllm_generation.VLLMGeneration
_replaced: list[tuple[ModuleType, str, Any]] = []
"""Modules, names in them, and what these meant before."""


def install(**engine_options: Any) -> None:
    """From here on TRL's trainers with use_vllm=True sample with this engine. `engine_options`: of EngineConfig, beyond
    those that the trainer sets."""
    uninstall()
    chosen = type("Generation", (Generation,), {"engine_options": engine_options})
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and vars(module).get("VLLMGeneration") is _ITS_CLASS:
            _replace(module, "VLLMGeneration", chosen)
    engine = type("OnlineEngine", (OnlineEngine,), {"engine_options": engine_options})
    for name, value in (
        ("is_vllm_available", lambda: True),
        ("LLM", engine),
        ("SamplingParams", SamplingParams),
        ("StructuredOutputsParams", StructuredOutput),
    ):
        _replace(online_dpo_trainer, name, value)


def _replace(module: ModuleType, name: str, value: Any) -> None:
    _replaced.append((module, name, vars(module).get(name)))
    setattr(module, name, value)


def uninstall() -> None:
    """Puts TRL's own classes back."""
    while _replaced:
        module, name, value = _replaced.pop()
        setattr(module, name, value)


class Engine(LLM):
    """What trainers look for in an engine, beside LLM's own methods."""

    @property
    def llm_engine(self) -> Any:
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=self.config.max_model_len))


class OnlineEngine(Engine):
    """An engine as the online DPO trainer builds and feeds it: with vLLM's arguments, and a weight at a time into what
    it takes for vLLM's model, until it empties the prefix cache."""

    engine_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: str, enable_sleep_mode: bool = False, **given: Any) -> None:
        """Raises ValueError naming what cannot be had here."""
        if given.pop("tensor_parallel_size", 1) != 1:
            raise ValueError("vllm_tensor_parallel_size: must be 1 with nanovllm")
        if (quantization := given.pop("quantization", None)) is not None:
            raise ValueError(f"quantization={quantization!r}: must be None with nanovllm")
        for name in ("model_impl", "distributed_executor_backend"):  # of vLLM's own parts
            given.pop(name, None)
        super().__init__(model, **{"enable_sleep": enable_sleep_mode, **given, **self.engine_options})

    @property
    def llm_engine(self) -> Any:
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._take_weights))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        return SimpleNamespace(**vars(super().llm_engine), model_executor=worker)

    def _take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        if not self.engine.lacks_weights:
            self.begin_update()
        self.update(weights)

    def reset_prefix_cache(self) -> None:
        """Said after the last weight."""
        self.finish_update()

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None) -> int:
        """Keeps the weights: the trainer does not bring them anew each time that it wakes the engine."""
        return super().sleep(1, tags)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Also of what is awake."""
        if wanted := self.engine.asleep.intersection(self.engine.asleep if tags is None else tags):
            super().wake_up(sorted(wanted))


class Generation(_ITS_CLASS):  # type: ignore[misc, valid-type]
    """One engine in each trainer process, with the trainer's weights. Its parent knows how to gather parameters under
    FSDP, DeepSpeed and PEFT; what it does with vLLM happens here."""

    engine_options: ClassVar[dict[str, Any]] = {}

    def _init_vllm(self) -> None:
        """Starts the engine. Raises ValueError naming what cannot be had here."""
        for name, value, only in (
            ("vllm_mode", self.mode, "colocate"),
            ("vllm_tensor_parallel_size", self.tensor_parallel_size, 1),
        ):
            if value != only:
                raise ValueError(f"{name}={value!r}: must be {only!r} with nanovllm")
        device = self.accelerator.device
        if device.index:
            raise ValueError(f"device {device}: each process must see its own GPU only (CUDA_VISIBLE_DEVICES)")
        given = {
            "device": device.type,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs or 256,
            "seed": self.accelerator.process_index,
            "logprobs_mode": "processed",
            "max_logprobs": -1,
            "enable_sleep": self.enable_sleep_mode,
        }
        self.llm = Engine(self.model.name_or_path, **{**given, **self.engine_options})

    def sync_weights(self) -> None:
        """The trainer's weights, one parameter at a time: under ZeRO-3 each is whole for a moment only."""
        self._wake("weights")
        self.llm.begin_update()
        for pair in self._iter_named_params():
            self.llm.update([pair])
        self.llm.finish_update()

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """A completion of each prompt, as the parent's method says. Copies of a prompt are computed once."""
        if images is not None and any(images):
            raise ValueError("images: must be None: the engine serves text models")
        if "weights" in self.llm.engine.asleep:
            self.sync_weights()  # sleep has dropped them
        self._wake("kv_cache")
        with profiler or nullcontext():
            outputs = self.llm.generate(prompts, self._params(), use_tqdm=False)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        found = vllm_generation.extract_logprobs(outputs)
        token_ids = [completion.token_ids for output in outputs for completion in output.outputs]
        return [output.prompt_token_ids for output in outputs], token_ids, *found

    def _wake(self, tag: str) -> None:
        if tag in self.llm.engine.asleep:
            self.llm.wake_up(tags=[tag])

    def _params(self) -> SamplingParams:
        options = {
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p or 0.0,
            "max_tokens": self.max_completion_length,
            "logprobs": self.logprobs,
            **self.generation_kwargs,
        }
        if self.structured_outputs_regex is not None:
            options["structured_outputs"] = StructuredOutput(regex=self.structured_outputs_regex)
        elif isinstance(options.get("structured_outputs"), dict):
            options["structured_outputs"] = StructuredOutput(**options["structured_outputs"])
        return SamplingParams(**options)
