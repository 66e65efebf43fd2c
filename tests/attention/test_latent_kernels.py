"""Kernels over latents, whose first dimensions are a key's value, against float64."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from cases import DEVICE, DTYPE, TOLERANCE, Case, make_case, make_places_case, setup_of
from interpreting import nightly

from nanovllm.attention import KVCache
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention.decode_work_list import DecodeConfig
from nanovllm.kernels.attention.reference import attention_reference
from nanovllm.kernels.latent.decode import LatentWorkList, head_blocks

# Whole prompts, chunks behind a prefix, padding, and before them rows that decode: short, longer than a chunk.
QUERIES = [1, 1, 1, 1, 5, 32, 40, 0, 2]
CONTEXTS = [1, 63, 700, 0, 5, 40, 100, 0, 0]
DECODED = 4


def latent(case: Case, value_dim: int) -> Case:
    """The case with values that are the first dimensions of its keys."""
    spec = replace(case.spec, value_dim=value_dim)
    m = case.metadata
    keys = case.k_cache.nan_to_num()  # of blocks that no row has
    found = attention_reference(case.q.double(), keys, keys, m.row_slot, m.cu_seqlens_q,
                                m.context_lens, m.block_tables[0], spec)  # fmt: skip
    expected = found.masked_fill(case.expected.isnan().all(-1, keepdim=True), float("nan"))
    return replace(case, v_cache=case.k_cache, spec=spec, expected=expected)


def run(backend: TritonBackend | TorchBackend, case: Case) -> torch.Tensor:
    out = torch.full(case.expected.shape, float("nan"), dtype=DTYPE, device=DEVICE)
    backend.prepare(case.metadata)
    result = backend.forward(case.q, KVCache(case.k_cache, case.v_cache), case.metadata, out, case.spec)
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.parametrize(("heads", "latents", "rope", "block_size", "tma"), [
    (4, 32, 16, 16, False), (5, 64, 16, 64, True), (3, 40, 8, 16, False),
    nightly(20, 512, 64, 64, True), nightly(66, 48, 32, 48, False),
    nightly(3, 256, 64, 128, False)])  # fmt: skip
def test_matches_float64(heads: int, latents: int, rope: int, block_size: int, tma: bool) -> None:
    made = make_case(QUERIES, CONTEXTS, DECODED, num_q_heads=heads, num_kv_heads=1, head_dim=latents + rope,
                     block_size=block_size, padding_tokens=2)  # fmt: skip
    case = latent(made, latents)
    backend = TritonBackend(setup_of(case))
    if DEVICE == "cpu":  # the interpreter has descriptors too
        backend.decode[case.spec].has_tma = backend.prefill[case.spec].use_tma = tma
    assert case.error_of(run(backend, case)) < TOLERANCE
    assert case.error_of(run(TorchBackend(setup_of(case)), case)) < TOLERANCE


@pytest.mark.parametrize(("heads", "places"), [(5, 4), nightly(8, 3), nightly(66, 2)])
def test_rows_that_share_keys_match_float64(heads: int, places: int) -> None:
    shape = {"num_q_heads": heads, "num_kv_heads": 1, "head_dim": 48}
    made = make_places_case([places, 1, 0, 2], [places, 40, 0, 300], places, **shape)
    case = latent(made, 32)
    setup = replace(setup_of(case), places=places)
    assert case.error_of(run(TritonBackend(setup), case)) < TOLERANCE


def test_chunking_does_not_change_a_bit() -> None:
    whole = latent(make_case([90], [90], 0, num_q_heads=3, num_kv_heads=1, head_dim=48), 32)
    backend = TritonBackend(setup_of(whole))
    expected = run(backend, whole)
    # The interpreter's products depend on where in a tile a query is.
    for first, last in ((0, 48), (48, 64), (64, 90)) if DEVICE == "cpu" else ((0, 37), (37, 38), (38, 90)):
        m = whole.metadata
        part = replace(
            m, cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor([last], dtype=torch.int32, device=DEVICE), num_tokens=last - first,
            max_seqlen_q=last - first,
        )  # fmt: skip
        case = replace(whole, q=whole.q[first:last], expected=whole.expected[first:last], metadata=part)
        assert torch.equal(run(backend, case), expected[first:last])


def test_scratch_has_room_for_the_largest_step_of_each_class() -> None:
    config = DecodeConfig(min_chunk=64, max_splits=128)
    work_list = LatentWorkList(1, 576, None, 256, 1 << 17, torch.device("cpu"))
    most = max(rows * work_list.room(rows) for rows in range(1, 257))
    assert work_list.most_partials == most < 256 * config.max_splits


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (20, 1), (64, 1), (66, 2), (128, 2), (67, 67), (96, 2)])
def test_blocks_of_heads_are_equal(heads: int, blocks: int) -> None:
    assert head_blocks(heads) == blocks


def test_what_kernels_cannot_do_is_refused() -> None:
    case = latent(make_case([1], [1], 1, num_q_heads=3, num_kv_heads=1, head_dim=40), 28)
    with pytest.raises(ValueError, match=r"kv_lora_rank=28, qk_rope_head_dim=12: .* multiples of 8"):
        TritonBackend(setup_of(case))
