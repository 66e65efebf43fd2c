"""Choices of kernels: every entry of the shipped tables fits, any shape finds one that can run, files are safe."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.kernels.gemm import dense
from nanovllm.kernels.plan.config import (
    FP8,
    INT4_ROWS,
    ITEM_SIZES,
    KINDS,
    LIBRARY,
    PACKED,
    SKINNY_ROWS,
    STREAM_ROWS,
    SUMMED,
    TILE_ROWS,
    Gemm,
    GemmConfig,
    streaming,
)
from nanovllm.kernels.plan.device import KNOWN, Device
from nanovllm.kernels.plan.fits import why_not
from nanovllm.kernels.plan.plan import LAST_KEPT, Planner, Rules, choose, launch, plan, row_ends
from nanovllm.kernels.plan.product import Around, Choice, Product
from nanovllm.kernels.plan.rules import FEW_TOKENS
from nanovllm.kernels.plan.table import GemmTable, load, ranges_of, save, shipped_table

H200 = shipped_table("NVIDIA H200")
GEMMS = st.builds(
    Gemm, st.sampled_from(KINDS), st.integers(1, 200_000), st.integers(1, 30_000),
    st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", *PACKED]), st.booleans(),
)  # fmt: skip
OWN = GemmConfig("tile", 64, 16, 256, 5)


def lookup(table: GemmTable, gemm: Gemm, rows: int, device: Device = KNOWN[0]) -> GemmConfig:
    """Kernel that is chosen where the consumer takes whatever consumers of its kind do."""
    product = Product(*gemm[:4], around=Around(adds_parts=gemm.kind in SUMMED))
    return choose(product, rows, Rules(device, 1 if gemm.fused else 2, own_kernels=True, table=table))[0]


@pytest.mark.parametrize("after", ["", "residual"])
@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
def test_a_complete_stream_comes_to_experts_that_norm_and_add(dtype: str, after: str, rows: int) -> None:
    """Which no more rows do than have their experts read token by token, though others may norm eight."""
    qkv = Product("qkv", 5120, 2048, dtype, around=Around("rms"))
    o = Product("o", 2048, 4096, dtype, around=Around("attention", "residual", adds_parts=True))
    before, choice = "rms" if after else "norm", Choice(128, 8, dtype)
    router = Product("router", 128, 2048, "bfloat16", around=Around(before, "routing"), choice=choice)
    gate_up = Product("experts.gate_up", 1536, 2048, dtype, around=Around(before, "gate"), choice=choice)
    down = Product("experts.down", 2048, 768, dtype, around=Around("", after, adds_parts=True), choice=choice)
    tried = {qkv.gemm(1): {8: streaming(8, 4, columns=64)}, o.gemm(1): {8: streaming(4, 4, columns=64)}}
    rules = Rules(KNOWN[0], own_kernels=True, table=H200, tried=tried)
    planned = plan((qkv, o, router, gate_up, down), rows, rules)
    *dense, routes, first, second = planned.launches
    assert {each.config.is_skinny for each in (routes, first, second)} == {first.config.is_skinny}
    assert first.config.kernel == "tile" or rows <= FEW_TOKENS
    assert first.config.block_m == second.config.block_m
    assert {routes.norm, first.norm, second.residual} == {planned.is_complete}
    assert any(each.norm or each.residual for each in dense) == planned.is_complete
    assert planned.is_complete or rows > 1 or not after


@pytest.mark.parametrize(("rows", "k", "stages", "fits"), [
    (4, 2048, 4, True), (4, 2056, 4, False), (3, 4096, 3, False), (2, 4096, 3, True), (8, 1024, 4, True),
    (8, 4096, 4, False), (2, 4096, 9, False),
])  # fmt: skip
def test_a_table_gets_the_norm_inside_where_registers_hold_the_rows(rows: int, k: int, stages: int, fits: bool) -> None:
    """Else the library, with the reason; the same kernel serves what brings its rows normed."""
    product = Product("qkv", 6144, k, "bfloat16", around=Around("rms"))
    config = streaming(4, stages, columns=64)
    table = GemmTable((), {product.gemm(1): ((8, config),), product.gemm(2): ((8, config),)})
    rules = Rules(KNOWN[0], own_kernels=True, table=table)
    found, why = choose(product, rows, rules)
    assert (found == config) == fits and (found == LIBRARY) != fits
    assert why == "measured" if fits else why.startswith(f"measured: K={k}: registers do not hold")
    for outside in (replace(product, has_bias=True), product.apart):
        assert choose(outside, rows, rules) == (config, "measured")
    assert choose(product, rows, replace(rules, world=2)) == (config, "measured")


def test_every_entry_fits_its_shape() -> None:
    assert H200.entries
    for gemm, ranges in H200.entries.items():
        ends = [most for most, _ in ranges]
        assert ends == sorted(set(ends)) and ends[-1] <= TILE_ROWS
        for most, config in ranges:
            assert not why_not(gemm, config)
            assert most <= (STREAM_ROWS if config.kernel == "stream" else SKINNY_ROWS) or not config.is_skinny
            if config.is_skinny:
                assert config.block_k <= gemm.k, "no program without columns"
    for name in ("NVIDIA A100-SXM4-80GB", "cpu"):
        assert not shipped_table(name).entries


def test_a_table_says_where_it_was_measured(tmp_path: Path) -> None:
    """A device's own entries come first, and those of one alike serve for what it lacks."""
    both, one = Gemm("o", 4096, 4096, "bfloat16", True), Gemm("o", 2048, 2048, "bfloat16", True)
    h100, gh200 = shipped_table("NVIDIA H100 80GB HBM3"), shipped_table("NVIDIA GH200 480GB")
    assert both in h100.entries and one not in h100.entries and not gh200.entries
    assert H200.describe([both, one]) == "2 of 2 tuned"
    assert h100.describe([both, one]) == "1 of 2 tuned, 1 on NVIDIA H200"
    assert gh200.describe([both, one]) == "0 of 2 tuned, 2 on NVIDIA H200"
    assert h100.measured(both) == h100.entries[both] != H200.measured(both) == gh200.measured(both)
    assert h100.measured(one) == H200.measured(one) == H200.measured(one._replace(dtype="float16"))
    save(tmp_path / "table.json", H200)
    assert load(tmp_path / "table.json") == H200 and os.listdir(tmp_path) == ["table.json"]


