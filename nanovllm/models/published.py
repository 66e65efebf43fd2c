"""config.json of published models: with load_format="dummy" their names need no file, and bench.py knows them."""

from typing import Any


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }


def _llama(layers: int, hidden: int, intermediate: int, heads: int, factor: float, tied: bool) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": [128001, 128008, 128009],
    }


_QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}
_GEMMA2_9B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 256000,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": [1, 107],
}



def _qwen3_moe(layers: int, hidden: int, intermediate: int, expert: int, heads: int) -> dict[str, Any]:
    return {
        **_qwen3(layers, hidden, intermediate, heads, False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 4,
        "moe_intermediate_size": expert,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


_GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 200002,
}

PUBLISHED_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, False),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, False),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, False),
    "Llama-3.1-8B": _llama(32, 4096, 14336, 32, 8.0, False),
    "Llama-3.2-1B": _llama(16, 2048, 8192, 32, 32.0, True),
    "Qwen2.5-7B": _QWEN25_7B,
    "Gemma-2-9B": _GEMMA2_9B,
    "Qwen3-30B-A3B": _qwen3_moe(48, 2048, 6144, 768, 32),
    "Qwen3-235B-A22B": _qwen3_moe(94, 4096, 12288, 1536, 64),
    "gpt-oss-20b": _GPT_OSS_20B,
}
"""By name."""
