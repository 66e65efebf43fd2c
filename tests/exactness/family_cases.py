"""Families of models as tiny checkpoints: a configuration of transformers for each, every parameter random."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams

WINDOW, NUM_TOKENS, AGAIN = 7, 12, 4
"""Tokens of the windows, of a text, and of the same text when it is generated again."""
PROMPTS = [[5], [7, 3, 200, 9, 31, 77], [(37 * i + 11) % 211 for i in range(28)]]
TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}
SHAPE: dict[str, Any] = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
HEADS = {"head_dim": 16}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 7}
SLIDING, FULL = "sliding_attention", "full_attention"
ALTERNATING = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING, SLIDING]}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.5, 2.5, 4.0], "short_factor": [1.0, 1.2, 2.0]}
BY_KIND = {FULL: {**YARN, "rope_theta": 5e3}, SLIDING: {"rope_type": "default", "rope_theta": 5e3}}
TWO_BASES = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e2},
}
CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 28}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 3}
GROUPED = {
    "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "n_shared_experts": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
GRANITE4 = {"num_local_experts": 0, "layer_types": [FULL] * 4, "mamba_n_heads": 1}
LAGUNA = {
    **EXPERTS, **ALTERNATING, **SHARED, "moe_routed_scaling_factor": 1.7,
    "rope_parameters": {
        FULL: {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
        SLIDING: {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip
LINEAR_ATTENTION = "linear_attention"
DELTA = {
    **HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR_ATTENTION, FULL, LINEAR_ATTENTION, LINEAR_ATTENTION],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
OLMO_HYBRID = {
    **DELTA, "num_key_value_heads": 6, "linear_key_head_dim": 48, "linear_value_head_dim": 80,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}  # fmt: skip
MAMBA = {
    "layer_types": [LINEAR_ATTENTION, FULL, LINEAR_ATTENTION, LINEAR_ATTENTION], "mamba_n_heads": 6,
    "mamba_d_head": 16, "mamba_d_state": 16,
}  # fmt: skip
NEMOTRON = {
    **HEADS, "layers_block_type": [LINEAR_ATTENTION, "moe", FULL, "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 16,
    "n_groups": 4, "ssm_state_size": 32, "time_step_min": 0.4, "n_routed_experts": 6, "num_experts_per_tok": 3,
    "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.7,
}  # fmt: skip
GEMMA4 = {**ALTERNATING, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
GEMMA4_E = {
    **GEMMA4, "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 211, "use_double_wide_mlp": True,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "first_k_dense_replace": 1,
}  # fmt: skip
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}
CONV = {"layer_types": ["conv", FULL, "conv", "conv"]}
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)  # which transformers leaves out


@dataclass(frozen=True)
class Case:
    """A transformers configuration class (its name without "Config"), what it is given beside SHAPE, and the entries
    that are written to config.json in place of what transformers writes."""

    config: str
    entries: dict[str, Any]
    written: dict[str, Any] | None = None
    dtype: torch.dtype = torch.float32
    """Type of the files, to which the model's own weights are rounded."""


