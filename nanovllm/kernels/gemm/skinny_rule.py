"""Which of the kernels for few rows multiplies one row, the step of a single request: read off whole steps on an H200.

Whole steps, because these kernels are launched dependently: each fetches weights while the one before it ends, so the
best of a chain of equals is not the best among attention and norms. Qwen3 0.6B, 4B and 8B, one device; us a step with
candidate_configs' first everywhere, and with these: 613 and 597, 2,543 and 2,276, 4,023 and 3,905 (8B with the merge of
attention's chunks launched the ordinary way in both, see `merges_before`).
"""

from nanovllm.kernels.base.triton_import import triton
from nanovllm.kernels.gemm.skinny import GemmConfig

_NARROW = 2560
"""Columns up to which gate and up want many short programs."""
_LARGE_BYTES = 24 << 20


def one_row(name: str, k: int, fused: bool) -> GemmConfig:
    """For the projection `name` (qkv, o, gate_up, down, head) with `k` columns. fused: alone on its device, so with
    norm, activation and residual around it."""
    block_n, block_k, depth, num_warps = 8, 1024, 3, 4
    if not fused:
        if name == "qkv":  # 32B over four: 5,447 us a step and 5,360; the others were no worse as they were
            block_n, num_warps = 4, 2
    elif name == "qkv":
        block_n, block_k = 16, 512
    elif name == "o":
        block_n, depth, num_warps = 16, 2, 8
    elif name == "gate_up" and k <= _NARROW:
        block_n, block_k, depth = 16, 512, 2
    elif name == "gate_up":
        block_n, num_warps = 4, 2
    return GemmConfig("fma", block_n, block_k, min(depth, triton.cdiv(k, block_k)), num_warps=num_warps)


def merges_before(rows: int, o_weight_bytes: int) -> bool:
    """Whether attention's chunks are to be merged before the output projection starts to fetch its weight.

    Launched as soon as the merge is, a large projection fills the chip with programs that wait: one row of 8B (33 MB)
    takes 4,131 us then and 3,905 without, of 4B (21 MB) 2,276 and 2,287; of 0.6B (4 MB), with the kernels before these,
    613 and 650. With more rows it was best to launch everything early.
    """
    return rows == 1 and o_weight_bytes > _LARGE_BYTES
