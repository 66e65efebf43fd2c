"""NaN stays NaN when it is rounded to e4m3. On a GPU a maximum of floats and e4m3's own saturation
leave NaN out, which would make a finite number of it; Triton's interpreter does neither. So the compiled kernels are
looked at, which takes no GPU, and run where there is one."""

import re
from typing import Any

import pytest
import torch
from compiling import compile_only, empty, empty_fp8, run_alone

from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Rows, FP8Weight
from nanovllm.kernels.fp8.quantize import empty_rows_for, quantize_rows
from nanovllm.kernels.fp8.reference import quantize_blocks
from nanovllm.kernels.gemm import stream
from nanovllm.kernels.plan.config import GemmConfig
from nanovllm.kernels.pointwise.activation import activation
from nanovllm.kernels.pointwise.norm import Norm, add_norms

pytest.importorskip("triton")

HIDDEN = 512
ROW = GemmConfig("stream", 16, block_k=512, stages=2, num_warps=4)
ROLES = GemmConfig("roles", 128, 64, 128, 4)

def compile_rounding() -> None:
    seen = []

    def check(ptx: str, options: dict[str, Any]) -> None:
        assert not re.search(r"\b(max|min)\.f32", ptx), "it leaves NaN out"
        seen.append("cvt.rn.satfinite.e4m3x2.f32" in ptx)

    compile_only(check)
    x, norm, weight = empty(64, HIDDEN), Norm(empty(HIDDEN), 1e-6), empty_fp8(HIDDEN, HIDDEN)
    quantize_rows(x)
    quantize_rows(x, torch.empty(2))
    add_norms(x, x, norm, rounds=True)
    activation(x, "silu", True, rounds=True)
    gemm.linear(empty_rows_for(64, HIDDEN, x.dtype, x.device), weight, ROLES, gated=True)
    stream.linear(x[:1], weight, GemmConfig("stream", 16, block_k=512, stages=2), norm=norm)
    assert len(seen) == 6 and all(seen), seen


@pytest.mark.slow
def test_no_compiled_kernel_leaves_nan_out() -> None:
    run_alone(compile_rounding)


def spoilt(rows: int) -> torch.Tensor:
    """Random rows, the last of which has one NaN."""
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(0))
    x[-1, HIDDEN // 3] = float("nan")
    return x.to("cuda", torch.bfloat16)


def keeps_nan(rows: FP8Rows, group: int | None = None) -> bool:
    """The last row has NaN, in one group or in all, and no other row has."""
    wide = rows.values.float().unflatten(1, (-1, 128)) * rows.scales[..., None]
    found = wide.isnan().any(2)
    return bool(found[-1].all() if group is None else found[-1, group]) and not bool(found[:-1].any())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter keeps NaN in any case")
def test_rounded_rows_keep_nan() -> None:
    gain = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    x = spoilt(5)
    group = HIDDEN // 3 // 128
    assert keeps_nan(quantize_rows(x), group)
    assert keeps_nan(quantize_rows(x, torch.ones(1, device="cuda")), group)
    assert keeps_nan(add_norms(x, torch.zeros_like(x), Norm(gain, 1e-6), rounds=True)[0])
    for pair in ([x, torch.ones_like(x)], [torch.ones_like(x), x]):
        assert keeps_nan(activation(torch.cat(pair, 1), "silu", True, rounds=True), group)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter keeps NaN in any case")
def test_products_of_a_row_with_nan_are_nan() -> None:
    make = torch.Generator().manual_seed(1)
    values, scale = quantize_blocks(torch.randn(HIDDEN, HIDDEN, generator=make))
    weight, gain = FP8Weight(values.cuda(), scale.cuda(), 128), torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    x = spoilt(1)
    for norm in (None, Norm(gain, 1e-6)):
        assert stream.linear(x, weight, ROW, norm=norm).isnan().all()
    many = spoilt(40)
    rows = quantize_rows(many)
    assert gemm.linear(rows, weight, ROLES)[-1].isnan().all()  # type: ignore[index]
    assert keeps_nan(gemm.linear(rows, weight, ROLES, gated=True))  # type: ignore[arg-type]
