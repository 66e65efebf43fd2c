"""Prefill attention over copies in float16 of keys and values in e4m3: the bits of attention over the cache itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cases import DEVICE, DTYPE, TOLERANCE, Case, make_case, nan_like, setup_of
from test_backends import make_backend, run

from nanovllm.attention.split import attention_halves
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels.attention import widened
from nanovllm.kernels.attention.prefill import prefill_config
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.attention.widened import MOST_BYTES, WidenedPages, copy_room, widened_config
from nanovllm.kernels.plan.config import SHARED_BYTES
from nanovllm.kernels.plan.device import Device

H200 = Device.named("H200")
# Decodes, whole prompts, chunks behind a prefix, and padding.
STEP: tuple[list[int], list[int], int] = ([1, 1, 40, 70, 3, 0], [50, 130, 40, 200, 65, 0], 2)
KINDS: list[dict[str, Any]] = [
    {}, {"window": 100}, {"softcap": 5.0, "has_sinks": True}, {"head_dim": 128, "block_size": 128, "num_q_heads": 3,
    "num_kv_heads": 1}, {"window": 7, "has_sinks": True, "block_size": 128}]


def fp8_case(step: tuple[list[int], list[int], int] = STEP, **options: Any) -> Case:
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 64, **options}
    return make_case(*step, padding_tokens=2, fp8=True, **shape)


def pages_of(case: Case) -> WidenedPages:
    setup = setup_of(case)
    rows, room = setup.max_num_seqs, copy_room(setup.specs, setup.block_size, 8, 1024, torch.bfloat16, H200)
    return WidenedPages(setup.specs, setup.block_size, rows, torch.device(DEVICE), *room)


def pay_always(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEAST_QUERIES", "LEAST_TOKENS"):
        monkeypatch.setattr(f"nanovllm.kernels.attention.widened.{name}", 1)


def with_copies(case: Case, monkeypatch: pytest.MonkeyPatch) -> TritonBackend:
    """A backend that makes them for any number of queries."""
    pay_always(monkeypatch)
    backend: Any = make_backend("triton", case)
    backend.widened = pages_of(case)
    return backend


def blocks_of(case: Case) -> int:
    m = case.metadata
    return int((-(-m.context_lens[m.num_decode_rows :] // case.k_cache.shape[2])).sum())


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("use_tma", [False, True])
def test_a_step_has_the_same_bits(options: dict[str, Any], use_tma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left behind a row's keys, and on a GPU whatever the tiles of queries: numpy's products of matrices
    take their sums in an order that depends on the number of rows."""
    case = fp8_case(**options)
    backend: Any = with_copies(case, monkeypatch)
    plain: Any = make_backend("triton", case)
    expected = run(case, plain)
    assert case.error_of(expected) < TOLERANCE
    if DEVICE == "cpu":
        plain.prefill[case.spec].config = backend.widened.attends[case.spec].config
        expected = run(case, plain)
    backend.widened.attends[case.spec].use_tma = use_tma  # the interpreter has tensor descriptors too
    backend.widened._memory.fill_(0xFF)  # NaN
    for more in (0, 3):
        copied = replace(case, metadata=replace(case.metadata, num_prefill_blocks=blocks_of(case) + more))
        found = run(copied, backend)
        assert copied.metadata.workspace.copied is not None
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_a_captured_step_chooses_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits whether its blocks fit or not, whether its keys have enough queries or not."""
    case = fp8_case()
    backend: Any = with_copies(case, monkeypatch)
    if DEVICE == "cpu":
        backend.prefill[case.spec].config = backend.widened.attends[case.spec].config
    expected = run(case, backend)
    room, needed, m = backend.widened.num_blocks, blocks_of(case), replace(case.metadata, is_captured=True)
    lens = m.context_lens[m.num_decode_rows :]
    for num_blocks, queries, is_copied in (
        (room, 1, True), (needed, 1, True), (needed - 1, 1, False), (room, 64, False),
    ):
        monkeypatch.setattr(widened, "LEAST_QUERIES", queries)
        backend.widened.num_blocks = num_blocks
        found = run(replace(case, metadata=replace(m)), backend)
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
        prepared = replace(m)
        backend.prepare(prepared)
        assert torch.equal(prepared.workspace.copied.uncopied, lens * (not is_copied))
        backend.widened._memory.fill_(0xFF)


@pytest.mark.parametrize("captured", [False, True])
def test_halves_of_a_step_read_copies(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut between two rows, and within rows."""
    case = fp8_case()
    backend: Any = with_copies(case, monkeypatch)
    if DEVICE == "cpu":
        backend.prefill[case.spec].config = backend.widened.attends[case.spec].config
    expected, m = run(case, backend), replace(case.metadata, is_captured=captured)
    if not captured:
        m = replace(m, num_prefill_blocks=blocks_of(case), token_ends=m.cu_seqlens_q[1:].cpu().long().numpy())
    for cut in (42, 80, 4):
        out = nan_like(case.q).to(DTYPE)
        for part, half in zip((slice(cut), slice(cut, None)), attention_halves(m, cut), strict=True):
            backend.prepare(half)
            assert not half.num_prefill_rows or half.workspace.copied is not None
            backend.forward(case.q[part], case.cache, half, out[part], case.spec, case.sinks)
        assert case.error_of(out) < TOLERANCE
        if DEVICE == "cuda":
            assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_other_steps_read_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few queries, few of each row, too few for the device to choose, and more blocks than there is room for."""
    case = fp8_case()
    backend: Any = with_copies(case, monkeypatch)
    room, needed = backend.widened.num_blocks, blocks_of(case)
    for num_blocks, tokens, queries, is_copied in (
        (needed, 64, 1, True), (None, 64, 1, False), (room + 1, 64, 1, False), (needed, 512, 1, False),
        (needed, 64, 128, False),
    ):
        monkeypatch.setattr(widened, "LEAST_TOKENS", tokens)
        monkeypatch.setattr(widened, "LEAST_QUERIES", queries)
        m = replace(case.metadata, num_prefill_blocks=num_blocks)
        backend.prepare(m)
        assert (m.workspace.copied is not None) == is_copied


def test_warmup_compiles_both(monkeypatch: pytest.MonkeyPatch) -> None:
    case = fp8_case()
    backend: Any = with_copies(case, monkeypatch)
    monkeypatch.setattr(widened, "LEAST_TOKENS", 4)
    launched: list[bool] = []
    monkeypatch.setattr(WidenedPages, "__call__", lambda *_: launched.append(True))
    before = case.k_cache.view(torch.uint8).clone()
    backend.warmup(case.cache, case.spec)
    assert launched == [True]
    assert torch.equal(case.k_cache.view(torch.uint8), before)


def test_room_is_bounded() -> None:
    spec, bf16 = AttentionSpec(32, 8, 128, 0.1), torch.bfloat16
    assert copy_room([spec], 128, 4, 1000, bf16, H200) == (32, 32 * 128 * 8 * (4 * 128 + 8))  # all blocks of all rows
    num_blocks, nbytes = copy_room([spec], 128, 256, 1 << 17, bf16, H200)
    assert num_blocks * 128 >= 32768 and nbytes <= MOST_BYTES
    for refused in (replace(spec, head_dim=96), replace(spec, value_dim=32)):
        assert copy_room([spec, refused], 128, 4, 1000, bf16, H200) == (0, 0)
    for block_size, dtype, name in ((48, bf16, "H200"), (64, torch.float32, "H200"), (64, bf16, "L40S")):
        assert copy_room([spec], block_size, 4, 1000, dtype, Device.named(name)) == (0, 0)
    for head_dim in (64, 128, 256):
        config = widened_config(head_dim, SHARED_BYTES)
        assert config.block_n == prefill_config(head_dim, torch.float16, True).block_n
