"""One family of each kind, and odd shapes, in bfloat16 on a GPU against transformers: windows that prompts cross,
soft-caps, sinks, experts; widths, groups and vocabularies that no tile and no number of ranks divides; eager and in
graphs, alone, in crowds and on two ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
from packed_formats import FORMATS, save_as
from small_models import (
    GREEDY,
    KINDS,
    OPTIONS,
    PROMPTS,
    assert_no_farther,
    assert_parts_only_at_ties,
    eager_scores,
    make_checkpoint,
    references,
)

from nanovllm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "plain kernels": {"disable": ("fused_kernels",)},
    "two ranks": {"tensor_parallel_size": 2, "max_num_batched_tokens": 256},  # graphs have room for more tokens
}


def shape(
    config: str, head_dim: int, group: int, kv_heads: int, hidden: int, intermediate: int, vocab: int
) -> tuple[str, dict[str, Any]]:
    """The family and its configuration, of two layers; `group` query heads read each key/value head."""
    return config, {
        "head_dim": head_dim, "num_attention_heads": group * kv_heads, "num_key_value_heads": kv_heads,
        "hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab, "num_hidden_layers": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip


def random_shape(seed: int) -> tuple[str, dict[str, Any]]:
    rng = random.Random(seed)
    group, kv_heads = rng.randint(1, 16), rng.choice((2, 4))
    heads = group * kv_heads
    return shape(
        rng.choice(("Qwen3", "Llama")), head_dim=8 * rng.randint(2, 32), group=group, kv_heads=kv_heads,
        hidden=8 * heads * rng.randint(1, 1 + 80 // heads),  # transformers' Llama takes only multiples of its heads
        intermediate=rng.randint(150, 1500), vocab=rng.randint(1021, 3000),
    )  # fmt: skip


SHAPES = {
    "72, three a group": shape("Qwen3", 72, 3, 2, 328, 1100, 1021),
    "80, seven a group": shape("Llama", 80, 7, 2, 560, 334, 1537),
    "96, one a group": shape("Qwen3", 96, 1, 6, 576, 333, 2003),
    "160, sixteen a group": shape("Llama", 160, 16, 2, 224, 701, 1033),
    "256, five a group": shape("Qwen3", 256, 5, 2, 640, 1102, 1531),
    **{f"seed {seed}": random_shape(seed) for seed in (2, 3, 7)},
}


@pytest.mark.parametrize("name", [*KINDS, *SHAPES])
def test_a_model_in_bfloat16(name: str, tmp_path: Path) -> None:
    kind, entries = SHAPES.get(name, (name, {}))
    folder = make_checkpoint(kind, tmp_path, **entries)
    check(folder, folder, [setting for setting in SETTINGS if setting != "plain kernels" or name not in SHAPES])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_packed_weights_in_bfloat16(kind: str, name: str, tmp_path: Path) -> None:
    """In 4 and 8 bits as tools write them: no farther from what they stand for than a wide model is."""
    folder = make_checkpoint(kind, tmp_path / "made", intermediate_size=512, moe_intermediate_size=256)
    packed, wide = save_as(name, Path(folder), tmp_path)
    check(str(packed), str(wide), [*SETTINGS])


def check(folder: str, wide: str, settings: list[str]) -> None:
    """wide: a checkpoint of the same weights in 32 or 16 bits."""
    texts, ours = eager_scores(folder)
    exact, theirs = references(wide, texts)
    largest = assert_no_farther(ours, theirs, exact)
    for setting in settings:
        with LLM(folder, **{**OPTIONS, **SETTINGS[setting]}) as llm:
            has_graphs = setting != "plain kernels" and not llm.config.enforce_eager  # see executor/resolve.py
            assert (llm.engine_info()["cuda_graphs"] > 0) == has_graphs
            chunked = llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)  # in two steps, of which one ends no prompt
            rounds = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]
            alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
        assert rounds[1][-2].num_cached_tokens > 0
        for outputs in (*rounds, alone, alone[:-1] + chunked):
            assert_parts_only_at_ties([output.token_ids for output in outputs], texts, ours, 2 * largest)


@pytest.mark.parametrize(("kind", "quantization"), [("llama", "fp8"), ("llama", "int4"), ("qwen3_moe", "fp8")])
def test_steps_that_end_no_prompt(kind: str, quantization: str, tmp_path: Path) -> None:
    """In the last layer they compute keys alone; graphs have rows of padding there."""
    options = {**OPTIONS, "quantization": quantization, "max_num_batched_tokens": 64, "enforce_eager": True}
    with LLM(make_checkpoint(kind, tmp_path), **options) as llm:
        outputs = [llm.generate(PROMPTS[-1], GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert outputs[1].num_cached_tokens > 0
    assert len(outputs[0].token_ids) == len(outputs[1].token_ids) == GREEDY.max_tokens