@given(st.one_of(GEMMS, st.sampled_from(sorted(H200.entries))), st.integers(1, 20_000), st.sampled_from(KNOWN))
def test_what_is_found_can_run(gemm: Gemm, rows: int, device: Device) -> None:
    """Whatever the shape: an odd one, such as an intermediate_size of 1,100, gets the library."""
    config = lookup(H200, gemm, rows, device)
    assert not why_not(gemm, config, rows, device.has_tma, most_shared=device.shared_bytes)
    assert rows <= (STREAM_ROWS if config.kernel == "stream" else SKINNY_ROWS) or not config.is_skinny
    assert rows <= (INT4_ROWS if gemm.dtype in PACKED else TILE_ROWS) or config == LIBRARY
    assert config.parts == 1 or gemm.kind in SUMMED
    if gemm.dtype not in PACKED and gemm.k % (16 if gemm.dtype.startswith("float8") else 8):
        assert not config.is_our_kernel
    if config.kernel == "int4_whole":
        assert gemm.k >= 1024 * config.split_k, "programs that wait for each other have enough to multiply"
    if not device.has_tma:
        assert config.kernel != "tile"


@given(
    st.one_of(GEMMS, st.sampled_from(sorted(H200.entries))), st.integers(1, 20_000), st.sampled_from(KNOWN),
    st.sampled_from([None, Choice(128, 8, "bfloat16"), Choice(60, 4, FP8), Choice(8, 2, "float32", False)]),
)  # fmt: skip
def test_a_plan_is_the_same_up_to_the_end_of_its_range(
    gemm: Gemm, rows: int, device: Device, choice: Choice | None
) -> None:
    """So one is kept for a range, not for each number of rows that a step ever had."""
    x_dtype = gemm.dtype if gemm.dtype in ITEM_SIZES else "bfloat16"
    product = Product(*gemm[:4], x_dtype, Around("rms", "gate" if choice else "residual", True), choice=choice)
    rules = Rules(device, own_kernels=True, table=H200, tried={gemm: {rows % 9 + 1: LIBRARY}})
    end = next(end for end in row_ends((product,), rules) if rows <= end)
    assert launch(product, rows, rules) == launch(product, end, rules)
    layer = Planner(rules).layer((product,))
    assert layer[rows] == plan((product,), rows, rules)
    for more in range(rows, rows + 3000, 7):
        layer[more]
    assert len(layer) <= TILE_ROWS + len(row_ends((product,), rules)) + LAST_KEPT


def test_a_shape_that_nobody_measured_takes_the_nearest_ones_kernels() -> None:
    """With no more parts of K than it has steps, and registers that hold all of x."""
    near = Gemm("o", 5120, 5120, "bfloat16", True)
    assert not H200.measured(near)
    assert H200.serving(near) == (H200.measured(near._replace(n=4096, k=4096)), "nearest")
    assert lookup(H200, near, 8).kernel == "tile"
    limited, in_parts = GemmConfig("fma", 8, block_k=512, stages=2, max_registers=128), replace(OWN, split_k=4)
    table = GemmTable(("x",), {Gemm("o", 1024, 2048, "bfloat16", True): ((1, limited), (16, in_parts))})
    free = replace(limited, max_registers=0)
    assert table.serving(Gemm("o", 1024, 4096, "float16", True))[0] == ((1, free), (16, in_parts))
    assert table.serving(Gemm("o", 1024, 512, "bfloat16", True))[0] == ((1, limited), (16, replace(OWN, split_k=2)))
    other = Gemm("qkv", 1024, 4096, "bfloat16", True)
    assert table.serving(other) == GemmTable((), {}).serving(other), "the kinds are different"


