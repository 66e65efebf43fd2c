"""Twins of models from outside the package, in plain torch over a whole text at once, and the comparison with them."""

import json
from pathlib import Path
from typing import Any

import torch
from comparing import Expected, assert_mostly_sure, assert_same
from safetensors.torch import save_file

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

COUNT = 20
"""Output tokens of each request."""


class Twin:
    """A model over `tensors` by their checkpoint's names, in float64."""

    mixer_name, mlp_name = "self_attn", "mlp"
    """Names of a layer's parts in the checkpoint."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.config, self.tensors = config, {name: tensor.double() for name, tensor in tensors.items()}

    @classmethod
    def mixer_shapes(cls, config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a mixer's tensors by their names in the mixer."""
        raise NotImplementedError

    def mix(self, y: torch.Tensor, layer: int, at: str) -> torch.Tensor:
        """A layer's mixer, whose tensors' names begin with `at`: [T, hidden] -> [T, hidden]."""
        raise NotImplementedError

    def activation(self, gate: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate)

    @classmethod
    def random(cls, folder: Path, config: dict[str, Any]) -> "Twin":
        """The twin of random weights, which are written to `folder` as a checkpoint."""
        hidden, width, make = config["hidden_size"], config["intermediate_size"], torch.Generator().manual_seed(3)
        shapes = {f"{name}.weight": (config["vocab_size"], hidden) for name in ("model.embed_tokens", "lm_head")}
        shapes["model.norm.weight"] = (hidden,)
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
            shapes |= {f"{at}.{cls.mixer_name}.{name}": s for name, s in cls.mixer_shapes(config, layer).items()}
            shapes |= {f"{at}.{cls.mlp_name}.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
            shapes[f"{at}.{cls.mlp_name}.down_proj.weight"] = (hidden, width)
        tensors = {name: torch.randn(shape, generator=make) * 0.5 ** len(shape) * 2 for name, shape in shapes.items()}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / "model.safetensors")
        return cls(config, tensors)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float64 [T, vocab]"""
        get = self.tensors.__getitem__
        x = get("model.embed_tokens.weight")[ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self.mix(self.norm(x, f"{at}.input_layernorm"), layer, f"{at}.{self.mixer_name}")
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = (y @ get(f"{at}.{self.mlp_name}.{name}_proj.weight").T for name in ("gate", "up"))
            x = x + (self.activation(gate) * up) @ get(f"{at}.{self.mlp_name}.down_proj.weight").T
        return self.norm(x, "model.norm") @ get("lm_head.weight").T

    def attention(self, y: torch.Tensor, at: str) -> torch.Tensor:
        dim = self.config["head_dim"]
        q, k, v = ((y @ self.tensors[f"{at}.{name}_proj.weight"].T).view(len(y), -1, dim) for name in "qkv")
        each = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        k, v = (kept.repeat_interleave(each, 1) for kept in (self.rotated(k), v))
        scores = torch.einsum("qhd,khd->hqk", self.rotated(q), k) * dim**-0.5
        scores.masked_fill_(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(y), -1)
        return found @ self.tensors[f"{at}.o_proj.weight"].T

    @staticmethod
    def attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        hidden, dim = config["hidden_size"], config["head_dim"]
        heads, kv_heads = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
        rows = {"q": heads, "k": kv_heads, "v": kv_heads}
        shapes = {f"{name}_proj.weight": (count, hidden) for name, count in rows.items()}
        return {**shapes, "o_proj.weight": (hidden, heads)}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return unit * self.tensors[f"{name}.weight"]

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, dim], halves paired."""
        half = x.shape[-1] // 2
        angle = torch.arange(len(x)).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
        cos, sin, (a, b) = angle.cos()[:, None], angle.sin()[:, None], x.split(half, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def greedy(self, prompt: list[int]) -> Expected:
        ids, margins = list(prompt), []
        for _ in range(COUNT):
            best = self.logits(ids)[-1].topk(2)
            ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
        return Expected(ids[len(prompt) :], margins)

    def expected(self, prompts: list[list[int]]) -> list[Expected]:
        """Greedy tokens of each prompt, nearly all of them sure."""
        expected = [self.greedy(prompt) for prompt in prompts]
        assert_mostly_sure(expected)
        return expected


def check(llm: LLM, prompts: list[list[int]], expected: list[Expected], count: int = COUNT) -> list[RequestOutput]:
    """Asserts that an engine's first `count` greedy tokens are the twin's; returns its outputs."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for output, one in zip(outputs, expected, strict=True):
        assert_same(output.token_ids, Expected(one.token_ids[:count], one.margins[:count]))
    return outputs

