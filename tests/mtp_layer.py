"""A random layer for multi-token prediction: its published definition, and its tensors beside a model's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from exactness.family_cases import CASES, FULL, SHAPE, Case, randomised, save
from safetensors.torch import load_file, save_file

AS_GLM = ("Glm4Moe", "Glm4MoeLite", "DeepseekV3")
PREFIXES = dict.fromkeys(AS_GLM, "model.layers.4.")
"""Beginning of the names of such a layer's tensors, by family; of others it is "mtp."."""
NAMES = dict.fromkeys(AS_GLM, ("enorm", "hnorm", "eh_proj", "", "shared_head.norm"))
OTHER_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm")


class Layer:
    """The definition, with a model of one layer in place of that layer and the norm behind it."""

    def __init__(self, case: Case, target: Any) -> None:
        """case: as of `target`."""
        torch.manual_seed(3)
        config = getattr(transformers, f"{case.config}Config")
        entries = {**SHAPE, **case.entries, "num_hidden_layers": 1, "first_k_dense_replace": 0}
        entries["mlp_layer_types"] = ["sparse"]
        entries |= {"layer_types": [FULL]} if "layer_types" in entries else {}
        self.inner = randomised(transformers.AutoModelForCausalLM, config(**entries))
        self.target, self.is_glm, self.kind = target, case.config in AS_GLM, case.config
        hidden = target.config.hidden_size
        self.adds_one = not self.is_glm
        self.enorm, self.hnorm = ((0.0 if self.adds_one else 1.0) + 0.3 * torch.randn(hidden) for _ in range(2))
        self.fc = torch.randn(hidden, 2 * hidden) * 0.2

    def save(self, folder: Path) -> None:
        """Adds its tensors to the target's checkpoint."""
        prefix, (enorm, hnorm, fc, layer, norm) = PREFIXES.get(self.kind, "mtp."), NAMES.get(self.kind, OTHER_NAMES)
        self.inner.save_pretrained(folder / "inner")
        own = {f"{enorm}.weight": self.enorm, f"{hnorm}.weight": self.hnorm, f"{fc}.weight": self.fc}
        for name, tensor in load_file(folder / "inner" / "model.safetensors").items():
            if name.startswith("model.layers.0."):
                own[layer + name.removeprefix("model.layers.0.")] = tensor
            elif name == "model.norm.weight":
                own[f"{norm}.weight"] = tensor
        found = load_file(folder / "model.safetensors")
        if self.is_glm:  # as published, beside the model's own
            own |= {"embed_tokens.weight": found["model.embed_tokens.weight"].clone(),
                    "shared_head.head.weight": found["lm_head.weight"].clone()}  # fmt: skip
        save_file({**found, **{prefix + name: tensor for name, tensor in own.items()}}, folder / "model.safetensors")

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.target.config.rms_norm_eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + self.adds_one, eps)

    def drafts(self, ids: list[int], hidden: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
        """See eagle_head.Twin."""
        found, text, rows, seen = [], torch.tensor(ids), [], []
        handle = self.inner.model.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0][0, -1:]))
        for _ in range(count):
            embedded = self.target.get_input_embeddings()(text)
            if self.is_glm:
                embedded[0] = 0.0
            x = torch.cat([self._norm(embedded, self.enorm), self._norm(hidden, self.hnorm)], -1) @ self.fc.T
            normed = self.inner.model(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            rows.append(normed[0])
            found.append(int(self.target.lm_head(normed).argmax()))
            text = torch.cat([text, torch.tensor(found[-1:])])
            hidden = torch.cat([hidden, seen[-1] if self.is_glm else normed])
        handle.remove()
        return found, rows[0]


def saved(name: str, folder: Path, **entries: Any) -> Layer:
    """entries: of the configuration, beside those of the case of this name."""
    case = replace(CASES[name], entries={**CASES[name].entries, **entries})
    target = randomised(
        transformers.AutoModelForCausalLM, getattr(transformers, f"{case.config}Config")(**{**SHAPE, **case.entries})
    )
    save(target, case, folder)
    layer = Layer(case, target)
    layer.save(folder)
    return layer
