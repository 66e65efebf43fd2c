"""Tokens from the device straight into memory of the host, by the last kernel of a captured step."""

import torch

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit(do_not_specialize=["count"])
def _publish_tokens_kernel(
    TOKENS, RING, TURN, count, stride, TURNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """One program, so that a barrier is enough between the readers of the turn and its change."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    turn = tl.load(TURN)
    at = tl.arange(0, BLOCK)
    tl.store(RING + turn * stride + at, tl.load(TOKENS + at, mask=at < count, other=0), mask=at < count)
    tl.debug_barrier()
    tl.store(TURN, (turn + 1) % TURNS)


def publish_tokens(tokens: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Triton version of publish_tokens_reference."""
    _publish_tokens_kernel[(1,)](
        tokens, ring, turn, tokens.shape[0], ring.stride(0), TURNS=ring.shape[0],
        BLOCK=triton.next_power_of_2(ring.shape[1]), num_warps=4, **pdl_options(tokens.device),
    )  # fmt: skip


def publish_tokens_reference(tokens: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Copies tokens int32 [B] into line `turn` (int32 [1], on the device) of ring int32 [N, >= B], in memory of the
    host that the device can write, and moves `turn` on to the next line."""
    ring[int(turn), : tokens.shape[0]] = tokens
    turn.copy_((turn + 1) % ring.shape[0])
