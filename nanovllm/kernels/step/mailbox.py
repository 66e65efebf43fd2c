"""Tokens from the device straight into memory of the host, by the last kernel of a captured step."""

import torch

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit(do_not_specialize=["count"])
def _publish_tokens_kernel(
    TOKENS, RING, INDEX, count, stride, LINES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """TOKENS int32 [count] into line INDEX int32 [1] of RING int32 [LINES, stride]; INDEX goes on. One program, so that
    a barrier is enough between the readers of the index and its change."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.load(INDEX)
    at = tl.arange(0, BLOCK)
    tl.store(RING + index * stride + at, tl.load(TOKENS + at, mask=at < count, other=0), mask=at < count)
    tl.debug_barrier()
    tl.store(INDEX, (index + 1) % LINES)


def publish_tokens(tokens: torch.Tensor, ring: torch.Tensor, index: torch.Tensor) -> None:
    """Copies tokens int32 [B] into line `index` (int32 [1], on the device) of ring int32 [N, >= B], in memory of the
    host that the device can write, and moves `index` on to the next line."""
    _publish_tokens_kernel[(1,)](
        tokens, ring, index, tokens.shape[0], ring.stride(0), LINES=ring.shape[0],
        BLOCK=triton.next_power_of_2(ring.shape[1]), num_warps=4, **pdl_options(tokens.device),
    )  # fmt: skip


def publish_tokens_reference(tokens: torch.Tensor, ring: torch.Tensor, index: torch.Tensor) -> None:
    """Plain twin of `publish_tokens`."""
    ring[int(index), : tokens.shape[0]] = tokens
    index.copy_((index + 1) % ring.shape[0])
