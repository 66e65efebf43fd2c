"""Memory that will be wanted, on its way before it is."""

from nanovllm.kernels.base.triton_import import tl, triton


@triton.jit
def prefetch_lines(pointers):
    """Has the L2 cache fetch the line of 128 bytes behind each of a tensor of pointers. Nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
