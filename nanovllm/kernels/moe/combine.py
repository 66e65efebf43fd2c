"""A token's results of its experts, added up."""

import torch

from nanovllm.kernels.base.device import pdl_options, start_early
from nanovllm.kernels.base.padded_rows import empty_rows
from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit(do_not_specialize=["rows"])
def _combine_kernel(
    PARTS, SHARED, LOGITS, OUT, rows,
    HIDDEN: tl.constexpr, TOP_K: tl.constexpr, WIDTH: tl.constexpr, LOGIT_PARTS: tl.constexpr, GATE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUT [rows, HIDDEN]: the sum of PARTS [TOP_K, rows, HIDDEN] and of SHARED [rows, HIDDEN], if there is one, times
    the sigmoid of column GATE of LOGITS [LOGIT_PARTS, rows, WIDTH], if there are some. A program has columns
    `program_id(1)` * BLOCK and on of row `program_id(0)`."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < HIDDEN
    start_early(PDL)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(TOP_K):
        total += tl.load(PARTS + (part * rows + row) * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
    if SHARED is not None:
        shared = tl.load(SHARED + row * HIDDEN + cols, mask=mask, other=0.0).to(tl.float32)
        if LOGITS is not None:
            gate = 0.0
            for part in tl.static_range(LOGIT_PARTS):
                gate += tl.load(LOGITS + (part * rows + row) * WIDTH + GATE)
            shared = shared / (1.0 + tl.exp(-gate))
        total += shared
    tl.store(OUT + row * HIDDEN + cols, total.to(OUT.dtype.element_ty), mask=mask)


def combine(
    parts: torch.Tensor, dtype: torch.dtype, shared: torch.Tensor | None = None, logits: torch.Tensor | None = None,
    gate: int = 0,
) -> torch.Tensor:  # fmt: skip
    """parts [k, T, H] -> their sum in order, plus shared [T, H], in float32 and rounded once to `dtype`, [T, H]. logits
    float32 [parts of K, T, width]: the sigmoid of their column `gate` multiplies `shared`. All are contiguous."""
    top_k, rows, hidden = parts.shape
    out = empty_rows(rows, hidden, dtype, parts.device)
    block = min(1024, triton.next_power_of_2(hidden))
    sizes = {"WIDTH": 0, "LOGIT_PARTS": 0} if logits is None else {"WIDTH": logits.shape[2], "LOGIT_PARTS": len(logits)}
    _combine_kernel[(rows, triton.cdiv(hidden, block))](
        parts, shared, logits, out, rows,
        HIDDEN=hidden, TOP_K=top_k, GATE=gate, BLOCK=block, num_warps=4, **sizes, **pdl_options(parts.device),
    )  # fmt: skip
    return out


def combine_reference(
    parts: torch.Tensor, dtype: torch.dtype, shared: torch.Tensor | None = None, logits: torch.Tensor | None = None,
    gate: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Plain twin of `combine`."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if shared is not None:
        scale = 1.0 if logits is None else logits.sum(0)[:, gate, None].sigmoid()
        total = total + shared.float() * scale
    return total.to(dtype)
