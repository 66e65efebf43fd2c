"""Spelling of our layers' tensors in each family's checkpoints, as data.

Layers name their tensors canonically ("model.layers.3.self_attn.q_proj.weight"). `CheckpointNames` says what the
checkpoint calls them, which of them it holds as one, and what else is in it that is not the language model's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
SANDWICH_NORMS = {**POST_NORMS, "mlp_norm": "pre_feedforward_layernorm"}

GATE_UP = {"gate_up_proj": ("gate_proj", "up_proj")}
QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


_IDLE = (".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale")
"""Ends of the names of what nothing is computed with: tables of old checkpoints, and scales of FP8 attention."""
_ENCODERS = "visual.", "vision_tower.", "multi_modal_projector."
_AROUND = (*_ENCODERS, *(f"model.{name}" for name in _ENCODERS))
"""Beginnings of the names of what some language models keep of the model around them."""
_SCALES = {"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"}
"""Last part of the names that transformers gives the scales of FP8 weights and their inputs -> all others' and ours."""

Tensor = TypeVar("Tensor")


@dataclass(frozen=True)
class CheckpointNames:
    """Parts of a name are what its dots separate."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Canonical part -> the checkpoint's, where it is none of Llama's."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The checkpoint's part -> the canonical ones that it holds as one tensor, one after the other by rows."""
    stripped: str = "language_model."
    """Text that is taken out of the checkpoint's names, wherever it occurs: a prefix of nested models, which some keep
    that were saved without what is around them."""
    skipped: tuple[str, ...] = ()
    """Beginnings of names that are not the language model's."""
    skips_next_layer: bool = False
    """The layer behind the model's last one, which drafts tokens (multi-token prediction), is none of its own."""
    unused: tuple[str, ...] = ()
    """Beginnings, without what is stripped, of the language model's names that nothing is computed with."""
    only: tuple[str, ...] = ("",)
    """Beginnings, without what is stripped, of those that are."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Canonical parts that follow each other -> the checkpoint's, before `parts`."""
    may_lack: str = ""
    """Beginning that the checkpoint's names have or lack, all of them."""
    read_as: Mapping[str, str] = field(default_factory=dict)
    """Part that some checkpoints have -> the one that others have in its place."""

    def of(self, name: str) -> str:
        """The checkpoint's name of the tensor that our layers call `name`, without what is stripped."""
        for ours, theirs in self.paths.items():
            name = f".{name}.".replace(f".{ours}.", f".{theirs}.")[1:-1]
        spelt = {**_PRE_NORMS, **self.parts}
        return ".".join(spelt.get(part, part) for part in name.split("."))

    def module(self, path: str) -> str:
        """The checkpoint's module, without what is stripped, that has the weight of the one that our layers call
        `path`."""
        name = self.of(f"{path}.weight")
        into = self.fused_into(name)
        return (name if into is None else into[0]).removesuffix(".weight")

    def fused_into(self, name: str) -> tuple[str, int] | None:
        """The checkpoint's tensor that holds `name` (one of its own names), and which part of it this is; None where
        it has a tensor of its own."""
        parts = name.split(".")
        for fused, members in self.fused.items():
            if len(parts) > 1 and parts[-2] in members:
                return ".".join([*parts[:-2], fused, parts[-1]]), members.index(parts[-2])
        return None

    def canonical(self, name: str) -> str | None:
        """A name in a checkpoint, without what is stripped; None where it is no weight of ours."""
        if name.startswith((*self.skipped, *_AROUND)) or name.endswith(_IDLE):
            return None
        name = name.replace(self.stripped, "")
        if name.startswith(self.unused):
            return None
        name = name if name.startswith(self.may_lack) else self.may_lack + name
        name = ".".join(self.read_as.get(part, part) for part in name.split("."))
        module, _, last = name.rpartition(".")
        name = f"{module}.{_SCALES[last]}" if last in _SCALES else name
        return name if name.startswith(self.only) else None

    def select(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Selects the (name, tensor) pairs of a checkpoint that are ours, and gives them their canonical names."""
        pairs = ((self.canonical(name), tensor) for name, tensor in tensors)
        return [(name, tensor) for name, tensor in pairs if name is not None]
