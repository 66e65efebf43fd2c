"""Layers with windows as groups of their own: the same bits as with all tokens kept, in far less memory."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import StepWitness
from programs import run_interpreted
from safetensors.torch import load_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.memory import Pages
from nanovllm.outputs import RequestMetrics
from nanovllm.runner.state_layout import StateLayout, layout_of
from nanovllm.transfer.receiver import WeightReceiver
from nanovllm.transfer.shared import SharedBucket
from nanovllm.wire.state import StateSize
from nanovllm.wire.step import SlotConstants

SHARED = [(29 * i + 3) % 211 for i in range(41)]
PROMPTS = [
    [5], SHARED[:16], SHARED, [*SHARED, 9, 8], [*SHARED[:32], *range(60, 90)], [*SHARED[:37], *range(7)],
    [(37 * i + 11) % 211 for i in range(70)],
]  # fmt: skip
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=18, ignore_eos=True, logprobs=2)
          for i in range(len(PROMPTS))]  # fmt: skip
"""Texts that fill one block at least."""
ENGINE: dict[str, Any] = {
    "device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 200, "max_num_batched_tokens": 24,
    "max_num_seqs": 8, "max_model_len": 160,
}  # fmt: skip


@cache
def answers(folder: str, *disable: str, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Tokens and log-probabilities of three calls: alone and whole, together, and again from the cache. And what was
    seen: groups, tokens found in the cache, rows that began again."""
    with LLM(folder, **{**ENGINE, **options, "disable": ("lookahead", *disable)}) as llm:
        witness = StepWitness().watch(llm)
        calls = [[llm.generate([PROMPTS[3]], PARAMS[3], use_tqdm=False)[0]]]
        for params in (PARAMS, [replace(each, max_tokens=6) for each in PARAMS]):
            calls.append(llm.generate(PROMPTS, params, use_tqdm=False))
        llm.engine.scheduler.check_integrity()
        seen = {
            "groups": [(one["window"], one["tables"]) for one in llm.engine_info()["kv_cache_groups"]],
            "cached": sum(output.num_cached_tokens for output in calls[2]),
            "preempted": witness.num_rows_after_preemption,
        }
    found = [
        (output.token_ids, [{token: one.logprob for token, one in each.items()} for each in output.outputs[0].logprobs])
        for outputs in calls for output in outputs
    ]  # fmt: skip
    return found, seen


def checkpoint(family: str, folder: Path, **entries: Any) -> str:
    """A random checkpoint of the family; windows of 7 tokens, blocks of 16."""
    from family_cases import CASES, make_model, save  # here: the script needs no transformers, which is slow to import

    case = replace(CASES[family], entries={**CASES[family].entries, **entries})
    return str(save(make_model(case), case, folder))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoint(request.param, tmp_path_factory.mktemp(request.param))


WAYS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "chunks": ({}, ("gemma3", "gemma4", "gpt_oss", "mistral")),
    "two ranks": ({"tensor_parallel_size": 2}, ("gpt_oss",)),
    "fp8": ({"kv_cache_dtype": "fp8"}, ("gemma4",)),
    "exact bits": ({"exact_bits": "batch"}, ("gemma3",)),
    "whole prompts": ({"kvcache_block_size": 32, "max_num_batched_tokens": 160}, ("gemma3", "mistral")),
    "flex": ({"attention_backend": "flex"}, ()),
}
"""Options, and the families that are served so by day: all, or one whose tables are alike (gemma3), or all of a window
(mistral), or differ in size (gemma4), or whose attention has sinks by head (gpt_oss)."""
PAIRS = [
    pytest.param(family, options, id=f"{family}-{way}", marks=[pytest.mark.slow] * (family not in by_day))
    for family in WAYS["chunks"][1] for way, (options, by_day) in WAYS.items() if (family, way) != ("gpt_oss", "flex")
]  # fmt: skip


@pytest.mark.parametrize(("folder", "options"), PAIRS, indirect=["folder"])
def test_bits_are_those_of_layers_that_keep_everything(options: dict[str, Any], folder: str) -> None:
    found, seen = answers(folder, **options)
    whole, of_whole = answers(folder, "window_groups", **options)
    assert found == whole
    assert of_whole["groups"] == [(None, 1)] and (7 in dict(seen["groups"])) and seen["cached"] > 100


