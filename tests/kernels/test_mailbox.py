"""Tokens left in memory of the host, line by line; and what a rank keeps of steps that nobody asks for."""

import numpy as np
import pytest
import torch

from nanovllm.kernels.step.mailbox import publish_tokens, publish_tokens_reference
from nanovllm.runner.device_io import RING, DeviceIO


@pytest.mark.parametrize("count", [1, 2, 33, 100])
def test_publish_equals_its_twin(count: int, device: torch.device) -> None:
    pinned = device.type == "cuda"
    ring = torch.full((3, 130), -5, dtype=torch.int32, pin_memory=pinned)
    expected = torch.full((3, 130), -5, dtype=torch.int32)
    turn, twin_turn = (torch.zeros(1, dtype=torch.int32, device=where) for where in (device, "cpu"))
    for call in range(7):
        tokens = torch.randint(-1, 1000, (count + call,), dtype=torch.int32, device=device)
        publish_tokens(tokens, ring, turn)
        publish_tokens_reference(tokens.cpu(), expected, twin_turn)
        if pinned:
            torch.cuda.synchronize()
        assert torch.equal(ring, expected)
        assert turn.item() == twin_turn.item() == (call + 1) % 3


def test_both_sides_count_the_same_lines(device: torch.device) -> None:
    io = DeviceIO(device)
    io.allocate(8, 4)
    assert io.mailbox is not None
    steps, tokens, index = io.mailbox.steps, io.mailbox.tokens, io.mailbox.ring_index
    publish_tokens(torch.zeros(4, dtype=torch.int32, device=device), tokens, index)  # a warm-up
    io.begin_mailbox()
    for n in range(2 * RING + 1):
        line = io.post(np.full(5, n, dtype=np.int32))
        assert steps[index.item(), :5].tolist() == line[:5].tolist() == [n] * 5
        own = torch.full((2,), 10 + n, dtype=torch.int32, device=device)
        publish_tokens(own, tokens, index)
        io.receive(own, slice(0), posted=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert io.collect(1.0, lambda: False) == ([10 + n] * 2, None)


def test_rows_of_padding_are_left_out() -> None:
    io = DeviceIO(torch.device("cpu"))
    io.receive(torch.tensor([5, 1, 1, 8, -1], dtype=torch.int32), slice(1, 3))
    assert io.collect(1.0, lambda: False) == ([5, 8, -1], None)
