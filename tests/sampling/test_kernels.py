"""The option sampler's Triton kernels against their plain twins."""

from typing import Any

import pytest
import torch
from interpreting import nightly
from option_rows import Rows, make_rows, record

from nanovllm.kernels.sampling import filters, kept, logprobs, penalties
from nanovllm.wire.sampling import MASK_WORD, PENALTIES, PLACE_SHIFT

pytest.importorskip("triton")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def drawn(
    draw: Any, case: Rows, start: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens by row and by slot that a draw leaves behind."""
    rows = case.option_rows()
    if start is not None:
        rows.tokens[case.rows.long()] = rows.last_token[case.slots.long()] = start
    draw(rows, **options)
    return rows.tokens, rows.last_token


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "kind"),
    [
        *((1000, kind) for kind in ("normal", "tied", "peaked", "masked")),
        (37, "tied"),
        *(nightly(37, kind) for kind in ("normal", "peaked", "masked")),
    ],
)
@pytest.mark.parametrize("has_winner", [False, True])
def test_filtered_draws(vocab: int, kind: str, has_winner: bool, dtype: torch.dtype, device: torch.device) -> None:
    """The token that the plain twin draws, with and without a token from the whole distribution to begin with."""
    num_different = 0
    for seed in range(1 if device.type == "cpu" else 2):
        case = make_rows(vocab + seed, 4, vocab, device, dtype, kind, stride=vocab + 3)
        whole = drawn(kept.sample_kept_reference, case)[0]
        start = whole[case.rows.long()] if has_winner else None
        found, wanted = (
            drawn(draw, case, start=start, has_winner=has_winner)
            for draw in (filters.sample_filtered, filters.sample_filtered_reference)
        )
        assert torch.equal(found[0][case.rows.long()], found[1][case.slots.long()])
        num_different += int((found[0] != wanted[0]).sum())
    assert num_different <= (1 if device.type == "cpu" else 2), "a tie within rounding may be decided otherwise"


@pytest.mark.parametrize("options", [{"top_k": 700}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.9}, {"min_p": 0.02},
                                     {"top_k": 800, "top_p": 0.5, "min_p": 0.01}, {"min_p": 1e-9}])  # fmt: skip
def test_every_way_to_filter(options: dict[str, float], device: torch.device) -> None:
    """Searches over the whole row, and tokens that stand, give the twin's token."""
    vocab = 1500
    case = make_rows(11, 2, vocab, device)
    case.records = torch.stack([record(flags, **options) for flags in (0, PENALTIES)]).to(device)
    case.temperature.fill_(1.0)
    whole = drawn(kept.sample_kept_reference, case)[0]
    wanted = drawn(filters.sample_filtered_reference, case, has_winner=False)[0]
    for start in (None, whole[case.rows.long()]):
        found = drawn(filters.sample_filtered, case, start, has_winner=start is not None)[0]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edits", [False, True])
def test_draws(edits: bool, dtype: torch.dtype, device: torch.device) -> None:
    vocab, results = 1100, []
    case = make_rows(5, 12, vocab, device, dtype)
    thresholds = filters.find_thresholds_reference(*case.filter_args, vocab)
    flags = torch.arange(12, dtype=torch.int32, device=device) % 4
    case.records = torch.stack([record(int(f), presence=0.3, frequency=-0.2, repetition=1.4) for f in flags]).to(device)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 6, (17, vocab), generator=generator, dtype=torch.int32).to(device)
    masks = torch.randint(-(2**31), 2**31 - 1, (2 * 17, 35), generator=generator, dtype=torch.int32).to(device)
    case.records[::5, MASK_WORD] = 17  # as of the second place of a decode
    case.records[:, 0] |= case.rows.clamp(max=3) << PLACE_SHIFT
    editing = {"counts": counts, "masks": masks} if edits else {}
    for draw in (kept.sample_kept, kept.sample_kept_reference):
        for limits in (None,) if edits else (None, thresholds):
            results.append(torch.cat(drawn(draw, case, thresholds=limits, **editing)))
    half = len(results) // 2
    assert all(torch.equal(one, two) for one, two in zip(results[:half], results[half:], strict=True))
    assert edits or not torch.equal(results[0], results[1])


