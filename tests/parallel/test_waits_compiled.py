"""The wait for flags compiled for compute capability 9.0, which takes no GPU. Each warp leaves its loop by what it has
read itself: a barrier within would be one that some warps have left, and a hang."""

import re
from typing import Any

import pytest
import torch
from compiling import compile_only, run_alone

pytest.importorskip("triton")


def compile_waits() -> None:
    from nanovllm.parallel.peer.copy_engine import await_rows_kernel

    loops = []

    def check(ptx: str, options: dict[str, Any]) -> None:
        code = ptx[ptx.index(".entry") :]
        for label in set(re.findall(r"^(\$L__BB\w+):", code, re.MULTILINE)):
            begin = code.index(f"{label}:")
            for jump in re.finditer(rf"bra\S*\s+{re.escape(label)};", code[begin:]):
                body = code[begin : begin + jump.end()]
                assert "ld.volatile" not in body or not re.search(r"\bbar(rier)?\.(?!warp)", body), body
                loops.append("ld.volatile" in body)

    compile_only(check)
    flags, one = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for world in (2, 3, 4, 8):
        await_rows_kernel[(1,)](
            flags, one, one, 0, 100, WORLD=world, WORLD_BLOCK=1 << (world - 1).bit_length(), num_warps=4
        )
    assert sum(loops) >= 4, "the loops were found"


@pytest.mark.slow
def test_no_barrier_inside_the_wait_for_flags() -> None:
    run_alone(compile_waits)
