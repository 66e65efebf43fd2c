"""A head drafts what its published definition drafts, however steps are cut; what is none is refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import block_head
import eagle_head
import pytest
import torch
from exactness.family_cases import CASES, make_model, save
from safetensors.torch import load_file
from test_speculation import LONG, PROMPTS, draft_always, outputs, params

from nanovllm import LLM
from nanovllm.config import DEMO_MODEL, EngineConfig
from nanovllm.engine.drafting import Drafting, PlaceCost
from nanovllm.engine.sequence import RowPrefix
from nanovllm.kernels.step.state import DeviceState
from nanovllm.models.drafters import with_drafter
from nanovllm.models.registry import read_model_config
from nanovllm.runner.footprint import weight_bytes

EAGLE_TAPS = eagle_head.SIZES["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
K = 3
Seen = tuple[int, int, int, list[int], torch.Tensor]
"""Seed of a row, number of its tokens with keys, its last token, drafts, and what the head took for the first."""


@contextmanager
def engine(
    folder: Path, method: str = "eagle3", quantization: str | None = None, **options: Any
) -> Iterator[LLM]:  # fmt: skip
    speculative = {
        "method": method, "model": str(folder), "num_speculative_tokens": K, "quantization": quantization
    }  # fmt: skip
    with LLM("demo", device="cpu", seed=5, max_num_seqs=8, speculative_config=speculative, **options) as llm:
        yield llm


def watch(llm: LLM) -> list[Seen]:
    """Everything that the head drafts from here on."""
    seen: list[Seen] = []
    drafter: Any = llm.engine.executor.runner.work.drafter  # type: ignore[attr-defined]
    draft: Callable[..., None] = drafter.draft

    def note(state: DeviceState, num_rows: int) -> None:
        taken = drafter.rows.hidden[0].clone()
        draft(state, num_rows)
        assert state.drafts is not None
        for row, slot in enumerate(drafter.rows.slot[:num_rows].tolist()):
            if slot >= 0:
                seed, length, last = (int(each[slot]) for each in (state.seed, state.num_computed, state.last_token))
                seen.append((seed, length, last, state.drafts[slot].tolist(), taken[row]))

    drafter.draft = note
    return seen


@cache
def target() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(EngineConfig(DEMO_MODEL).model, dtype=torch.float32)


@torch.inference_mode()
def check(seen: list[Seen], texts: dict[int, list[int]], folder: Path, method: str, **changed: Any) -> None:
    """Compares drafts with those of the definition. texts: whole ones, by seed."""
    tensors = {name: tensor.float() if tensor.is_floating_point() else tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}  # fmt: skip
    is_eagle, layers = method == "eagle3", EAGLE_TAPS
    if is_eagle:
        eagle = eagle_head.Twin(target().get_input_embeddings().weight, tensors, **changed)
    else:
        layers = [layer + 1 for layer in changed.get("target_layer_ids", block_head.TAPS)]
        block = block_head.Twin(target(), tensors, method, **changed)
    num_full, streams = 0, {}
    for seed, text in texts.items():
        found = target()(torch.tensor([text]), output_hidden_states=True).hidden_states
        streams[seed] = torch.cat([found[layer][0] for layer in layers], -1)
    for seed, length, last, drafts, taken in seen:
        text, taps = texts[seed][: length + 1], streams[seed][:length]
        assert text[length:] == [last]
        # Where the next block begins there is no place yet for entries, or for tokens of a pass.
        left = -length % 16 + (1 if is_eagle else -block_head.SKIPPED[method])
        count = K - drafts.count(-1)
        assert count >= min(K, left) and drafts[count:] == [-1] * (K - count), (seed, length)
        if is_eagle:
            expected, row = eagle.drafts(text[1:], taps, K)
            torch.testing.assert_close(taken, row, rtol=0, atol=2e-4)
        else:
            expected = block.drafts(text, taps, count)
        assert drafts[:count] == expected[:count], (seed, length)
        num_full += count == K
    assert num_full > len(seen) // 2


OTHER = {"attention_bias": True, "num_key_value_heads": 4, "num_hidden_layers": 3, "layer_types": None}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "3.1": {"fc_norm": True, "norm_output": True},
    "norm before fc": {"norm_before_fc": True, "num_key_value_heads": 4},
    "all ids": {"draft_vocab_size": 1030},
    "other width": {"hidden_size": 128},
    "DFlash": {"method": "dflash"},
    "DSpark": {"method": "dspark"},
    "DFlash of other sizes": {"method": "dflash", **OTHER},
    "DSpark without tables": {"method": "dspark", "markov_rank": 0, "target_layer_ids": [-1, 2], **OTHER},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    **{head: {"tensor_parallel_size": 2} for head in ("3.1", "other width", "DSpark", "DFlash of other sizes")},
    **{head: {"exact_bits": "tp"} for head in ("plain", "DFlash")},
}
"""Options of those that are not served in chunks by day."""


def saved(folder: Path, changed: dict[str, Any]) -> Path:
    if "method" in changed:
        return block_head.save(folder, **changed)
    tensors = eagle_head.weights({**eagle_head.SIZES, **changed})
    if "hidden_size" in changed:
        tensors["embed_tokens.weight"] = torch.randn(1030, changed["hidden_size"])
    return eagle_head.save(folder, tensors, **changed)


@pytest.mark.parametrize(
    ("head", "options"),
    [
        *(pytest.param(head, {"max_num_batched_tokens": 48}, marks=[pytest.mark.slow] * (head in OTHERWISE))
          for head in HEADS),
        *OTHERWISE.items(),
    ],
)  # fmt: skip
def test_drafts_are_those_of_the_definition(
    head: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks, of rows that decode one ahead, and of hits."""
    draft_always(monkeypatch)
    folder, texts = saved(tmp_path / "head", HEADS[head]), {}
    changed = {"method": "eagle3", **HEADS[head]}
    with engine(folder, changed["method"], **options) as llm:
        long, other = (llm.tokenizer(text)["input_ids"][:100] for text in (LONG, PROMPTS[2]))
        # Hits that end within a block, and with one, where the text goes on otherwise.
        prompts = [long, PROMPTS[1], long[:28] + other, long[:32] + other]
        seen = watch(llm)
        for first in (0, 2):  # the second two begin with what the first have left
            seeds = [first, first + 1]
            given = [params(temperature=0.0, seed=seed, max_tokens=14) for seed in seeds]
            for seed, result in zip(seeds, llm.generate(prompts[first:][:2], given, use_tqdm=False), strict=True):
                texts[seed] = [*result.prompt_token_ids, *result.outputs[0].token_ids]
        assert llm.stats().prefix_cache_hits > 50
    assert {one[0] for one in seen} == {0, 1, 2, 3}
    check([one for one in seen if len(texts[one[0]]) > one[1]], texts, folder, **changed)


