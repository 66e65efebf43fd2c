"""Products in one order of sums: the blocks of a CPU, leaves of K, and which kernels are chosen."""

import pytest
import torch

from nanovllm.kernels.gemm import dense, fixed_order, tile
from nanovllm.kernels.gemm.fixed_order import linear_in_blocks
from nanovllm.kernels.plan.config import LIBRARY, Gemm, GemmConfig
from nanovllm.kernels.plan.order import ANY_ROWS, LEAVES, fixed_ranges, leaves_of, without_library
from nanovllm.kernels.plan.table import shipped_table
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.runner.sum_order import rows_that_differ

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TABLE = shipped_table("NVIDIA H200")
SHAPES = [("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 24576, 4096), ("down", 4096, 12288), ("down", 896, 4864),
          ("down", 1024, 3072), ("head", 151936, 1024), ("qkv", 1152, 904)]  # fmt: skip


@pytest.mark.parametrize("columns", [96, 70, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_give_a_row_the_same_bits_in_any_company(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(37, columns).to(dtype), torch.randn(43, columns).to(dtype)
    whole = linear_in_blocks(x, weight, GemmConfig("blocks"))
    torch.testing.assert_close(whole, (x.double() @ weight.double().T).to(dtype))
    for rows in (slice(0, 1), slice(5, 6), slice(3, 36)):
        assert torch.equal(linear_in_blocks(x[rows], weight, GemmConfig("blocks")), whole[rows])
    assert torch.equal(linear_in_blocks(x, weight[8:24], GemmConfig("blocks")), whole[:, 8:24])


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_rank_holds_a_node_of_the_one_tree(size: int) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(5, 512).bfloat16(), torch.randn(24, 512).bfloat16()

    def node(begin: int, end: int) -> torch.Tensor:
        config = GemmConfig("blocks", split_k=(end - begin) // (512 // LEAVES), round_sums=True)
        parts = linear_in_blocks(x[:, begin:end], weight[:, begin:end], config)
        return parts if parts.dim() == 2 else add_up(parts, x.dtype, round_sums=True)

    nodes = [node(rank * 512 // size, (rank + 1) * 512 // size) for rank in range(size)]
    assert torch.equal(add_up(torch.stack(nodes), x.dtype, round_sums=True), node(0, 512))


def test_parts_of_the_decode_kernel_are_rounded() -> None:
    torch.manual_seed(2)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    x, weight = (torch.randn(rows, 512).to(DEVICE, dtype) for rows in (5, 64))
    for kernel in ("tile", "split"):
        config = GemmConfig(kernel, 64, 16, 32, 3, split_k=4, round_sums=True)
        got, want = dense.linear(x, weight, config), tile.linear_reference(x, weight, config)
        assert got.dtype == want.dtype == dtype
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)


def test_settings_of_the_library_stay_until_the_last_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines may be in steps of theirs at a time."""
    now = [("cublas", (True, True), (True, True))]
    monkeypatch.setattr(fixed_order, "_settings", lambda: now[-1])
    monkeypatch.setattr(fixed_order, "_set", lambda *settings: now.append(settings))
    first, second = fixed_order.library_without_parts(), fixed_order.library_without_parts()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert now[-1] == ("cublaslt", (False, False), (False, False))
    second.__exit__(None, None, None)
    assert now[-1] == now[0]


def test_an_order_that_varies_is_noticed_and_replaced() -> None:
    torch.manual_seed(3)
    weight, blocks = torch.randn(40, 333), GemmConfig("blocks")
    assert rows_that_differ(weight, ((8, blocks), (ANY_ROWS, blocks)), 300) == []
    differing = rows_that_differ(weight, ((8, blocks), (ANY_ROWS, LIBRARY)), 300)
    assert differing and min(differing) > 8
    replaced = without_library(((8, blocks), (64, LIBRARY), (ANY_ROWS, GemmConfig("split", split_k=2))), 96)
    found = [(config.kernel, config.parts, config.block_k) for _, config in replaced]
    assert found == [("blocks", 1, 0), ("tile", 1, 64), ("tile", 2, 16)]


@pytest.mark.parametrize(("kind", "n", "k"), SHAPES)
def test_k_is_cut_alike_for_all_numbers_of_rows(kind: str, n: int, k: int) -> None:
    gemm = Gemm(kind, n, k, "bfloat16", True)
    for takes_parts in (True, False):
        chosen = [config for _, config in fixed_ranges(gemm, TABLE, takes_parts, 0, False)]
        assert len({config.parts for config in chosen}) == 1
        assert {config.kernel for config in chosen[1:]} <= {"library", "split", "tile"}
        assert chosen[0].kernel == "tile"
        assert takes_parts or chosen[0].parts == 1
        parts = chosen[0].parts
        assert parts == 1 or all(k % (parts * config.block_k) == 0 for config in chosen if config.block_k)
    for size in (1, 2, 4, 8):
        leaves = leaves_of(k) // size
        if kind in ("o", "down") and leaves:
            part = gemm._replace(k=k // size)
            for _, config in fixed_ranges(part, TABLE, True, leaves, False):
                assert config.parts == leaves and config.round_sums
                assert leaves == 1 or not config.block_k or part.k % (leaves * config.block_k) == 0
