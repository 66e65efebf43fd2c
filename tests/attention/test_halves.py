"""A step in two halves: each token in one of them, seeing what it sees in the whole."""

import numpy as np
import pytest
import torch
from cases import TOLERANCE, make_case, nan_like
from hypothesis import given
from hypothesis import strategies as st
from interpreting import nightly
from test_backends import CONTEXTS, QUERIES, make_backend

from nanovllm.attention import BACKENDS, AttentionMetadata
from nanovllm.attention.split import attention_halves

Token = tuple[int, int]
"""(slot, keys that it sees)"""


def tokens_of(m: AttentionMetadata) -> list[Token]:
    """Tokens of the rows, in order; padding decodes as (-1, 0)."""
    starts, found = m.cu_seqlens_q.tolist(), []
    assert len(starts) == m.num_rows + 1 == len(m.row_slot) + 1 == len(m.context_lens) + 1 and starts[0] == 0
    for row, (slot, context) in enumerate(zip(m.row_slot.tolist(), m.context_lens.tolist(), strict=True)):
        count = starts[row + 1] - starts[row]
        assert count == 1 if row < m.num_decode_rows else count >= 0
        assert count or context == 0, "a row without tokens is padding"
        found += [(slot, max(0, context - count + 1 + i)) for i in range(count)]
    return found


@given(st.data())
def test_every_token_keeps_its_row_and_its_keys(data: st.DataObject) -> None:
    decodes = data.draw(st.lists(st.integers(0, 40), max_size=4))  # contexts; 0: padding
    chunks = data.draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5))
    padded = data.draw(st.booleans())  # a captured step: rows without tokens, tokens without a row
    empty_rows, empty_tokens = (data.draw(st.integers(0, 5)) for _ in range(2)) if padded else (0, 0)
    counts = [1] * len(decodes) + [count for count, _ in chunks] + [0] * empty_rows
    contexts = decodes + [count + before for count, before in chunks] + [0] * empty_rows
    slots = [row if context else -1 for row, context in enumerate(contexts)]
    num_tokens = sum(counts) + empty_tokens
    cut = data.draw(st.integers(max(1, len(decodes)), max(1, len(decodes), num_tokens - 1)))
    if cut >= num_tokens:
        return
    ends = np.cumsum(counts)
    integers = [torch.tensor(x, dtype=torch.int32) for x in (slots, contexts, [0, *ends])]
    table = torch.zeros(9, 9, dtype=torch.int32)
    step = AttentionMetadata(len(counts), len(decodes), *integers, (table,), 9, 99, num_tokens, is_captured=padded)
    step.token_ends = None if padded else ends
    first, second = attention_halves(step, cut)
    whole = tokens_of(step)
    assert tokens_of(first) == whole[:cut] and tokens_of(second) == whole[cut:]
    assert (first.num_decode_rows, second.num_decode_rows) == (len(decodes), 0)
    assert (first.num_tokens, second.num_tokens) == (cut, num_tokens - cut)
    assert first.is_captured == second.is_captured == padded
    assert padded or all(bool((half.cu_seqlens_q.diff() > 0).all()) for half in (first, second))


@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize("cut", [3, nightly(10), nightly(23), 30, nightly(60), 61])
def test_halves_attend_as_the_whole(name: str, cut: int) -> None:
    """One backend object, both halves prepared before either runs."""
    case = make_case(QUERIES, CONTEXTS, 3, num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=128, padding_tokens=2)
    backend, out = make_backend(name, case), nan_like(case.q)
    backend.prepare(case.metadata)  # of which nothing may stay
    halves = attention_halves(case.metadata, cut)
    for half in halves:
        backend.prepare(half)
    for half, tokens in zip(halves, (slice(cut), slice(cut, None)), strict=True):
        backend.forward(case.q[tokens], case.cache, half, out[tokens], case.spec, case.sinks)
    assert case.error_of(out) < TOLERANCE
