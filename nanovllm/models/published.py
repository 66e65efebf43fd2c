"""config.json of published models: with load_format="dummy" their names need no file, and bench.py knows them."""

from typing import Any


def _shape(
    family: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, positions: int,
    eos: int | list[int], **more: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": [f"{family}ForCausalLM"], "num_hidden_layers": layers, "hidden_size": hidden,
        "intermediate_size": intermediate, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "max_position_embeddings": positions, "eos_token_id": eos, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool = False) -> dict[str, Any]:
    more = {"head_dim": 128, "rope_theta": 1e6, "tie_word_embeddings": tied}
    return _shape("Qwen3", layers, hidden, intermediate, heads, 8, 151936, 40960, 151645, **more)


def _qwen3_moe(layers: int, hidden: int, intermediate: int, expert: int, heads: int) -> dict[str, Any]:
    more = {"head_dim": 128, "rope_theta": 1e6, "moe_intermediate_size": expert, "num_experts": 128}
    more |= {"num_experts_per_tok": 8, "norm_topk_prob": True}
    return _shape("Qwen3Moe", layers, hidden, intermediate, heads, 4, 151936, 40960, 151645, **more)


def _qwen3_5(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, value_heads: int, family: str = "Qwen3_5",
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    more |= {"head_dim": 256, "rope_parameters": rope, "linear_num_value_heads": value_heads}
    return _shape(family, layers, hidden, intermediate, heads, kv_heads, 248320, 262144, 248046, **more)


def _llama(layers: int, hidden: int, intermediate: int, factor: float, tied: bool = False) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    more = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "rope_scaling": rope, "tie_word_embeddings": tied}
    eos = [128001, 128008, 128009]
    return _shape("Llama", layers, hidden, intermediate, 32, 8, 128256, 131072, eos, **more)


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more: dict[str, Any] = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64}
    more |= {"sliding_window": 128, "attention_bias": True, "rms_norm_eps": 1e-5}
    more |= {"quantization_config": {"quant_method": "mxfp4"}}
    return _shape("GptOss", layers, 2880, 2880, 64, 8, 201088, 131072, 200002, **more)


def _gemma4(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, global_kv_heads: int, **more: Any
) -> dict[str, Any]:
    more |= {"head_dim": 256, "sliding_window": 1024, "num_global_key_value_heads": global_kv_heads}
    more |= {"attention_k_eq_v": True, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0}
    more |= {"tie_word_embeddings": True}
    return _shape("Gemma4", layers, hidden, intermediate, heads, kv_heads, 262144, 262144, [1, 106], **more)


def _yarn(mscale: float) -> dict[str, Any]:
    """DeepSeek's."""
    more = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    return {"type": "yarn", "factor": 40, "mscale": mscale, "mscale_all_dim": mscale, **more}


PUBLISHED_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, tied=True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, tied=True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, tied=True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64),
    "Qwen3.5-9B": _qwen3_5(32, 4096, 12288, 16, 4, 32),
    "Qwen3.6-27B": _qwen3_5(64, 5120, 17408, 24, 4, 48),
    "Qwen3.6-35B-A3B": _qwen3_5(
        40, 2048, 512, 16, 2, 32, "Qwen3_5Moe", moe_intermediate_size=512, shared_expert_intermediate_size=512,
        num_experts=256, num_experts_per_tok=8,
    ),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 8.0),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32.0, tied=True),
    "Qwen2.5-7B": _shape("Qwen2", 28, 3584, 18944, 28, 4, 152064, 32768, 151645, rope_theta=1e6),
    "Gemma-2-9B": _shape(
        "Gemma2", 42, 3584, 14336, 16, 8, 256000, 8192, [1, 107], head_dim=256, rope_theta=1e4,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, tie_word_embeddings=True,
    ),
    "Gemma-4-31B": _gemma4(60, 5376, 21504, 32, 16, 4),
    "Gemma-4-26B-A4B": _gemma4(
        30, 2816, 2112, 16, 8, 2, enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704
    ),
    "Qwen3-30B-A3B": _qwen3_moe(48, 2048, 6144, 768, 32),
    "Qwen3-235B-A22B": _qwen3_moe(94, 4096, 12288, 1536, 64),
    "Olmo-Hybrid-7B": _shape("OlmoHybrid", 32, 3840, 11008, 30, 30, 100352, 65536, 100257, rope_theta=None),
    "LFM2-1.2B": _shape(
        "Lfm2", 16, 2048, 12288, 32, 8, 65536, 128000, 7, norm_eps=1e-5, full_attn_idxs=[2, 5, 8, 10, 12, 14],
        tie_embedding=True, rope_theta=1e6,
    ),
    "Nemotron-3-Nano-30B-A3B": _shape(
        "NemotronH", 52, 2688, 1856, 32, 2, 131072, 262144, 2, head_dim=128, mamba_num_heads=64, mamba_head_dim=64,
        ssm_state_size=128, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "Nemotron-3-Super-120B-A12B": _shape(
        "NemotronH", 88, 4096, 2688, 32, 2, 131072, 262144, [2, 11], head_dim=128, mamba_num_heads=128,
        mamba_head_dim=64, ssm_state_size=128, n_routed_experts=512, num_experts_per_tok=22, moe_latent_size=1024,
        moe_intermediate_size=2688, moe_shared_expert_intermediate_size=5376, routed_scaling_factor=5.0,
        hybrid_override_pattern="MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    ),
    "GLM-4.7-Flash": _shape(
        "Glm4MoeLite", 47, 2048, 10240, 20, 20, 154880, 202752, [154820, 154827, 154829], rope_theta=1e6,
        moe_intermediate_size=1536, rms_norm_eps=1e-5,
    ),
    "DeepSeek-V2-Lite": _shape(
        "DeepseekV2", 27, 2048, 10944, 16, 16, 102400, 163840, 100001, q_lora_rank=None, moe_intermediate_size=1408,
        num_experts_per_tok=6, first_k_dense_replace=1, rope_scaling=_yarn(0.707),
    ),
    "DeepSeek-V3": _shape(
        "DeepseekV3", 61, 7168, 18432, 128, 128, 129280, 163840, 1, moe_intermediate_size=2048, rope_scaling=_yarn(1.0)
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip
"""Contents of config.json by the model's name."""
