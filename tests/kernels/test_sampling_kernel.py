import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nanovllm.kernels.sampling import rng
from nanovllm.kernels.sampling.gumbel import (
    NO_CANDIDATE,
    Draws,
    commit_tokens,
    commit_tokens_reference,
    gumbel_argmax,
    gumbel_argmax_reference,
    keys_to_tokens,
    pack_keys_reference,
    sample_tokens,
    sample_tokens_reference,
)
from tests.kernels.conftest import poison


@dataclass
class Rows:
    logits: torch.Tensor
    row_slot: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    positions: torch.Tensor

    @property
    def draws(self) -> Draws:
        return Draws(self.row_slot, self.temperature, self.seed, self.positions)

    def keys(self, function: Any, vocab_start: int = 0, vocab_size: int | None = None) -> torch.Tensor:
        return function(self.logits, self.draws, vocab_start, vocab_size or self.logits.shape[1])


def make_rows(num_rows: int, vocab: int, dtype: torch.dtype, device: torch.device, temperature: float = 0.8) -> Rows:
    """Each row has a slot, none its own number; logits have the spread of a language model's."""
    num_slots = num_rows + 3
    return Rows(
        logits=(torch.randn(num_rows, vocab, device=device) * 3).to(dtype),
        row_slot=torch.randperm(num_slots)[:num_rows].to(torch.int32).to(device),
        temperature=torch.full((num_slots,), temperature, device=device),
        seed=torch.randint(-(2**63), 2**63 - 1, (num_slots,), device=device),
        positions=torch.randint(0, 40000, (num_rows,), dtype=torch.int32, device=device),
    )


@pytest.fixture(params=[gumbel_argmax, gumbel_argmax_reference])
def function(request: pytest.FixtureRequest) -> Any:
    return request.param


def scores_of(keys: torch.Tensor) -> torch.Tensor:
    bits = (keys >> 32).to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


