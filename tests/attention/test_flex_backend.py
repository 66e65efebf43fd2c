"""attention_backend="flex": functions of the user's on scores and masks, in positions of the request, over pages."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import TOLERANCE, make_case, setup_of
from test_backends import CONTEXTS, QUERIES, run

from nanovllm import LLM, SamplingParams
from nanovllm.attention.flex_backend import FlexBackend
from nanovllm.attention.torch_backend import TorchBackend

DEMO = str(Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3")
SHAPE: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 128}


def backend(case: Any, **functions: Any) -> FlexBackend:
    return FlexBackend(setup_of(case), **functions)


@pytest.mark.usefixtures("untraced")
def test_a_window_and_a_softcap_given_as_functions_equal_the_models_own() -> None:
    plain, native = (make_case(QUERIES, CONTEXTS, 3, **SHAPE, **more) for more in ({}, {"window": 33, "softcap": 20.0}))
    scale = native.spec.scale / plain.spec.scale  # cases with a cap have larger scores
    functions = {
        "score_mod": lambda score, slot, head, query, key: 20.0 * torch.tanh(score * scale / 20.0),
        "mask_mod": lambda slot, head, query, key: query - key < 33,
    }
    out = run(plain, backend(plain, **functions))
    assert native.error_of(out) < TOLERANCE * 2
    native.v_cache.nan_to_num_()  # what others left in a block, which our own kernels mask
    torch.testing.assert_close(out, run(native, backend(native)), equal_nan=True)


def test_functions_know_slot_and_head() -> None:
    """One slot's second head sees its own key alone: attention is then that key's value."""
    case = make_case([1, 20], [50, 20], 1, **SHAPE)
    slot = int(case.metadata.row_slot[0])
    out = run(case, backend(case, mask_mod=lambda s, head, query, key: (s != slot) | (head != 1) | (query == key)))
    block = case.metadata.block_tables[0][slot, 49 // 128]
    torch.testing.assert_close(out[0, 1], case.v_cache[block, 0, 49 % 128])
    case.expected[0, 1] = out[0, 1].double()
    assert case.error_of(out) < TOLERANCE


def test_pages_that_rows_share_and_that_are_elsewhere_in_the_cache() -> None:
    """Two rows with the same first pages; the cache's tokens lie side by side, as the engine binds it."""
    case = make_case([1, 1, 7], [300, 300, 300], 2, **SHAPE)
    table, slots = case.metadata.block_tables[0], case.metadata.row_slot.long()
    table[slots[1:], :2] = table[slots[0], :2]
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        setattr(case, name, cache.transpose(1, 2).contiguous().transpose(1, 2))
    found, expected = (run(case, each).double() for each in (backend(case), TorchBackend(setup_of(case))))
    assert (found - expected).norm() / expected.norm() < TOLERANCE


GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(20, 59)), list(range(20, 61))]
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 12, "max_num_batched_tokens": 24}


def tokens(**options: Any) -> list[list[int]]:
    with LLM(DEMO, **{**OPTIONS, **options}) as llm:
        found = [llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2)]  # again, from the prefix cache
        assert found[1][2].num_cached_tokens >= 32
    assert [o.token_ids for o in found[0]] == [o.token_ids for o in found[1]]
    return [output.token_ids for output in found[0]]


@pytest.mark.usefixtures("untraced")
def test_the_engine_serves_a_users_function() -> None:
    """In chunks and from the cache; a function that changes nothing, and one that blinds."""
    plain = tokens()
    assert tokens(attention_backend="flex", score_mod=lambda score, slot, head, query, key: score + 0 * key) == plain
    assert tokens(attention_backend="flex", mask_mod=lambda slot, head, query, key: query - key < 3) != plain


def test_functions_without_the_backend_are_refused() -> None:
    for options in ({"attention_backend": "torch"}, {"attention_backend": "flex", "tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match=r"mask_mod=.*attention_backend='flex' and tensor_parallel_size=1"):
            LLM(DEMO, mask_mod=lambda slot, head, query, key: True, **options)
    with pytest.raises(ValueError, match="score_mod='tanh': must be a function"):
        LLM(DEMO, attention_backend="flex", score_mod="tanh")
