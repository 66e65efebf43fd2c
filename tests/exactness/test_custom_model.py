"""A model from outside the package (difference_model.py, examples/custom_model.py): tokens of its torch twin, whole,
in chunks, from the prefix cache, after a preemption, and on two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import Expected
from observing import StepWitness
from programs import ROOT, load
from twins import Twin, check, save_random

from nanovllm import LLM
from nanovllm.cli.main import main

FILE = ROOT / "tests" / "exactness" / "difference_model.py"
BLOCK = 16
SHARED = [(11 * i) % 140 for i in range(2 * BLOCK)]
PROMPTS = [[5], [*range(20, 45)], [*SHARED, 9, 8, 7], [*SHARED, 30], [(3 * i) % 140 for i in range(60)]]
OPTIONS: dict[str, Any] = {
    "plugins": (str(FILE),), "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 8, "max_model_len": 128,
    "num_kvcache_blocks": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Any:
    return load(FILE)


class CustomTwin(Twin):
    """The model in plain torch, over a whole text at once."""

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float64 [T, vocab]"""
        config, get = self.config, self.tensors.__getitem__
        x = get("model.embed_tokens.weight")[ids]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            y = self.norm(x, f"{at}.input_layernorm")
            first, second = (self.attention(y, f"{at}.mixer.{name}") for name in ("first", "second"))
            x = x + first - get(f"{at}.mixer.share") * second
            y = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = (y @ get(f"{at}.ffn.{name}_proj.weight").T for name in ("gate", "up"))
            x = x + (gate.sigmoid() ** config["gate_power"] * up) @ get(f"{at}.ffn.down_proj.weight").T
        return self.norm(x, "model.norm") @ get("lm_head.weight").T


@pytest.fixture(scope="module")
def model(example: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Expected]]:
    """The folder, and what the twin says."""
    folder = tmp_path_factory.mktemp("custom")
    twin = CustomTwin(example.TINY, save_random(folder, example.TINY, example.weight_shapes(example.TINY)))
    return str(folder), twin.expected(PROMPTS)


@pytest.mark.parametrize("disable", [(), ("fused_kernels",)])
def test_whole(model: tuple[str, list[Expected]], disable: tuple[str, ...]) -> None:
    with LLM(model[0], **OPTIONS, disable=disable, enable_prefix_caching=False) as llm:
        check(llm, PROMPTS, model[1])


def test_in_chunks_and_from_the_prefix_cache(model: tuple[str, list[Expected]]) -> None:
    with LLM(model[0], **OPTIONS, max_num_batched_tokens=24) as llm:
        witness = StepWitness().watch(llm)
        check(llm, PROMPTS, model[1])
        assert witness.num_partial_chunks > 0
        again = check(llm, PROMPTS, model[1])
        assert sum(output.num_cached_tokens for output in again) >= 4 * BLOCK


def test_after_a_preemption(model: tuple[str, list[Expected]]) -> None:
    with LLM(model[0], **{**OPTIONS, "num_kvcache_blocks": 9, "disable": ("lookahead",)}) as llm:
        witness = StepWitness().watch(llm)
        check(llm, PROMPTS, model[1])
        assert witness.num_rows_after_preemption > 0


def test_on_two_ranks(model: tuple[str, list[Expected]]) -> None:
    """The other rank's process loads the file by itself."""
    with LLM(model[0], **OPTIONS, tensor_parallel_size=2) as llm:
        check(llm, PROMPTS, model[1])


def test_the_plan_counts_both_attentions_of_a_layer(
    model: tuple[str, list[Expected]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model[0], "--plugins", str(FILE), "-tp", "1"]) == 0
    assert "KV cache: 6 layers that see all keys" in capsys.readouterr().out


def test_a_file_that_is_no_plugin_is_refused_by_name(model: tuple[str, list[Expected]], tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt.py"
    spoilt.write_text("1 / 0\n", encoding="utf-8")
    missing = tmp_path / "none.py"
    for file, why in ((missing, "must be a Python file that is there"), (spoilt, "raises ZeroDivisionError")):
        with pytest.raises(ValueError, match=rf"plugins='.*{file.name}': .*{why}"):
            LLM(model[0], **{**OPTIONS, "plugins": (str(file),)})
