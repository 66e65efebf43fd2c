"""Models that read images or sound, and whose language model is of a family that is here: their text is served. No
torch."""

from dataclasses import replace
from typing import Any

from nanovllm.errors import shown
from nanovllm.models.names import CheckpointNames
from nanovllm.models.unserved import refuse_unserved, unserved_parts

_OF_TEXT = (
    "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "model.embed_tokens_per_layer.",
    "model.per_layer_",
)  # fmt: skip
"""Beginnings of a language model's names, without what is stripped."""
_STEMS = {
    "language_model.": (
        "AyaVision", "Cohere2Vision", "Exaone4_5_", "Gemma3", "Gemma4", "Gemma4Unified", "Glm46V", "Glm4v", "Glm4vMoe",
        "InternVL", "KimiK25", "Kimi_K25", "LightOnOcr", "Llava", "LlavaNext", "LlavaOnevision", "Mistral3",
        "MuseGlimmer", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Voxtral",
    ),
    "text_model.": ("Idefics3", "SmolVLM"),
}  # fmt: skip
WRAPPERS = {f"{stem}ForConditionalGeneration": prefix for prefix, stems in _STEMS.items() for stem in stems}
"""Name in `architectures` -> prefix that the names of a language model's tensors have beside those of its family."""
_QWEN_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80, "num_key_value_heads": 8}
_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = {**_7B, "intermediate_size": 11008, "max_position_embeddings": 2048}
_MISTRAL = {**_7B, "intermediate_size": 14336, "max_position_embeddings": 131072}
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "gemma4": ("Gemma4ForCausalLM", {}),
    "gemma4_unified": ("Gemma4UnifiedForCausalLM", {}),
    "glm4v": ("Glm4ForCausalLM", {"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}),
    "glm4v_moe": ("Glm4MoeForCausalLM", {"attention_bias": True}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "kimi_k2": ("DeepseekV3ForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "muse_glimmer": ("MuseGlimmerTextModel", {}),
    "qwen2": ("Qwen2ForCausalLM", {"max_position_embeddings": 32768}),
    "qwen2_5_vl": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_vl": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_5": ("Qwen3_5ForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextModel", {}),
    "qwen3_vl": ("Qwen3ForCausalLM", {"rope_theta": 5e5}),
}
"""model_type of a language model, without "_text" -> its family, and what is filled in otherwise than there."""


def text_of(architecture: str, raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family of a wrapper's language model, and what is filled in where config.json, `raw`, is silent. Raises
    ValueError for a family that is not here."""
    nested = raw.get("text_config")
    text = raw if nested is None else nested
    kind = text.get("model_type")
    if (family := str(kind).removesuffix("_text")) not in _TEXTS:
        why = unserved_parts(text) or "is of no family that is here"
        refuse_unserved(f"{architecture}: its language model (model_type={shown(kind)})", why)
    return _TEXTS[family]


def wrapped(names: CheckpointNames, wrapper: str | None) -> CheckpointNames:
    """A family's `names` as a checkpoint of the wrapper has them, if there is one."""
    return names if wrapper is None else replace(names, stripped=WRAPPERS[wrapper], only=_OF_TEXT)
