"""Reasons why an architecture is not served, as far as its config.json says. No torch."""

from typing import Any, NoReturn

_KINDS = {
    "recurrent layers": {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"},
    "sparse attention": {
        "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", "minimax_m3_sparse",
        "compressed_sparse_attention", "heavily_compressed_attention",
    },
    "attention in chunks": {"chunked_attention"},
}  # fmt: skip
"""Feature -> names that stand for it in a model's lists of layer kinds."""
_LISTS = ("layer_types", "layers_block_type", "block_types")
_ENTRIES = {
    "recurrent layers": (
        "mamba_d_state", "ssm_state_size", "linear_num_value_heads", "conv_L_cache", "state_size", "lru_width",
        "attn_type_list", "hybrid_override_pattern", "linear_attn_config",
    ),
    "latent attention": ("kv_lora_rank",),
    "sparse attention": ("index_topk", "index_topk_blocks", "sparse_attention_config", "sparse_config"),
    "attention in chunks": ("attention_chunk_size",),
}  # fmt: skip
"""Feature -> entries of config.json that have a value in a model with that feature."""
_RECURRENT = ("rwkv", "xlstm")
"""Beginnings of the `model_type` of models that no entry of theirs gives away."""
_BESIDE_TEXT = (
    "vision_config", "audio_config", "vision_tower", "mm_vision_tower", "thinker_config", "img_processor",
    "audio_processor",
)  # fmt: skip


def unserved_parts(raw: dict[str, Any]) -> str:
    """Describes in words what a model of an unknown architecture has and the engine lacks; "" where nothing is seen.
    raw: config.json, with the entries of its language model in place of the outer ones."""
    lists = [raw[name] for name in _LISTS if isinstance(raw.get(name), list)]
    kinds = {kind for each in lists for kind in each if isinstance(kind, str)}
    found = {what for what, known in _KINDS.items() if kinds & known}
    for what, entries in _ENTRIES.items():
        if not (kinds and what in _KINDS) and any(raw.get(entry) for entry in entries):
            found.add(what)
    if str(raw.get("model_type")).startswith(_RECURRENT):
        found.add("recurrent layers")
    if not found and raw.get("v_head_dim") not in (None, raw.get("head_dim")):
        found.add("values of another size than keys")
    parts = [f"has {' and '.join(sorted(found))}"] if found else []
    if raw.get("is_encoder_decoder"):
        parts.append("has an encoder")
    return ", ".join(parts)


def refuse_unserved(model: str, parts: str) -> NoReturn:
    """Raises ValueError for a model that has `parts`, as unserved_parts describes them."""
    raise ValueError(f"{model} {parts}: not served. docs/models.md lists the models that are")


def takes_more_than_text(raw: dict[str, Any]) -> bool:
    """Whether a model has parts that read images or sound."""
    return any(raw.get(entry) for entry in _BESIDE_TEXT)
