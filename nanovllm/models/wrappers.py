"""Models that read images or sound, and whose language model is of a family that is here: their text is served. No
torch."""

from dataclasses import dataclass, replace
from typing import Any

from nanovllm.errors import shown
from nanovllm.models.names import CheckpointNames
from nanovllm.models.unserved import refuse_unserved, unserved_parts

_OF_TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
"""Beginnings of a language model's names, without what is stripped."""


@dataclass(frozen=True)
class Wrapper:
    text: str
    """model_type of the language model, where `text_config` names none."""
    stripped: str = "language_model."
    """Prefix that its tensors' names have beside those of its family."""

    def names(self, of_family: CheckpointNames) -> CheckpointNames:
        return replace(of_family, stripped=self.stripped, only=_OF_TEXT)


_INSIDE = "text_model."
WRAPPERS = {
    "AyaVisionForConditionalGeneration": Wrapper("cohere2"),
    "Cohere2VisionForConditionalGeneration": Wrapper("cohere2"),
    "Exaone4_5_ForConditionalGeneration": Wrapper("exaone4"),
    "Gemma3ForConditionalGeneration": Wrapper("gemma3_text"),
    "Glm46VForConditionalGeneration": Wrapper("glm4v_text"),
    "Glm4vForConditionalGeneration": Wrapper("glm4v_text"),
    "Glm4vMoeForConditionalGeneration": Wrapper("glm4v_moe_text"),
    "Idefics3ForConditionalGeneration": Wrapper("llama", _INSIDE),
    "InternVLForConditionalGeneration": Wrapper("qwen2"),
    "LightOnOcrForConditionalGeneration": Wrapper("qwen3"),
    "LlavaForConditionalGeneration": Wrapper("llama"),
    "LlavaNextForConditionalGeneration": Wrapper("llama"),
    "LlavaOnevisionForConditionalGeneration": Wrapper("qwen2"),
    "Mistral3ForConditionalGeneration": Wrapper("mistral"),
    "MuseGlimmerForConditionalGeneration": Wrapper("muse_glimmer_text"),
    "Qwen2VLForConditionalGeneration": Wrapper("qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": Wrapper("qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": Wrapper("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": Wrapper("qwen3_vl_moe_text"),
    "SmolVLMForConditionalGeneration": Wrapper("llama", _INSIDE),
    "VoxtralForConditionalGeneration": Wrapper("llama"),
}
"""Wrappers by the name in `architectures`."""
_QWEN_VL = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80, "num_key_value_heads": 8}
_QWEN3_VL = {"rope_theta": 5e5}
_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LLAMA = {**_7B, "intermediate_size": 11008, "max_position_embeddings": 2048}
_MISTRAL = {**_7B, "intermediate_size": 14336, "max_position_embeddings": 131072}
_GLM4V = {"head_dim": None, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}
_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "glm4v_moe_text": ("Glm4MoeForCausalLM", {"attention_bias": True}),
    "glm4v": ("Glm4ForCausalLM", _GLM4V),
    "glm4v_text": ("Glm4ForCausalLM", _GLM4V),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "llama": ("LlamaForCausalLM", _LLAMA),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", _MISTRAL),
    "muse_glimmer_text": ("MuseGlimmerTextModel", {}),
    "qwen2": ("Qwen2ForCausalLM", {"max_position_embeddings": 32768}),
    "qwen2_5_vl": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_vl": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN_VL),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_vl_moe_text": ("Qwen3VLMoeTextModel", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", _QWEN3_VL),
}
"""model_type of a language model -> its family, and entries that are filled in otherwise than there."""


def text_of(architecture: str, raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The family of a wrapper's language model, and what is filled in where config.json, `raw`, is silent. Raises
    ValueError for a family that is not here."""
    nested = raw.get("text_config")
    text = raw if nested is None else nested
    kind = text.get("model_type", WRAPPERS[architecture].text)
    if kind not in [*_TEXTS]:
        why = unserved_parts(text) or "is of no family that is here"
        refuse_unserved(f"{architecture}: its language model (model_type={shown(kind)})", why)
    return _TEXTS[kind]