CASES = {
    "llama": Case("Llama", {"rope_parameters": LLAMA3, **HEADS}),
    "llama, three a group, tied, biased": Case(
        "Llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, older rope": Case(
        "Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 1e4}},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {k: v for k,
        v in LLAMA3.items() if k != "rope_theta"}}),
    "mistral": Case("Mistral", {"sliding_window": WINDOW, **HEADS}),
    "mistral without windows": Case("Mistral", {"sliding_window": None}),
    "ministral": Case("Ministral", {**ALTERNATING, **HEADS}),
    "cwm": Case("Cwm", {**HEADS, "rope_parameters": LLAMA3, "sliding_window": WINDOW, **SPECIAL}),
    "ministral3": Case(
        "Ministral3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.3}, **HEADS}),
    "smollm3": Case("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "smollm3 with windows": Case(
        "SmolLM3", {"use_sliding_window": True, "sliding_window": WINDOW, "tie_word_embeddings": True}),
    "granite": Case(
        "Granite", {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6,
        "attention_multiplier": 0.2}),
    "granite 4 without recurrent layers": Case(
        "GraniteMoeHybrid", {**GRANITE4, "position_embedding_type": "rope", "shared_intermediate_size": 28,
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
        {"layer_types": ["attention"] * 4}),
    "granite 4 without recurrent layers and rope": Case(
        "GraniteMoeHybrid", {**GRANITE4, "shared_intermediate_size": 28, "logits_scaling": 0.5}),
    "granite 4": Case(
        "GraniteMoeHybrid", {**GRANITE4, **MAMBA, **LOCAL_EXPERTS, "shared_intermediate_size": 28,
        "embedding_multiplier": 3.0, "residual_multiplier": 0.6}),
    "granite 4 without experts": Case("GraniteMoeHybrid", {**GRANITE4, **MAMBA, "shared_intermediate_size": 28}),
    "nemotron_h": Case("NemotronH", NEMOTRON),
    "nemotron_h that ends with experts": Case(
        "NemotronH", {**NEMOTRON, "layers_block_type": None, "hybrid_override_pattern": "M-*E"},
        {"layers_block_type": None, "hybrid_override_pattern": "M-*E"}),
    "nemotron_h with latent experts": Case("NemotronH", {**NEMOTRON, "moe_latent_size": 24, "n_groups": 2}),
    "seed_oss": Case("SeedOss", {**HEADS, "attention_out_bias": True}),
    "arcee": Case("Arcee", {"rope_parameters": YARN, **HEADS}),
    "ernie4_5": Case("Ernie4_5", {**HEADS, "use_bias": True}),
    "hunyuan_v1_dense": Case(
        "HunYuanDenseV1", {**HEADS, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 30.0,
        "factor": 1.0}}),
    "qwen3_next": Case("Qwen3Next", {**DELTA, **EXPERTS, **SHARED}),
    "qwen3_5": Case("Qwen3_5Text", DELTA),
    "qwen3_5_moe": Case("Qwen3_5MoeText", {**DELTA, **EXPERTS, **SHARED}),
    "olmo_hybrid": Case("OlmoHybrid", OLMO_HYBRID),
    "olmo_hybrid with rope": Case(
        "OlmoHybrid", {**OLMO_HYBRID, "rope_parameters": LINEAR, "linear_allow_neg_eigval": False}),
    "lfm2": Case("Lfm2", {**CONV, "block_multiple_of": 8}),
    "lfm2_moe": Case("Lfm2Moe", {**CONV, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.7}),
    "qwen2": Case("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen2, seven a group": Case("Qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56}),
    "qwen3": Case("Qwen3", {**HEADS, "attention_bias": True}),
    "qwen3, one query head a group, older rope": Case(
        "Qwen3", {**HEADS, "num_key_value_heads": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        {"rope_parameters": None, "rope_theta": 5e3}),
    "qwen3, head 64, tied, another theta": Case(
        "Qwen3", {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default",
        "rope_theta": 1e6}}),
    "qwen3, head 128, linear": Case("Qwen3", {"head_dim": 128, "num_key_value_heads": 1, "rope_parameters": LINEAR}),
    "qwen3, linear, older rope": Case(
        "Qwen3", {**HEADS, "rope_parameters": LINEAR},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    "qwen3, yarn, older rope": Case(
        "Qwen3", {**HEADS, "num_attention_heads": 10, "rope_parameters": YARN},
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {k: v for k,
        v in YARN.items() if "theta" not in k}}),
    "qwen3, yarn with its own factor and ramp": Case(
        "Qwen3", {**HEADS, "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0,
        "truncate": False}}),
    "qwen3, bfloat16 files": Case("Qwen3", {**HEADS, "num_hidden_layers": 1}, dtype=torch.bfloat16),
    "qwen3, float64 files": Case("Qwen3", {**HEADS, "num_hidden_layers": 1}, dtype=torch.float64),
    "gemma": Case("Gemma", {**HEADS, "tie_word_embeddings": True}),
    "gemma2": Case("Gemma2", {**HEADS, **ALTERNATING, **CAPS, "query_pre_attn_scalar": 20}),
    "gemma3": Case("Gemma3Text", {**HEADS, **ALTERNATING, "rope_parameters": TWO_BASES}),
    "gemma3, older spelling": Case(
        "Gemma3Text", {**HEADS, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL] * 2,
        "rope_parameters": TWO_BASES, "tie_word_embeddings": True},
        {"layer_types": None, "sliding_window_pattern": 2, "rope_parameters": None, "rope_theta": 1e5,
        "rope_local_base_freq": 1e2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma4": Case(
        "Gemma4Text", {**HEADS, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "final_logit_softcapping": 4.0}),
    "gemma4, values of their own, as published": Case(
        "Gemma4Text", {**HEADS, **GEMMA4, "tie_word_embeddings": True, "attention_bias": True},
        {"per_layer_config": None, "global_head_dim": 32, "rope_parameters": None}),
    "gemma4, experts": Case(
        "Gemma4Text", {**HEADS, **GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3,
        "moe_intermediate_size": 20, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4, keys of other layers and inputs of each": Case("Gemma4Text", {**HEADS, **GEMMA4_E}),
    "gemma4_unified": Case("Gemma4UnifiedText", {
        **HEADS, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3}),
    "phi3": Case(
        "Phi3", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 256}),
    "phi3, long": Case(
        "Phi3", {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 2, "sliding_window": WINDOW}),
    "olmo2": Case("Olmo2", {"num_key_value_heads": 6}),
    "olmo3": Case("Olmo3", {**ALTERNATING, "rope_parameters": BY_KIND}),
    "glm": Case("Glm", {**HEADS, "eos_token_id": 7}),
    "glm4": Case("Glm4", {**HEADS, "eos_token_id": 7}),
    "exaone4": Case("Exaone4", {**ALTERNATING, "sliding_window_pattern": 4}),
    "cohere": Case("Cohere", {"logit_scale": 0.3, "attention_bias": True}),
    "cohere2": Case("Cohere2", {**ALTERNATING, "logit_scale": 0.5, "tie_word_embeddings": True}),
    "starcoder2": Case("Starcoder2", {"sliding_window": WINDOW, "use_bias": True}),
    "nemotron": Case("Nemotron", {**HEADS, "mlp_bias": True, "attention_bias": True}),
    "qwen3_moe": Case("Qwen3Moe", {**HEADS, **EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe, not renormalised": Case("Qwen3Moe", {**HEADS, **EXPERTS, "decoder_sparse_step": 2}),
    "qwen2_moe": Case("Qwen2Moe", {**EXPERTS, **SHARED}),
    "qwen2_moe with windows": Case(
        "Qwen2Moe", {**EXPERTS, **SHARED, "use_sliding_window": True, "sliding_window": WINDOW,
        "max_window_layers": 3}),
    "mixtral": Case("Mixtral", {"num_local_experts": 5, "sliding_window": WINDOW}),
    "granitemoe": Case(
        "GraniteMoe", {"num_local_experts": 5, "embedding_multiplier": 3.0, "residual_multiplier": 0.6,
        "logits_scaling": 0.5}),
    "glm4_moe": Case("Glm4Moe", {**HEADS, **GROUPED, "use_qk_norm": True, "attention_bias": True}),
    "minimax_m2": Case("MiniMaxM2", {**HEADS, **LOCAL_EXPERTS, "rotary_dim": 8}),
    "dots1": Case("Dots1", {**HEADS, **GROUPED, "sliding_window": WINDOW, "max_window_layers": 2}),
    "solar_open": Case("SolarOpen", {**HEADS, **GROUPED, "attention_bias": True}),
    "hy_v3": Case("HYV3", {**HEADS, **EXPERTS, "num_shared_experts": 2}),
    "afmoe": Case(
        "Afmoe", {**HEADS, **EXPERTS, "num_shared_experts": 2, "route_scale": 1.7, "sliding_window": WINDOW,
        "mup_enabled": True}),
    "laguna": Case("Laguna", {**HEADS, **LAGUNA, "num_attention_heads_per_layer": [6, 4, 8, 6]}),
    "laguna, gates by element": Case("Laguna", {**HEADS, **LAGUNA, "gating": "per-element", "attention_bias": True}),
    "exaone_moe": Case("ExaoneMoe", {**HEADS, **EXPERTS, **ALTERNATING, "sliding_window_pattern": 4}),
    "ernie4_5_moe": Case(
        "Ernie4_5_Moe", {**HEADS, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20,
        "moe_layer_start_index": 1}),
    "olmoe": Case("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe, renormalised": Case("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    "granitemoeshared": Case(
        "GraniteMoeShared", {**LOCAL_EXPERTS, "shared_intermediate_size": 28, "embedding_multiplier": 3.0}),
    "hunyuan_v1_moe": Case(
        "HunYuanMoEV1", {**HEADS, "num_experts": 6, "moe_topk": 3},
        {"moe_topk": [3] * 4, "num_shared_expert": [1] * 4, "moe_intermediate_size": [52] * 4}),
    "deepseek_v2": Case(
        "DeepseekV2", {**LATENT, **GROUPED, "topk_method": "group_limited_greedy", "rope_parameters": MSCALE}),
    "deepseek_v2, lite": Case(
        "DeepseekV2", {**LATENT, **GROUPED, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3": Case("DeepseekV3", {**LATENT, **GROUPED, "rope_parameters": MSCALE}),
    "deepseek_v3, queries of rows, not interleaved": Case(
        "DeepseekV3", {**LATENT, **GROUPED, "q_lora_rank": None, "rope_interleave": False}),
    "glm4_moe_lite": Case("Glm4MoeLite", {**LATENT, **GROUPED, "num_nextn_predict_layers": 1}),
    "mistral4": Case(
        "Mistral4", {**LATENT, **GROUPED, "n_group": 1, "topk_group": 1, "rope_parameters": {**MSCALE,
        "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 8 / 24}}),
    "gpt_oss": Case(
        "GptOss", {**HEADS, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": WINDOW,
        "swiglu_limit": 0.9, "rope_parameters": {**YARN, "truncate": False}}),
}  # fmt: skip


def for_four_ranks(case: Case) -> Case:
    """The case with as many heads as four ranks need."""
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    if "head_dim" not in case.entries:
        heads["hidden_size"] = 64
    if "kv_lora_rank" in case.entries:
        heads["num_key_value_heads"] = 8
    if "num_attention_heads_per_layer" in case.entries:
        heads["num_attention_heads_per_layer"] = [8, 4, 16, 8]
    if "mamba_d_head" in case.entries:
        heads["mamba_n_heads"] = 8
    return replace(case, entries={**case.entries, **heads})


def with_layers(case: Case, count: int) -> Case:
    """The case with its first layers alone."""
    cut = {name: value[:count] for name, value in case.entries.items() if isinstance(value, list)}
    return replace(case, entries={**case.entries, **cut, "num_hidden_layers": count})


def make_model(case: Case, seed: int = 0) -> Any:
    """A model of which every parameter is random: norms start at one value, which hides what they are."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{case.config}Config")(**{**SHAPE, **case.entries})
    return randomised(transformers.AutoModelForCausalLM, config)


def randomised(kind: Any, config: Any) -> Any:
    """kind: a class of transformers that makes models of a configuration."""
    config._attn_implementation = "eager"
    model = kind.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        names = ("correction", "expert_bias")
        corrections = ((name, each) for name, each in model.named_buffers() if any(part in name for part in names))
        for name, parameter in (*model.named_parameters(), *corrections):
            kind = type(model).__name__
            plus_one = ("emma" in kind and "emma4" not in kind) or kind.startswith("NemotronFor")
            plus_one |= kind.startswith(("Qwen3Next", "Qwen3_5")) and "linear_attn" not in name
            if name.endswith("A_log"):
                parameter.uniform_(0.005, 4.0).log_()
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(0.0 if plus_one else 1.0, 0.3)
            else:
                parameter.normal_(0.0, 0.3 if parameter.dim() == 1 else 0.2)
    return model


def save(model: Any, case: Case, folder: Path) -> Path:
    for parameter in model.parameters():  # not the buffers: rotary frequencies stay what they are
        parameter.data = parameter.data.to(case.dtype)
    model.save_pretrained(folder)
    model.float()
    if case.config == "OlmoHybrid":
        _cut_convolutions(folder / "model.safetensors", model.config)
    path = folder / "config.json"
    config = {**json.loads(path.read_text(encoding="utf-8")), **(case.written or {})}
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def _cut_convolutions(file: Path, config: Any) -> None:
    """Cuts each convolution into those of queries, keys and values, as published files have it: transformers writes
    three equal parts."""
    tensors, keys = load_file(file), config.linear_num_key_heads * config.linear_key_head_dim
    for index in range(config.num_hidden_layers):
        names = [f"model.layers.{index}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        if names[0] in tensors:
            joint = torch.cat([tensors[name] for name in names])
            parts = joint.split([keys, keys, len(joint) - 2 * keys])
            tensors |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, file, metadata={"format": "pt"})


@torch.inference_mode()
def reference_logits(model: Any, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[len(output), vocab]: for each output token, given all tokens before it."""
    return model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()


OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": "cpu", "num_kvcache_blocks": 48, "max_num_batched_tokens": 9,
    "disable": ("async_scheduling",), "max_model_len": 256,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
