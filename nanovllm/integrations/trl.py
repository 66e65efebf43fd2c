"""TRL's trainers sample their completions with this engine, in the trainer's own process ("colocate").

    from nanovllm.integrations.trl import install
    install()
    trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate", ...))

After `install`, GRPO, RLOO and the other trainers that hold a VLLMGeneration build `Generation` in its place. The
arguments that they bring keep their meaning. Of a policy that is PEFT's LoRA of a model only the adapter is sent, which
rows of the engine have as "policy@1", "policy@2" and so on. Tested with TRL 1.16.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from accelerate.utils import is_peft_model
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer, rloo_trainer  # noqa: F401 (loaded, so that install finds them)

from nanovllm.adapters import LoRARequest, config_text
from nanovllm.llm import LLM
from nanovllm.models.adapter_files import check_config
from nanovllm.sampling_params import SamplingParams, StructuredOutput

_ITS_CLASS = vllm_generation.VLLMGeneration
_replaced: list[ModuleType] = []
"""Modules that have `Generation` in its place."""


def install(**engine_options: Any) -> None:
    """Makes TRL's trainers with use_vllm=True sample with this engine. `engine_options`: options of EngineConfig beyond
    those that the trainer sets; enable_lora=False sends policies with an adapter merged, whatever kind it is of."""
    uninstall()
    chosen = type("Generation", (Generation,), {"engine_options": engine_options})
    for name, module in list(sys.modules.items()):
        if name.startswith("trl.") and vars(module).get("VLLMGeneration") is _ITS_CLASS:
            module.VLLMGeneration = chosen  # type: ignore[attr-defined]
            _replaced.append(module)


def uninstall() -> None:
    """Puts TRL's own class back."""
    while _replaced:
        _replaced.pop().VLLMGeneration = _ITS_CLASS  # type: ignore[attr-defined]


class Engine(LLM):
    """LLM with the methods and attributes that trainers expect of vLLM's engine."""

    @property
    def llm_engine(self) -> Any:
        return SimpleNamespace(model_config=SimpleNamespace(max_model_len=self.config.max_model_len))


class Generation(_ITS_CLASS):  # type: ignore[misc, valid-type]
    """One engine in each trainer process, with the trainer's weights. Its parent knows how to gather parameters under
    FSDP, DeepSpeed and PEFT; what it does with vLLM happens here."""

    engine_options: ClassVar[dict[str, Any]] = {}
    policy: LoRARequest | None = None
    """Adapter that completions are sampled with; None: the engine's weights."""
    _num_syncs = 0

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
        self._sends_adapter = is_peft_model(self.model) and self.engine_options.get("enable_lora", True)
        room = self._room() if self._sends_adapter else {}
        self.llm = Engine(self.model.name_or_path, **{**given, **room, **self.engine_options})

    def sync_weights(self) -> None:
        """The trainer's weights, one parameter at a time: under ZeRO-3 each is whole for a moment only. Of a policy
        with an adapter the base is sent once."""
        self._wake("weights")
        if not (self._sends_adapter and self._num_syncs):
            self.llm.begin_update()
            for pair in self._base() if self._sends_adapter else self._iter_named_params():
                self.llm.update([pair])
            self.llm.finish_update()
        self._num_syncs += 1
        if self._sends_adapter:
            self._send_adapter()

    def _room(self) -> dict[str, Any]:
        """Options of an engine for the policy's adapter. Raises ValueError for one that it cannot have."""
        config = self.model.peft_config[self.model.active_adapter]
        try:
            check_config(json.loads(config_text(config.to_dict())))
        except ValueError as error:
            raise ValueError(f"peft_config: {error}; install(enable_lora=False) sends merged weights") from None
        if self._dist.is_fsdp and self._dist.fsdp_version == 1:
            raise ValueError("fsdp_version=1: must be 2 for a policy with an adapter, or install(enable_lora=False)")
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max(config.r, *config.rank_pattern.values(), 1)}

    def _base(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's weights without its adapter. None where some are quantised: the trainer has them as the
        checkpoint has them, then."""
        own, prefix = self.model.named_parameters(), self.model.prefix
        base = {name: parameter for name, parameter in own if prefix not in name}
        if all(parameter.is_floating_point() for parameter in base.values()):
            for name, parameter in base.items():
                with self._dist.gather_params([parameter]):
                    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
                    yield self._fix_param_name_to_vllm(name), _whole(parameter)

    def _send_adapter(self) -> None:
        """Has completions sampled with the policy's adapter as it is now, under a name of its own. What rows have begun
        with before, they keep."""
        from peft import get_peft_model_state_dict

        name, before = self.model.active_adapter, self.policy
        own = {key: value for key, value in self.model.named_parameters() if self.model.prefix in key}
        with self._dist.gather_params([*own.values()]):
            found = {key: _whole(value).clone() for key, value in own.items()}
        tensors = get_peft_model_state_dict(self.model, found, adapter_name=name, save_embedding_layers=False)
        config = self.model.peft_config[name].to_dict()
        self.policy = self.llm.load_adapter(f"policy@{self._num_syncs}", tensors=tensors, config=config)
        if before is not None:
            self.llm.remove_adapter(before.lora_name)

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, Any, Any, Any]:
        """A completion of each prompt, as the parent's method says. Copies of a prompt are computed once."""
        if images is not None and any(images):
            raise ValueError("images: must be None: the engine serves text models")
        if "weights" in self.llm.engine.state.asleep:
            self.sync_weights()  # sleep has dropped them
        self._wake("kv_cache")
        with profiler or nullcontext():
            outputs = self.llm.generate(prompts, self._params(), use_tqdm=False, lora_request=self.policy)
        if self.enable_sleep_mode:
            self.llm.sleep(level=1 if self.policy else 2)
        found = vllm_generation.extract_logprobs(outputs)
        token_ids = [completion.token_ids for output in outputs for completion in output.outputs]
        return [output.prompt_token_ids for output in outputs], token_ids, *found

    def _wake(self, tag: str) -> None:
        if tag in self.llm.engine.state.asleep:
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
        return SamplingParams(**options)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter, which FSDP2 may have cut."""
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()
