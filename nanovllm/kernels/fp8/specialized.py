"""Products of many rows in FP8 by the kernel whose warps have roles: what it takes, and its launch."""

import torch
from torch import Tensor

from nanovllm.kernels.base.device import pdl_options
from nanovllm.kernels.base.padded_rows import empty_product, rows_in_memory
from nanovllm.kernels.base.triton_import import gl, triton
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import empty_rows_for
from nanovllm.kernels.fp8.reference import GROUP
from nanovllm.kernels.fp8.specialized_kernel import specialized_kernel
from nanovllm.kernels.gemm.choice import GemmConfig

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
_PROGRAMS = {4: 264, 8: 132}
"""By warps that multiply: as many as an H100 or H200 has room for."""


def takes(weight: FP8Weight, config: GemmConfig) -> bool:
    """Whether a tile's weights share their scales along K, and the GPU is of compute capability 9.0."""
    whole = not weight.in_blocks or weight.rows_each % config.block_n == 0
    return whole and weight.values.is_cuda and torch.cuda.get_device_capability(weight.values.device) == (9, 0)


def linear(
    x: FP8Rows, weight: FP8Weight, config: GemmConfig, *, gated: bool = False, pdl: bool = True
) -> Tensor | FP8Rows:
    """x [T, K] @ weight^T -> [T, N] in the dtype that x was rounded from; with config.parts > 1 float32 [parts, T, N].
    gated: gates are the first N / 2 columns, and the result is silu(gate) * up, [T, N / 2], rounded to e4m3."""
    rows, n, device = x.shape[0], weight.values.shape[0], weight.values.device
    if gated:
        found = empty_rows_for(rows, n // 2, x.dtype, device)
        _launch(x, weight, config, found.values, found.scales, n // 2, pdl)
        return found
    out = empty_product(rows, n, config.parts, False, x.dtype, device)
    _launch(x, weight, config, out, None, n, pdl)
    return out


def _launch(
    x: FP8Rows, weight: FP8Weight, config: GemmConfig, out: Tensor, out_scales: Tensor | None, n_out: int, pdl: bool
) -> None:
    """Fills `out`; where there are out_scales too, with silu(gate) * up, rounded."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    (rows, k), values, scales = x.shape, weight.values, x.scales.t()
    if values.shape[1] != k or k % 16 or (out_scales is not None and weight.in_blocks and n_out % GROUP):
        raise ValueError(f"weight {list(values.shape)} does not fit x {list(x.shape)}, or has ragged blocks or groups")
    tiles_m, tiles_n = triton.cdiv(rows, config.block_m), triton.cdiv(n_out, config.block_n)
    readable = min(rows_in_memory(x.values), tiles_m * config.block_m)
    bytes_layout, floats_layout = gl.NVMMASharedLayout(128, 8, 2), gl.NVMMASharedLayout(0, 32, 1)
    groups, stride = triton.cdiv(k, GROUP), scales.stride(0)
    specialized_kernel[(min(tiles_m * tiles_n * config.split_k, _PROGRAMS[config.num_warps]),)](
        TensorDescriptor(x.values, [readable, k], [k, 1], [config.block_m, GROUP], bytes_layout),
        TensorDescriptor(scales, [groups * stride], [1], [config.block_m], floats_layout),
        TensorDescriptor(values, list(values.shape), [k, 1], [config.block_n, GROUP], bytes_layout),
        weight.scale, out, out_scales, rows, stride, 0 if out_scales is None else out_scales.stride(1), n_out,
        weight.scale.shape[1], tiles_m, tiles_n, config.split_k, groups, STAGES=config.stages,
        GROUPS=config.num_warps // 4, ROWS_EACH=weight.rows_each, IN_BLOCKS=weight.in_blocks, PARTS=config.parts > 1,
        DTYPE=_DTYPES[x.dtype], num_warps=4, maxnreg=128 if config.num_warps == 4 else None,
        **pdl_options(values.device, pdl),
    )  # fmt: skip
