"""The general sampler's Triton kernels against their plain twins."""

import pytest
import torch
from general_rows import Rows, make_rows, record

from nanovllm.kernels import filters, logprobs, penalties
from nanovllm.sampling import section

pytest.importorskip("triton")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def test_host_and_device_agree_on_the_layout() -> None:
    assert section.RECORD_WORDS == penalties.RECORD_WORDS
    assert (section.PENALTIES, section.MASK) == (penalties.PENALTIES, penalties.MASK)


def survivors(case: Rows, thresholds: torch.Tensor) -> torch.Tensor:
    x = case.logits[case.rows.long()].float()
    return (x >= thresholds.unsqueeze(1)) & x.isfinite()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "tied", "peaked", "masked"])
@pytest.mark.parametrize("vocab", [37, 1000])
def test_thresholds(vocab: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """The same tokens survive, but for one near the boundary where a sum of probabilities is a tie within rounding."""
    case = make_rows(vocab, 6, vocab, device, dtype, kind, stride=vocab + 3)
    found = filters.find_thresholds(*case.filter_args, vocab)
    expected = filters.find_thresholds_reference(*case.filter_args, vocab)
    kept, wanted = survivors(case, found), survivors(case, expected)
    different = (kept != wanted).any(1)
    for g in different.nonzero().flatten().tolist():
        x = case.logits[case.rows[g].long()].float()
        heat = case.temperature[case.slots[g].long()]
        probability = (x / heat).double().softmax(0)
        doubtful = probability[kept[g] != wanted[g]]
        assert doubtful.max() < 1e-5 or doubtful.unique().numel() == 1
    assert different.sum() <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_draws(dtype: torch.dtype, device: torch.device) -> None:
    vocab, tokens = 1100, []
    case = make_rows(5, 12, vocab, device, dtype)
    thresholds = filters.find_thresholds_reference(*case.filter_args, vocab)
    case.records[::2, 0] = penalties.PENALTIES
    for draw in (filters.draw_survivors, filters.draw_survivors_reference):
        for limits in (thresholds, None):
            out = torch.full((16,), -7, dtype=torch.int32, device=device)
            last = torch.full((20,), -7, dtype=torch.int32, device=device)
            counts = torch.zeros(20, vocab, dtype=torch.int32, device=device)
            draw(*case.filter_args, case.seed, case.positions, limits, case.rows, out, last, counts, vocab)
            tokens.append(torch.cat([out, last, counts.nonzero().flatten()]))
    assert torch.equal(tokens[0], tokens[2]) and torch.equal(tokens[1], tokens[3])
    assert not torch.equal(tokens[0], tokens[1])


def test_greedy_ties_go_to_the_lowest_id(device: torch.device) -> None:
    case = make_rows(8, 3, 1100, device)
    case.temperature.zero_()
    case.logits.fill_(-1.0)
    case.logits[:, [1099, 40, 700]] = 2.0
    for draw in (filters.draw_survivors, filters.draw_survivors_reference):
        out, last = torch.zeros(2, 20, dtype=torch.int32, device=device)
        draw(*case.filter_args, case.seed, case.positions, None, case.rows, out, last, None, 1100)
        assert out[case.rows.long()].tolist() == [40, 40, 40]


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
    masks = torch.randint(-(2**31), 2**31 - 1, (slots, 4), generator=generator, dtype=torch.int32).to(device)
    entries = [(g, i, b) for g in range(4) for i, b in ((g, 1.5), (50 + g, -torch.inf), (99, -2.0))]
    edits = torch.tensor([[g, i, 0] for g, i, _ in entries], dtype=torch.int32)
    edits[:, 2] = torch.tensor([b for _, _, b in entries]).view(torch.int32)
    args = (case.logits, case.rows, case.slots, case.records, counts if counted else None, masks if masked else None)
    for given in (edits.to(device), edits[:0].to(device)):
        found = penalties.edit_logits(*args, given, vocab)
        torch.testing.assert_close(found, penalties.edit_logits_reference(*args, given, vocab), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("kind", ["normal", "tied", "masked"])
def test_logprobs(kind: str, k: int, dtype: torch.dtype, device: torch.device) -> None:
    vocab = 5000
    case = make_rows(2, 3, vocab, device, dtype, kind, stride=vocab + 8)
    tokens = case.logits[case.rows.long()].argmax(1).int()
    tokens[1:] = torch.tensor([17, vocab - 1], device=device)
    found = logprobs.token_logprobs(case.logits, case.rows, tokens, k, vocab)
    expected = logprobs.token_logprobs_reference(case.logits, case.rows, tokens, k, vocab)
    ids = slice(1, 2 + k)
    assert torch.equal(found[:, ids], expected[:, ids])
    for floats in (slice(0, 1), slice(2 + k, None)):
        one, two = (t[:, floats].contiguous().view(torch.float32) for t in (found, expected))
        torch.testing.assert_close(one, two, rtol=1e-6, atol=2e-6)