def test_greedy_ties_go_to_the_lowest_id(device: torch.device) -> None:
    case = make_rows(8, 3, 1100, device)
    case.temperature.zero_()
    case.logits.fill_(-1.0)
    case.logits[:, [1099, 40, 700]] = 2.0
    for draw in (kept.sample_kept, kept.sample_kept_reference):
        tokens, _ = drawn(draw, case)
        assert tokens[case.rows.long()].tolist() == [40, 40, 40]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_edits(counted: bool, masked: bool, dtype: torch.dtype, device: torch.device) -> None:
    vocab, slots = 100, 9
    case = make_rows(3, 4, vocab, device, dtype)
    case.records = torch.stack(
        [record(flags, presence=0.3 * flags, frequency=-0.2, repetition=1.0 + 0.4 * flags) for flags in range(4)]
    ).to(device)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 6, (slots, vocab), generator=generator, dtype=torch.int32).to(device)
    masks = torch.randint(-(2**31), 2**31 - 1, (2 * slots, 4), generator=generator, dtype=torch.int32).to(device)
    case.records[::3, MASK_WORD] = slots
    case.records[:, 0] |= case.rows.clamp(max=3) << PLACE_SHIFT
    entries = [(g, i, b) for g in range(4) for i, b in ((g, 1.5), (50 + g, -torch.inf), (99, -2.0))]
    here = case.positions.cpu()[case.rows.cpu().long()].tolist()
    where = {0: 0, 1: 1, 2: 0, 3: -1}
    entries += [(g, 70, b) for g in range(4) for b in (1.0, -9.0)]  # before a position of the row's, or from it on
    ends = [0] * (len(entries) - 8) + [sign * (here[g] + where[g]) for g in range(4) for sign in (1, -1)]
    edits = torch.tensor([[g, i, 0, end] for (g, i, _), end in zip(entries, ends, strict=True)], dtype=torch.int32)
    edits[:, 2] = torch.tensor([b for _, _, b in entries]).view(torch.int32)
    args = (case.option_rows(), counts if counted else None, masks if masked else None)
    for given in (edits.to(device), edits[:0].to(device)):
        found = penalties.edit_logits(*args, given)
        torch.testing.assert_close(found, penalties.edit_logits_reference(*args, given), rtol=1e-6, atol=1e-6)


def test_tokens_that_hold_are_counted(device: torch.device) -> None:
    """Of several places of a slot, too, which may have the same token."""
    case = make_rows(3, 40, 100, device)
    case.records = torch.stack([record(flags % 4) for flags in range(40)]).to(device)
    case.slots = case.slots // 8
    rows, found = case.option_rows(), torch.zeros(2, 9, 100, dtype=torch.int32, device=device)
    rows.tokens.copy_(case.input_ids % 5 - 2)
    penalties.count_tokens(rows, found[0])
    penalties.count_tokens_reference(rows, found[1])
    assert torch.equal(*found) and found[0].max() > 2 and found[0].sum() == 2 * (
        (rows.tokens[case.rows.long()] >= 0) & (case.records[:, 0] & PENALTIES > 0)
    ).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("kind", ["normal", "tied", "masked"])
def test_logprobs(kind: str, k: int, dtype: torch.dtype, device: torch.device) -> None:
    vocab = 5000
    case = make_rows(2, 3, vocab, device, dtype, kind, stride=vocab + 8)
    tokens = torch.full((9,), -7, dtype=torch.int32, device=device)
    token_rows = torch.tensor([5, 2, 8], dtype=torch.int32, device=device)
    tokens[token_rows.long()] = case.logits[case.rows.long()].argmax(1).int()
    tokens[[2, 8]] = torch.tensor([17, vocab - 1], dtype=torch.int32, device=device)
    args = (logprobs.Scored(case.logits, case.rows, tokens, token_rows), k, vocab)
    found, expected = logprobs.token_logprobs(*args), logprobs.token_logprobs_reference(*args)
    assert torch.equal(found[:, : 2 + k], expected[:, : 2 + k])
    one, two = (t[:, 2 + k :].contiguous().view(torch.float32) for t in (found, expected))
    torch.testing.assert_close(one, two, rtol=1e-6, atol=2e-6)