def test_streams_are_read_before_a_last_layer_that_is_an_mlp_alone(tmp_path: Path) -> None:
    case = CASES["nemotron_h"]
    model, prompt = make_model(case), [5, 9, 200, 7]
    save(model, case, tmp_path / "model")
    sizes = {"hidden_size": 48, "head_dim": 16, "vocab_size": 211}
    tensors = eagle_head.weights({**eagle_head.SIZES, **sizes}, target_width=48)
    head = eagle_head.save(tmp_path / "head", tensors, **sizes)
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": K}
    given = {"skip_tokenizer_init": True, "device": "cpu", "max_model_len": 64, "speculative_config": speculative}
    with LLM(str(tmp_path / "model"), **given) as llm:
        llm.generate([prompt], params(temperature=0.0, max_tokens=1), use_tqdm=False)
        taps = llm.engine.executor.runner.work.drafter.taps[: len(prompt)]  # type: ignore[attr-defined]
    streams = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps, torch.cat([streams[layer][0] for layer in EAGLE_TAPS], -1), rtol=1e-4, atol=2e-4)


def test_speculators_spelling_of_a_checkpoint_is_the_same_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    folder = saved(tmp_path / "a", {"fc_norm": True})
    tensors = {"model." + name.replace("midlayer", "layers.0"): tensor
               for name, tensor in load_file(folder / "model.safetensors").items()}  # fmt: skip
    other = eagle_head.save(tmp_path / "b", tensors)
    layer = {**eagle_head.SIZES}
    whole = {"fc_norm": True, "draft_vocab_size": layer.pop("draft_vocab_size"), **layer.pop("eagle_config")}
    (other / "config.json").write_text(json.dumps({**whole, "transformer_layer_config": layer}))
    found = []
    for each in (folder, other):
        with engine(each) as llm:
            seen = watch(llm)
            llm.generate(PROMPTS[:1], params(temperature=0.0, max_tokens=8), use_tqdm=False)
            found.append([one[1:4] for one in seen])
    assert found[0] == found[1] and found[0]


