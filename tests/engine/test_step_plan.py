"""The packed step says exactly what the plan says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from simulation import make_sequence

from nanovllm.engine.step_plan import StepPlan
from nanovllm.wire.step import HEADER_SIZE, RECORD_SIZE, dummy_step

INT32 = st.integers(-(2**31), 2**31 - 1)
SEEDS = st.integers(-(2**63), 2**63 - 1)
TEMPERATURES = st.floats(0, 2.0**100, width=32)


def unpack(packed: np.ndarray, max_num_seqs: int) -> dict[str, list]:
    """The documented layout, read with nothing but the counts of the header."""
    rows, decodes, samples, tokens, updates, records, longest = packed[:7].tolist()
    assert not packed[7:HEADER_SIZE].any(), "reserved"
    at = HEADER_SIZE + 3 * max_num_seqs
    columns = packed[HEADER_SIZE:at].reshape(3, max_num_seqs)
    assert not columns[:, rows:].any()
    end = at + 3 * updates
    record = packed[end : end + RECORD_SIZE * records].reshape(records, RECORD_SIZE)
    assert not record[:, 5:].any(), "reserved"
    return {
        "counts": [rows, decodes, samples, tokens, longest],
        "rows": columns[:, :rows].T.tolist(),
        "updates": packed[at:end].tolist(),
        "slots": record[:, 0].tolist(),
        "temperatures": record[:, 1].copy().view(np.float32).tolist(),
        "last_tokens": record[:, 4].tolist(),
        "seeds": record[:, 2:4].copy().view(np.int64).ravel().tolist(),
        "token_ids": packed[end + RECORD_SIZE * records :].tolist(),
    }


@given(
    data=st.data(),
    slots=st.lists(st.integers(0, 15), unique=True, max_size=16),
    updates=st.lists(st.tuples(*[st.integers(0, 2**31 - 1)] * 3), max_size=5),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=20),
)
def test_round_trip(
    data: st.DataObject, slots: list[int], updates: list[tuple[int, int, int]], token_ids: list[int]
) -> None:
    seqs = []
    for slot in slots:
        seqs.append(make_sequence(slot, [data.draw(INT32)], seed=data.draw(SEEDS), temperature=data.draw(TEMPERATURES)))
        seqs[-1].slot = slot
    column = st.lists(INT32.filter(lambda n: n > 0), min_size=len(slots), max_size=len(slots))
    new = data.draw(st.lists(st.sampled_from(seqs), unique=True)) if seqs else []
    num_decodes, num_samples, num_tokens = sorted(data.draw(st.tuples(*[st.integers(0, 2**31 - 1)] * 3)))
    plan = StepPlan(
        seqs=seqs,
        starts=data.draw(column),
        counts=data.draw(column),
        epochs=[0] * len(slots),
        num_decode_rows=num_decodes,
        num_sample_rows=num_samples,
        num_tokens=num_tokens,
        block_updates=[number for update in updates for number in update],
        new_slots=new,
        host_token_ids=token_ids,
    )
    packed = plan.pack(16)
    assert packed.dtype == np.int32 and packed.flags.c_contiguous
    assert unpack(packed, 16) == {
        "counts": [len(slots), num_decodes, num_samples, num_tokens, max(plan.counts, default=0)],
        "rows": [list(row) for row in zip(slots, plan.starts, plan.counts, strict=True)],
        "updates": plan.block_updates,
        "slots": [seq.slot for seq in new],
        "temperatures": [seq.constants.temperature for seq in new],
        "last_tokens": [seq.token_ids[-1] for seq in new],
        "seeds": [seq.constants.seed for seq in new],
        "token_ids": token_ids,
    }


def test_no_row_of_the_largest_step_is_longer_than_the_context() -> None:
    for tokens, rows, longest in ((100, 8, 13), (5, 5, 1), (1000, 8, 20)):
        assert dummy_step(8, tokens, max_model_len=20)[[0, 3, 6]].tolist() == [rows, min(tokens, 8 * 20), longest]
