"""A layer for multi-token prediction drafts what its published definition drafts, and texts stay the same."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exactness.family_cases import CASES, FULL, SHAPE, Case, randomised, save
from safetensors.torch import load_file, save_file
from test_eagle3 import K, Seen, watch
from test_speculation import draft_always, outputs, params

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.models.drafters import with_drafter
from nanovllm.models.registry import read_model_config

PROMPTS: list[list[int]] = [[(37 * i + 11) % 211 for i in range(50)], [5], [7, 3, 200, 9, 31, 77]]
PREFIXES = {"Glm4Moe": "model.layers.4."}
"""Beginning of the names of such a layer's tensors, by family; of others it is "mtp."."""
NAMES = {"Glm4Moe": ("enorm", "hnorm", "eh_proj", "", "shared_head.norm")}
OTHER_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0.", "norm")


class Layer:
    """The definition, with a model of one layer in place of that layer and the norm behind it."""

    def __init__(self, case: Case, target: Any) -> None:
        torch.manual_seed(3)
        config = getattr(transformers, f"{case.config}Config")
        entries = {**SHAPE, **case.entries, "num_hidden_layers": 1, "first_k_dense_replace": 0}
        entries |= {"layer_types": [FULL]} if "layer_types" in entries else {}
        self.inner = randomised(transformers.AutoModelForCausalLM, config(**entries))
        self.target, self.is_glm, self.kind, hidden = target, case.config == "Glm4Moe", case.config, 48
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


@contextmanager
def engine(folder: Path, method: str | None, **options: Any) -> Iterator[LLM]:
    speculative = None if method is None else {"method": method, "num_speculative_tokens": K}
    sizes: dict[str, Any] = {"max_num_seqs": 8, "kvcache_block_size": 16, "max_model_len": 128}
    given = {"skip_tokenizer_init": True, "device": "cpu", "speculative_config": speculative, **sizes, **options}
    with LLM(str(folder), **given) as llm:
        yield llm


@torch.inference_mode()
def check(seen: list[Seen], texts: dict[int, list[int]], layer: Layer) -> None:
    num_full = 0
    for seed, length, last, drafts, taken in seen:
        text = texts[seed][: length + 1]
        assert text[length:] == [last]
        hidden = layer.target.model(torch.tensor([text[:length]])).last_hidden_state[0]
        count = K - drafts.count(-1)
        assert count >= min(K, -length % 16 + 1) and drafts[count:] == [-1] * (K - count), (seed, length)
        expected, row = layer.drafts(text[1:], hidden, K)
        torch.testing.assert_close(taken, row, rtol=1e-3, atol=1e-3)
        assert drafts[:count] == expected[:count], (seed, length)
        num_full += count == K
    assert num_full > len(seen) // 2


def saved(name: str, folder: Path) -> Layer:
    case = CASES[name]
    target = randomised(
        transformers.AutoModelForCausalLM, getattr(transformers, f"{case.config}Config")(**{**SHAPE, **case.entries})
    )
    save(target, case, folder)
    layer = Layer(case, target)
    layer.save(folder)
    return layer


@pytest.mark.parametrize(
    ("family", "method", "options"),
    [
        ("glm4_moe", "glm4_moe_mtp", {"max_num_batched_tokens": 24}),
        ("glm4_moe", "mtp", {"tensor_parallel_size": 2}),
        ("qwen3_5", "mtp", {"max_num_batched_tokens": 24}),
        ("qwen3_next", "qwen3_next_mtp", {"tensor_parallel_size": 2}),
        ("qwen3_5_moe", "qwen3_5_mtp", {}),
    ],
)  # fmt: skip
def test_drafts_are_those_of_the_definition_and_texts_those_without(
    family: str, method: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, of rows that decode one ahead, and of hits."""
    draft_always(monkeypatch)
    layer, texts = saved(family, tmp_path), {}
    given = [params(temperature=0.0, seed=seed, max_tokens=12) for seed in range(3)]
    sampled = [params(temperature=0.8, seed=seed, max_tokens=20) for seed in range(3, 6)]
    with engine(tmp_path, None) as llm:
        expected = outputs(llm, PROMPTS * 2, [*given, *sampled], False)
    with engine(tmp_path, method, **options) as llm:
        seen = watch(llm)
        assert outputs(llm, PROMPTS, given, False) + outputs(llm, PROMPTS, sampled, False) == expected
        assert llm.stats().prefix_cache_hits > 30
    texts = {seed: PROMPTS[seed] + expected[seed][0] for seed in range(3)}
    check([one for one in seen if one[0] in texts and len(texts[one[0]]) > one[1]], texts, layer)


def test_a_model_without_such_a_layer_is_refused_by_name(tmp_path: Path) -> None:
    def read(folder: str) -> None:
        config = EngineConfig(folder, speculative_config={"method": "mtp", "num_speculative_tokens": 1})
        with_drafter(config, read_model_config(config))

    with pytest.raises(ValueError, match="method='mtp': must be another for Qwen3ForCausalLM"):
        read("demo")
    saved("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "layers.4" not in name},
              tmp_path / "model.safetensors")  # fmt: skip
    with pytest.raises(ValueError, match="no tensor in the checkpoint is one of a layer that drafts"):
        read(str(tmp_path))
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 4