@pytest.mark.parametrize("head", ["plain", "DSpark", pytest.param("DFlash", marks=pytest.mark.slow)])
def test_a_head_in_fp8_drafts_mostly_what_the_wide_one_does(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    folder, found, sizes = saved(tmp_path, HEADS[head]), list[dict[tuple[int, int], int]](), list[int]()
    for quantization in (None, "fp8"):
        with engine(folder, HEADS[head].get("method", "eagle3"), quantization) as llm:
            seen = watch(llm)
            given = [params(temperature=0.0, seed=seed, max_tokens=16) for seed in range(len(PROMPTS))]
            llm.generate(PROMPTS, given, use_tqdm=False)
            found.append({(seed, length): drafts[0] for seed, length, _, drafts, _ in seen})
            sizes.append(weight_bytes(llm.engine.executor.runner.drafter.checkpoint_weights()))  # type: ignore[attr-defined]
    wide, rounded = found
    alike = [rounded[at] == draft for at, draft in wide.items() if at in rounded]
    assert len(alike) > 100 and sum(alike) > 0.8 * len(alike), "drafts, of which a few turn on the rounding"
    assert sizes[1] < 0.7 * sizes[0], "an embedding, the projection of hidden states and narrow tables stay wide"


def test_ranks_that_would_cut_a_head_within_its_blocks_are_refused(tmp_path: Path) -> None:
    message = "tensor_parallel_size=2: o: 64 of 128 inputs for each rank: must be a multiple of 128 in fp8"
    with (
        pytest.raises(ValueError, match=f"^speculative_config: model=.*{message}"),
        engine(eagle_head.save(tmp_path), quantization="fp8", tensor_parallel_size=2),
    ):
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_hidden_size": 64}, "target_hidden_size=64: must be 192"),
        ({"draft_vocab_size": 2000}, "draft_vocab_size=2000: must be at most 1030"),
        ({"hidden_size": 128}, "hidden_size=128: must be 192"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2: must be 1"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}, r"layer_ids=\[1, 4\]: must be ascending .* 3"),
        ({"eagle_config": {}}, r"layer_ids=\[2, 2, 1\]: must be ascending"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"sliding_window": 8}, "sliding_window=8"),
    ],
)
def test_a_head_of_another_model_is_refused_by_the_entry(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = EngineConfig(
        "demo", speculative_config={"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    )
    eagle_head.save(tmp_path, {"fc.weight": torch.zeros(1)}, **changed)
    with pytest.raises(ValueError, match=f"^speculative_config: model=.*{message}"):
        with_drafter(config, read_model_config(config))


@pytest.mark.parametrize(
    ("method", "changed", "message"),
    [
        ("dspark", {"hidden_size": 128}, "hidden_size=128: must be 192, the target's"),
        ("dspark", {"vocab_size": 1000}, "vocab_size=1000: must be 1030, the target's"),
        ("dspark", {"num_target_layers": 36}, "num_target_layers=36: must be 4"),
        ("dspark", {"target_layer_ids": [1, 3]}, r"target_layer_ids=\[1, 3\]: must be ascending numbers from -1 to 2"),
        ("dspark", {"mask_token_id": 1030}, "mask_token_id=1030: must be below 1030"),
        ("dspark", {"block_size": 2}, "block_size=2: must be at least 3"),
        ("dflash", {"block_size": 3}, "block_size=3: must be at least 4"),
        ("dflash", {"architectures": ["DFlash2DraftModel"]}, r"architectures=\['DFlash2DraftModel'\]: must be"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type='gated': must be 'vanilla'"),
        ("dspark", {"is_causal": True}, "is_causal=True: must be False"),
        ("dflash", {"output_multiplier": 0.5}, "output_multiplier=0.5: must be 1.0"),
        ("dspark", {**WINDOWS, "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window=8: must be of"),
        ("dflash", {**WINDOWS, "layer_types": None, "max_window_layers": 1}, "sliding_window=8: must be of no layer"),
        ("dspark", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ],
)
def test_a_block_head_of_another_model_is_refused_by_the_entry(
    method: str, changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = EngineConfig(
        "demo", speculative_config={"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}
    )
    block_head.save(tmp_path, method, {"fc.weight": torch.zeros(1)}, **changed)
    with pytest.raises(ValueError, match=f"^speculative_config: model=.*{message}"):
        with_drafter(config, read_model_config(config))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", torch.zeros(192, 192), r"'fc.weight' has shape \(192, 192\), the configuration needs \(192, 576"),
        ("midlayer.self_attn.q_proj.weight", torch.zeros(128, 192), r"q_proj.weight' has shape \(128, 192\)"),
        ("norm.weight", None, "missing weight: norm.weight"),
        ("midlayer.self_attn.q_norm.weight", torch.zeros(32), "surplus weight: midlayer.self_attn.q_norm.weight"),
        ("d2t", torch.full((200,), 1000), "'d2t' leads to id 1030: must be 0..1029"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_head_are_refused_by_name(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    tensors = eagle_head.weights(eagle_head.SIZES)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    folder = eagle_head.save(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"^speculative_config: model=.*{message}"), engine(folder):
        pass


def test_a_head_that_is_not_there_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"^speculative_config: model='no/such/head': no such folder"):
        LLM("demo", speculative_config={"method": "eagle3", "model": "no/such/head", "num_speculative_tokens": 3})


@pytest.mark.parametrize("head", ["plain", pytest.param("DSpark", marks=pytest.mark.slow)])
def test_new_weights_leave_texts_right_and_the_head_in_place(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    folder, given = saved(tmp_path, HEADS[head]), params(temperature=0.7, seed=3, max_tokens=24)
    old = load_file(Path(EngineConfig(DEMO_MODEL).model) / "model.safetensors")
    new = {name: tensor.flip(0) if "down_proj" in name else tensor for name, tensor in old.items()}
    with LLM("demo", device="cpu", seed=5, max_num_seqs=8) as llm:
        llm.load_weights(new.items())
        expected = outputs(llm, PROMPTS[:3], [given] * 3, False)
    with engine(folder, HEADS[head].get("method", "eagle3")) as llm:
        before = outputs(llm, PROMPTS[:3], [given] * 3, False)
        llm.load_weights(new.items())
        assert outputs(llm, PROMPTS[:3], [given] * 3, False) == expected != before


def test_a_head_drafts_where_its_drafts_are_likely_to_pay() -> None:
    def rows(count: int, has_entries: bool = True) -> list[Any]:
        return [SimpleNamespace(num_tokens=100, prefix=RowPrefix(has_entries=has_entries))] * count

    def wants(given: list[Any], right: float) -> bool:
        one = Drafting(4, 256, PlaceCost(drafting=0.15))
        for _ in range(50):
            one.note_verified([3] * 10, [1 + round(3 * right)] * 10)
        return one.wants_drafts(given)

    assert wants(rows(1), 0.7) and not wants(rows(1), 0.0) and not wants(rows(65), 0.7)
    assert wants(rows(3) + rows(1, False), 0.7) and not wants(rows(3, False), 0.7)
    assert not wants(rows(1) + rows(9, False), 0.7), "rows without entries cost places too"
    assert not Drafting(4, 256, PlaceCost()).wants_drafts(rows(1)), "looking up is no model's"


def test_a_head_rests_while_many_run_and_as_many_wait_for_them_to_end() -> None:
    for cost, most in ((PlaceCost(drafting=0.15), 64), (PlaceCost(10.0, drafting=0.15), 32)):
        drafting = Drafting(4, 256, cost)
        assert [rows for rows in range(1, 257) if drafting.wants_entries(rows, rows)] == [*range(1, most + 1)]
        assert all(drafting.wants_entries(rows, rows - 1) for rows in range(1, 257))


@pytest.mark.parametrize("head", ["plain", pytest.param("DFlash", marks=pytest.mark.slow)])
def test_a_head_rests_at_high_load_and_drafts_for_rows_of_which_it_has_all(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin while few run have drafts, and those are of the definition; others have none, nor have rows that
    begin with blocks of such. Texts are the same."""
    draft_always(monkeypatch)
    monkeypatch.setattr(Drafting, "wants_entries", lambda self, num_rows, num_later: num_rows <= 2)
    folder, changed = saved(tmp_path, HEADS[head]), {"method": "eagle3", **HEADS[head]}
    texts: dict[int, list[int]] = {}

    def run(llm: LLM, prompts: list[list[int]], seeds: list[int]) -> int:
        """Runs requests, more steps of which end earlier; returns the hits."""
        before = llm.stats().prefix_cache_hits
        given = [params(temperature=0.0, seed=seed, max_tokens=24 - 4 * at) for at, seed in enumerate(seeds)]
        for seed, result in zip(seeds, llm.generate(prompts, given, use_tqdm=False), strict=True):
            texts[seed] = [*result.prompt_token_ids, *result.outputs[0].token_ids]
        return llm.stats().prefix_cache_hits - before

    with engine(folder, changed["method"]) as llm:
        long = llm.tokenizer(LONG)["input_ids"][:100]
        prompts = [[7 + seed, *long] for seed in range(4)]
        drafter: Any = llm.engine.executor.runner.work.drafter  # type: ignore[attr-defined]
        taken_in, take_in, seen = [], drafter.see, watch(llm)
        monkeypatch.setattr(drafter, "see", lambda *args: (taken_in.append(args), take_in(*args)))
        run(llm, prompts, [0, 1, 2, 3])
        assert 0 < len(taken_in) < 12, "steps in which two are left"
        assert seen and all(each[3] == [-1] * K for each in seen)
        assert run(llm, [texts[0] + long[:20], [99, *long]], [8, 9]) > 100  # the first goes on from no entries
        assert all((each[3] == [-1] * K) == (each[0] != 9) for each in seen)
        assert run(llm, [texts[9] + long[:9]], [10]) > 90  # and one from a text that has them
        own = [each for each in seen if each[0] in (9, 10)]
        assert {each[0] for each in own} == {9, 10}
        check([each for each in own if len(texts[each[0]]) > each[1]], texts, folder, **changed)
    expected = dict(texts)
    with LLM("demo", device="cpu", seed=5, max_num_seqs=8) as llm:
        run(llm, prompts, [0, 1, 2, 3])
    assert texts == expected