def test_operations_of_one_kind_have_a_launch_each() -> None:
    """As a plugin's mixer may have them."""
    first, second = (Product("qkv", 6144, 4096, "bfloat16", around=Around(before)) for before in ("rms", "norm"))
    launches = plan((first, second), 1, Rules(KNOWN[0], own_kernels=True, table=H200)).launches
    assert [(each.config.is_skinny, each.norm) for each in launches] == [(True, True), (True, False)]


@pytest.mark.parametrize(
    ("name", "n", "k", "most"), [("qkv", 6144, 4096, 168), ("gate_up", 24576, 4096, 0), ("down", 4096, 12288, 128)]
)
def test_with_adapters_programs_still_run_at_once(name: str, n: int, k: int, most: int) -> None:
    """Those of few rows: registers for what adapters add would keep some of them waiting."""
    product, rules = Product(name, n, k, "bfloat16"), Rules(KNOWN[0], own_kernels=True, table=H200)
    plain, adapted = (launch(one, 1, rules).config for one in (product, product.adapted))
    assert adapted == replace(plain, max_registers=most) and plain.max_registers == 0


@pytest.mark.parametrize("is_static", [False, True])
def test_a_row_in_fp8_is_normed_inside_where_its_scale_is_its_own(is_static: bool) -> None:
    """With a scale of the checkpoint, norm and rounding are kernels of their own, and no report says otherwise."""
    product = Product("qkv", 6144, 4096, FP8, around=Around("rms"), has_static_inputs=is_static)
    found = launch(product, 1, Rules(KNOWN[0], own_kernels=True, table=H200))
    assert found.config.kernel == "stream" and found.norm is not is_static


def test_ranges_are_as_few_as_can_be() -> None:
    by_rows = [(1, OWN), (2, OWN), (4, LIBRARY), (8, OWN)]
    table = GemmTable(("x",), {Gemm("qkv", 512, 512, "bfloat16", True): ranges_of(by_rows)})
    assert len(ranges_of(by_rows)) == 3
    for rows, config in by_rows:
        assert lookup(table, Gemm("qkv", 512, 512, "bfloat16", True), rows) == config


ENTRY = {"kind": "o", "n": 512, "k": 512, "dtype": "bfloat16", "fused": True, "rows": [[16, {"kernel": "library"}]]}
TILES = {"kernel": "tile", "block_n": 64, "block_m": 16, "block_k": 128, "stages": 3}
SPOILT_CONFIGS: list[dict[str, object]] = [
    {"kernel": "tile"}, {"splits": 2}, {"kernel": "fma", "block_n": 8}, {"kernel": "split", "split_k": 7},
    {"num_warps": 0}, TILES | {"block_m": 0}, TILES | {"split_k": 0}, TILES | {"split_k": 2, "round_sums": True},
]  # fmt: skip
SPOILT_ENTRIES: list[dict[str, object]] = [
    {"kind": "other"}, {"n": -512}, {"rows": []}, {"rows": [[16, {}], [8, {}]]}, {"rows": [["16", {}]]},
    *({"rows": [[16, config]]} for config in SPOILT_CONFIGS),
]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        *(None, "", "{", "[]", "{}", '{"gemms": 3, "devices": []}', '{"gemms": [{}], "devices": []}'),
        *(json.dumps({"devices": ["x"], "gemms": [ENTRY | spoilt]}) for spoilt in SPOILT_ENTRIES),
    ],
)
def test_spoilt_files_are_refused_by_their_path(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "choices.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"kernel_choices='.*choices\.json'"):
        load(path)


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, done, failures = tmp_path / "choices.json", threading.Event(), []
    save(path, H200)

    def read() -> None:
        while not done.is_set():
            try:
                assert load(path) == H200
            except (ValueError, AssertionError) as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        save(path, H200)
    done.set()
    reader.join()
    assert not failures


@pytest.mark.gpu
def test_every_entry_multiplies_on_gpu() -> None:
    """All kernels of the table for bfloat16, on the shapes that they are for, against float32. (The fused
    forms have their tests in test_few_rows.py and test_tile_gemm.py.)"""
    for gemm, ranges in H200.entries.items():
        if gemm.dtype != "bfloat16":
            continue
        weight = torch.randn(gemm.n, gemm.k, device="cuda", dtype=torch.bfloat16) * gemm.k**-0.5
        for most, config in ranges:
            if why_not(gemm, config, tma=torch.cuda.get_device_capability() >= (9, 0)):
                continue
            for rows in {max(1, most - 3), most}:
                x = torch.randn(rows, gemm.k, device="cuda", dtype=torch.bfloat16)
                got, want = dense.linear(x, weight, config), x.float() @ weight.float().T
                got = got.sum(0) if config.parts > 1 else got.float()
                assert (got - want).norm() < 4e-3 * want.norm(), (gemm, rows, config)