@pytest.mark.parametrize(
    "folder", ["gemma3", "gemma4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "mistral"))],
    indirect=True,
)
def test_rows_that_begin_again_gain_the_same_tokens(folder: str) -> None:
    """Where memory is so tight that rows lose it, and what windows left serves others at once."""
    found, seen = answers(folder, exact_bits="batch")
    tables = sum(count for _, count in seen["groups"])
    num_blocks = 8 * tables + 1 if "gemma4" in folder or "mistral" in folder else 7 * tables
    tight, of_tight = answers(folder, exact_bits="batch", num_kvcache_blocks=num_blocks)
    assert tight == found
    assert of_tight["preempted"] > 0 or "mistral" in folder


def test_sleep_and_a_transfer_let_rows_begin_again(tmp_path: Path) -> None:
    """Rows of all groups, some of which begin with a copied block. The weights that come are those that were there."""
    folder = checkpoint("gemma3", tmp_path)
    with LLM(folder, **{**ENGINE, "exact_bits": "batch", "enable_sleep": True}) as llm:
        alone = [llm.generate([PROMPTS[i]], PARAMS[i], use_tqdm=False)[0].token_ids for i in range(len(PROMPTS))]
        llm.reset_prefix_cache()
        witness, scheduler = StepWitness().watch(llm), llm.engine.scheduler
        numbers = [llm.add_request(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        gained: dict[int, list[int]] = {number: [] for number in numbers}
        copies = 0

        def steps(count: int) -> None:
            nonlocal copies
            for _ in range(count):
                for output in llm.step():
                    gained[output.request_id] += output.new_token_ids
                copies += len(scheduler._last_schedule.block_copies) if scheduler._last_schedule else 0

        steps(14)
        llm.pause("keep")
        llm.sleep()
        scheduler.check_integrity()
        llm.wake_up()
        llm.resume()
        steps(4)
        receiver, weights = WeightReceiver(llm, "cpu"), load_file(f"{folder}/model.safetensors")
        bucket = SharedBucket(sum(tensor.nbytes for tensor in weights.values()), "cpu")
        receiver.start()
        for message in bucket.messages(weights.items()):
            receiver.update(message)
        receiver.finish()
        bucket.close()
        while llm.has_unfinished_requests():
            steps(1)
        scheduler.check_integrity()
        assert witness.num_rows_after_preemption > 0 and copies > 0
        assert [gained[number] for number in numbers] == alone


def test_a_window_alone_bounds_a_row(tmp_path: Path) -> None:
    """A text of 150 tokens in four blocks of 16."""
    folder = checkpoint("mistral", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    texts = []
    for options in ({"num_kvcache_blocks": 4}, {"disable": ("window_groups",)}):
        with LLM(folder, **{**ENGINE, **options}) as llm:
            texts.append(llm.generate([PROMPTS[6]], params, use_tqdm=False)[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_triton_kernels_read_each_table(tmp_path: Path) -> None:
    """By Triton's interpreter, which has to be chosen before triton is imported: this file is the engine then."""
    pytest.importorskip("triton")
    folder = checkpoint("gemma3", tmp_path, num_hidden_layers=4)
    found = json.loads(run_interpreted(__file__, (folder,)).splitlines()[-1])
    with LLM(folder, **ENGINE) as llm:
        assert found == greedy_tokens(llm)


def greedy_tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    calls = [llm.generate(prompts, params, use_tqdm=False) for prompts in ([SHARED], [SHARED[:35], PROMPTS[6][:40]])]
    assert calls[1][0].num_cached_tokens >= 32
    return [output.token_ids for outputs in calls for output in outputs]


# -- memory, by the published shapes -------------------------------------------------------------------------------

BFLOAT16 = torch.bfloat16


def kv(heads: int, head_dim: int, window: int | None = None) -> Pages:
    return Pages(heads, (head_dim, head_dim), window)


def alternating(layers: int, every: int, heads: int, head_dim: int, window: int) -> list[Pages]:
    """Each `every`-th layer without a window."""
    return [kv(heads, head_dim, window if (number + 1) % every else None) for number in range(layers)]


GEMMA3 = {
    "1b": alternating(26, 6, 1, 256, 512), "4b": alternating(34, 6, 4, 256, 1024),
    "12b": alternating(48, 6, 8, 256, 1024), "27b": alternating(62, 6, 16, 128, 1024),
}  # fmt: skip
GEMMA4 = {
    "31b": [kv(4, 512) if number % 6 == 5 else kv(16, 256, 1024) for number in range(60)],
    "26b": [kv(2, 512) if number % 6 == 5 else kv(8, 256, 1024) for number in range(30)],
    "12b, four ranks": [kv(1, 512) if number % 6 == 5 else kv(2, 256, 1024) for number in range(48)],
}
GPT_OSS = {"20b": alternating(24, 2, 8, 64, 128), "120b": alternating(36, 2, 8, 64, 128)}


def config_of(length: int, *disable: str) -> EngineConfig:
    return EngineConfig("model", max_model_len=length, kvcache_block_size=128, disable=disable, max_num_seqs=512,
                        enable_prefix_caching=False)  # fmt: skip


MORE = 1500  # tokens that a request gains at most: more than the steps until memory is full


def serve(layout: StateLayout, num_bytes: int, length: int) -> tuple[int, int]:
    """Requests of so many tokens until memory is full: how many decode at once, and most bytes that one of them
    holds."""
    per_block = 128 * layout.token_bytes(BFLOAT16)
    config = config_of(length + MORE, "lookahead")
    scheduler = Scheduler(config, StateSize(num_bytes // per_block, 128, layout.groups))
    for number in range(80):
        seq = Sequence(
            number, Prompt([number % 7] * length), SamplingParams(max_tokens=MORE - 1),
            constants=SlotConstants(0, 0), stop_token_ids=frozenset(), max_total_tokens=length + MORE - 1,
            metrics=RequestMetrics(0.0),
        )  # fmt: skip
        scheduler.add(seq)
    most_rows = most_held = 0
    while (schedule := scheduler.schedule()) is not None and not scheduler.num_preemptions:
        decoding = schedule.seqs[: schedule.num_decode_rows]
        most_rows = max(most_rows, len(decoding))
        most_held = max([most_held, *(seq.memory.num_held_blocks for seq in decoding)])
        scheduler.apply(schedule, [1] * schedule.num_sample_rows)
    return most_rows, most_held * per_block


@pytest.mark.parametrize("size", [*GEMMA3, *GEMMA4])
def test_gemma_at_32k_tokens_holds_what_its_layers_need(size: str) -> None:
    """Five of six layers see 1,024 tokens. Blocks of 128, padding of groups included, which is more where their layers
    differ in size."""
    layers, length = {**GEMMA3, **GEMMA4}[size], 32768
    layout = layout_of(layers, config_of(length + MORE), BFLOAT16)
    needed = sum(pages.token_bytes(BFLOAT16) * min(length, pages.window or length) for pages in layers)
    _, held = serve(layout, 4 * needed, length)
    assert 0 < held <= (1.2 if size in GEMMA3 else 1.3) * needed
    everything = layout_of(layers, config_of(length + MORE, "window_groups"), BFLOAT16)
    assert everything.row_bytes(length, 128, BFLOAT16) > 4.5 * held


@pytest.mark.parametrize("size", GPT_OSS)
def test_gpt_oss_holds_twice_the_requests(size: str) -> None:
    """Half of its layers see 128 tokens. Requests of 16k tokens in 20 GB."""
    layouts = [layout_of(GPT_OSS[size], config_of(131072, *disable), BFLOAT16) for disable in ((), ("window_groups",))]
    grouped, whole = (serve(layout, 20 << 30, 16384)[0] for layout in layouts)
    assert grouped >= 1.9 * whole > 20


def mixes() -> Iterator[list[Pages]]:
    for full in (1, 3, 5, 10):
        for windows in (1, 3, 17, 40):
            yield [kv(2, 64)] * full + [kv(2, 64, 512)] * windows
            yield [kv(2, 128)] * full + [kv(4, 64, 512)] * windows
            if windows > 3:
                yield [kv(4, 128)] * full + [kv(2, 64, 512)] * windows
    yield [kv(2, 64, 512)] * 9
    yield [kv(2, 64)] * 4 + [kv(2, 64, 512)] * 9 + [kv(2, 64, 128)] * 5


@pytest.mark.parametrize("layers", [*mixes()], ids=lambda layers: str(len(layers)))
def test_each_layer_has_a_lane_of_a_table_of_its_window(layers: list[Pages]) -> None:
    layout = layout_of(layers, config_of(16384), BFLOAT16)
    windows = [group.window for group in layout.groups for _ in range(group.num_tables)]
    assert len(set(layout.by_layer)) == len(layers) and sum(layout.group_layers) == len(layers)
    if len(layout.groups) > 1 or layout.groups[0].window:
        assert [windows[lane.table] for lane in layout.by_layer] == [pages.window for pages in layers]
        sizes = [pages.token_bytes(BFLOAT16) for pages in layers]
        most = 1.1 if len(set(sizes)) == 1 else 1.2
        assert sum(sizes) <= layout.num_tables * layout.token_bytes(BFLOAT16) <= most * sum(sizes)


def test_groups_are_made_where_they_save_memory() -> None:
    """Not for contexts that a window holds, layers of one window of several sizes, or models without windows: one
    table, one block of all layers."""
    for layers, length in (
        (GEMMA3["4b"], 1024), (alternating(32, 4, 8, 128, 4096), 4400), ([kv(8, 128)] * 32, 32768),
        ([kv(8, 128), kv(4, 128, 512), kv(8, 128, 512)], 32768),
    ):  # fmt: skip
        layout = layout_of(layers, config_of(length), BFLOAT16)
        assert [tuple(group) for group in layout.groups] == [(None, 1)] and layout.lanes == (tuple(layers),)


if __name__ == "__main__":
    with LLM(sys.argv[1], **ENGINE, attention_backend="triton") as engine:
        assert engine.engine_info()["attention_backend"] == "triton"
        print(json.dumps(greedy_tokens(engine)))