def assert_same_draw(keys: torch.Tensor, expected: torch.Tensor) -> None:
    """The same tokens; their scores may differ in the last bits of a logarithm."""
    assert torch.equal(keys_to_tokens(keys), keys_to_tokens(expected))
    torch.testing.assert_close(scores_of(keys), scores_of(expected), rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(("num_rows", "vocab"), [(1, 37), (3, 1500), (5, 5000), (33, 400), (2, 4096)])
def test_equals_its_twin(num_rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows(num_rows, vocab, dtype, device)
    rows.temperature[rows.row_slot[::2].long()] = torch.rand(rows.row_slot[::2].shape[0], device=device) * 2
    rows.row_slot[num_rows // 2 :: 7] = -1
    assert_same_draw(rows.keys(gumbel_argmax), rows.keys(gumbel_argmax_reference))


def test_temperature_zero_takes_the_largest_logit(function: Any, dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows(4, 3000, dtype, device, temperature=0.0)
    keys = rows.keys(function)
    largest = rows.logits.float().max(dim=1)
    assert torch.equal(scores_of(keys), largest.values)
    first = (rows.logits.float() == largest.values[:, None]).float().argmax(dim=1)
    assert torch.equal(keys_to_tokens(keys), first.to(torch.int32))


def test_equal_scores_go_to_the_lower_id(function: Any, dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows(3, 2500, dtype, device, temperature=0.0)
    rows.logits[0, :] = 1.5
    rows.logits[1, :] = -torch.inf
    rows.logits[2, :] = 0.0
    rows.logits[2, :1200] = -0.0
    assert keys_to_tokens(rows.keys(function)).tolist() == [0, 0, 0]
    rows.logits[0, [1100, 77, 2400]] = 2.0
    assert keys_to_tokens(rows.keys(function)).tolist()[0] == 77


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_padding_and_nan_never_win(
    function: Any, temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    rows = make_rows(4, 1111, dtype, device, temperature)
    expected = rows.keys(function, 500, 500 + 1000)
    rows.logits[:, 1000:] = torch.inf
    assert torch.equal(rows.keys(function, 500, 500 + 1000), expected)
    losers = keys_to_tokens(expected)[0].item()
    rows.logits[0, losers - 500] = torch.nan
    assert keys_to_tokens(rows.keys(function, 500, 1500))[0] != losers
    rows.logits[:] = torch.nan
    assert keys_to_tokens(rows.keys(function, 500, 1500)).tolist() == [500] * 4


def test_rank_of_padding_alone(function: Any, dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows(2, 64, dtype, device)
    assert rows.keys(function, 1024, 1000).tolist() == [NO_CANDIDATE] * 2


@pytest.mark.parametrize("num_shards", [2, 3, 4])
def test_shards_agree_with_the_whole(
    function: Any, num_shards: int, dtype: torch.dtype, device: torch.device
) -> None:
    vocab = 1501
    rows = make_rows(4, vocab, dtype, device)
    rows.temperature[rows.row_slot[0]] = 0.0
    whole = rows.keys(function)
    size = -(-vocab // num_shards // 16) * 16 + 16
    best = torch.full_like(whole, NO_CANDIDATE)
    for start in range(0, size * num_shards, size):
        part = torch.full((4, size), 100.0, dtype=dtype, device=device)  # padding that would win
        owned = rows.logits[:, start : start + size]
        part[:, : owned.shape[1]] = owned
        best = torch.maximum(best, replace(rows, logits=part).keys(function, start, vocab))
    assert torch.equal(best, whole)


def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows(36, 300, dtype, device)
    together = rows.keys(gumbel_argmax)
    for first, count in ((0, 1), (17, 1), (3, 12)):
        part = slice(first, first + count)
        some = replace(rows, logits=rows.logits[part], row_slot=rows.row_slot[part], positions=rows.positions[part])
        assert torch.equal(some.keys(gumbel_argmax), together[part])


def test_keys_order_scores_then_ids() -> None:
    scores = torch.tensor([-torch.inf, -3.5, -1e-30, 0.0, 1e-30, 2.0, torch.inf])
    keys = pack_keys_reference(scores, torch.tensor(5))
    assert (keys[1:] > keys[:-1]).all()
    assert (pack_keys_reference(scores, torch.tensor(4)) > keys).all()
    assert (pack_keys_reference(scores, torch.tensor(2**31 - 1)) < keys).all()
    assert (keys_to_tokens(keys) == 5).all()


def test_commit_and_sample_equal_their_twins(dtype: torch.dtype, device: torch.device) -> None:
    rows = make_rows(6, 700, dtype, device)
    rows.row_slot[[1, 5]] = -1
    start = torch.randint(0, 100, (9,), dtype=torch.int32, device=device)
    keys = rows.keys(gumbel_argmax)
    outcomes = []
    for commit in (commit_tokens, commit_tokens_reference):
        last, out = start.clone(), poison(6, dtype=torch.int32, device=device)
        assert commit(keys, rows.row_slot, last, out) is out
        outcomes.append((last, out))
    for sample in (sample_tokens, sample_tokens_reference):
        last, out = start.clone(), poison(6, dtype=torch.int32, device=device)
        sample(rows.logits, rows.draws, 700, last, out)
        outcomes.append((last, out))
    live = rows.row_slot >= 0
    for last, out in outcomes:
        assert torch.equal(out, torch.where(live, keys_to_tokens(keys), -1))
        expected = start.clone()
        expected[rows.row_slot[live].long()] = out[live]
        assert torch.equal(last, expected)


# -- the random numbers -------------------------------------------------------------------------------------------


def words(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    k0, k1 = rng.row_key_reference(seeds, positions)
    return rng.random_words_reference(k0, k1, ids)


def assert_uniform(counts: torch.Tensor, expected: float) -> None:
    """Chi-square within 5 standard deviations, by the normal limit."""
    freedom = counts.numel() - 1
    statistic = ((counts.double() - expected) ** 2 / expected).sum().item()
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom), (statistic, freedom)


AXES = {
    "ids": lambda n: (torch.tensor([11]), torch.tensor([5]), torch.arange(n)),
    "positions": lambda n: (torch.tensor([11]), torch.arange(n), torch.tensor([77])),
    "seeds": lambda n: (torch.arange(n), torch.tensor([5]), torch.tensor([77])),
    "high seeds": lambda n: (torch.arange(n) << 32, torch.tensor([5]), torch.tensor([77])),
}


@pytest.mark.parametrize("axis", AXES)
def test_words_are_uniform_along_every_key(axis: str) -> None:
    n = 1 << 18
    drawn = words(*AXES[axis](n))
    assert drawn.min() >= 0 and drawn.max() <= rng.WORD
    assert_uniform(torch.bincount(drawn >> 20, minlength=4096), n / 4096)
    assert_uniform(torch.bincount(drawn & 0xFFF, minlength=4096), n / 4096)
    pairs = ((drawn[:-1] >> 26) << 6) | (drawn[1:] >> 26)
    assert_uniform(torch.bincount(pairs, minlength=4096), (n - 1) / 4096)


@pytest.mark.parametrize("axis", AXES)
def test_one_bit_of_a_key_changes_half_of_the_upper_word(axis: str) -> None:
    n = 4096
    seeds, positions, ids = (part.expand(n).clone() for part in AXES[axis](n))
    before = words(seeds, positions, ids)
    for bit in range(17):
        flipped = {
            "ids": (seeds, positions, ids ^ (1 << bit)),
            "positions": (seeds, positions ^ (1 << bit), ids),
            "seeds": (seeds ^ (1 << bit), positions, ids),
            "high seeds": (seeds ^ (1 << (32 + bit)), positions, ids),
        }[axis]
        changed = before ^ words(*flipped)
        for out_bit in range(8, 32):
            share = ((changed >> out_bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 0.06, (bit, out_bit, share)


def test_rows_are_uncorrelated() -> None:
    """Noise of neighbouring seeds and positions, at equal and at shifted ids."""
    ids = torch.arange(1 << 16)
    seeds = torch.tensor([0, 1, 2, -1, 1 << 32])[:, None, None]
    positions = torch.tensor([0, 1, 2, 1000])[None, :, None]
    noise = rng.gumbel_noise_reference(words(seeds, positions, ids)).reshape(20, -1).double()
    for shift in (0, 1, 2, 16):
        correlation = torch.corrcoef(torch.cat((noise, noise.roll(shift, 1))))[:20, 20:]
        if shift == 0:
            correlation = correlation - torch.eye(20)
        assert correlation.abs().max() < 5 / 256  # 5 standard deviations of 2 ** 16 samples


def test_noise_is_gumbel_and_keeps_its_tail() -> None:
    drawn = rng.gumbel_noise_reference(words(torch.tensor([3]), torch.tensor([9]), torch.arange(1 << 21))).double()
    assert abs(drawn.mean().item() - 0.5772157) < 5 * 1.2825 / 2**10.5
    assert abs(drawn.var().item() - math.pi**2 / 6) < 0.02
    for level in (6.0, 8.0, 10.0):
        expected = (1 << 21) * -math.expm1(-math.exp(-level))
        assert abs((drawn > level).sum().item() - expected) < 5 * math.sqrt(expected)
    ends = rng.gumbel_noise_reference(torch.tensor([0, 1, 2, rng.WORD]))
    exact = [-math.log(-math.log1p(-(word + 0.5) * 2.0**-32)) for word in (0, 1, 2)]
    torch.testing.assert_close(ends[:3], torch.tensor(exact), rtol=1e-6, atol=0)
    assert ends[3].isfinite()


@pytest.mark.gpu
def test_compiled_noise_on_a_whole_vocabulary() -> None:
    """On the hardware's logarithm: the twin's winners, but for near ties, and softmax statistics."""
    rows = make_rows(256, 151936, torch.bfloat16, torch.device("cuda"))
    keys, expected = rows.keys(gumbel_argmax), rows.keys(gumbel_argmax_reference)
    torch.testing.assert_close(scores_of(keys), scores_of(expected), rtol=1e-5, atol=3e-5)
    assert (keys_to_tokens(keys) != keys_to_tokens(expected)).sum() <= 2
