"""Tokens left in memory of the host, line by line; and what a rank keeps of steps that nobody asks for."""

import numpy as np
import pytest
import torch

from nanovllm.kernels.step.mailbox import publish_tokens, publish_tokens_reference
from nanovllm.runner.device_io import DeviceIO
from nanovllm.runner.mailbox import RING, Mailbox


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
    mailbox = Mailbox(8, 4, device)
    publish_tokens(torch.zeros(4, dtype=torch.int32, device=device), mailbox.tokens, mailbox.ring_index)  # a warm-up
    mailbox.begin()
    for n in range(2 * RING + 1):
        if n % 3:
            mailbox.post(np.full(7, -n, dtype=np.int32))  # a step that could not be launched
        line, place = mailbox.post(np.full(5, n, dtype=np.int32))
        mailbox.count_launch()
        assert mailbox.steps[mailbox.ring_index.item(), :5].tolist() == line[:5].tolist() == [n] * 5
        publish_tokens(torch.full((2,), 10 + n, dtype=torch.int32, device=device), mailbox.tokens, mailbox.ring_index)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert place[:2].tolist() == [10 + n] * 2


def test_a_rank_whose_tokens_nobody_asks_for_keeps_few() -> None:
    io = DeviceIO(torch.device("cpu"))
    for _ in range(100):
        io.download(torch.zeros(3, dtype=torch.int32), 3, 3)
    assert len(io._launched) <= RING
