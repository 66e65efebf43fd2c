"""Whole layers whose kernels start before the one ahead has ended give the bits of ordinary launches: products of
weights in FP8, experts, attention behind rope, and sampling. A chain has three layers between two copies, which are
ordinary kernels and would hide a missing wait."""

from collections.abc import Callable

import pytest
import torch
from gemm_checks import check_pdl
from token_by_token import mixed

from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_work_list import WorkList
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.fp8 import gemm
from nanovllm.kernels.fp8.operands import FP8Weight
from nanovllm.kernels.fp8.reference import quantize_blocks
from nanovllm.kernels.gemm import fma, stream, tile
from nanovllm.kernels.moe.experts import ExpertActivation, expert_down, expert_gate_up
from nanovllm.kernels.moe.router import router_logits
from nanovllm.kernels.moe.routing import TopK, route
from nanovllm.kernels.plan.config import FP8, GemmConfig
from nanovllm.kernels.plan.rules import FEW_ROUTER, FEW_TOKENS, expert_tiles
from nanovllm.kernels.pointwise.embedding import embed_shard
from nanovllm.kernels.pointwise.kv_store import quantised_reference
from nanovllm.kernels.pointwise.norm import Norm, add_norms
from nanovllm.kernels.pointwise.rope import QKNormRope, qk_norm_rope_store
from nanovllm.kernels.sampling.gumbel import Draws, sample_tokens

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HIDDEN, WIDTH, EXPERTS = 1024, 2048, 8
ROW = GemmConfig("stream", 16, block_k=512, stages=4)
OPTIONS = TopK(EXPERTS, 2)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no dependent launch without a GPU")]
Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=make) / shape[-1] ** 0.5).to(DEVICE, torch.bfloat16)


def fp8(*shape: int, seed: int = 0) -> FP8Weight:
    made = [quantize_blocks(one) for one in rand(*shape, seed=seed).float().cpu().view(-1, *shape[-2:])]
    values, scale = (torch.stack(part).to(DEVICE) for part in zip(*made, strict=True))
    return FP8Weight(values, scale, 128) if len(shape) == 3 else FP8Weight(values[0], scale[0], 128)


def norm(width: int = HIDDEN) -> Norm:
    return Norm(torch.ones(width, device=DEVICE, dtype=torch.bfloat16), 1e-6)


def check(layer: Layer, rows: int) -> None:
    """layer(hidden, residual) changes the residual in place and returns the next hidden, which may be the residual."""

    def three(hidden: torch.Tensor, residual: torch.Tensor) -> None:
        x = hidden
        for _ in range(3):
            x = layer(x, residual)
        hidden.copy_(x)
        residual.mul_(0.5)  # or 90 layers would leave nothing of the last ones

    check_pdl(three, rand(rows, HIDDEN, seed=9) * HIDDEN**0.5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_row_in_fp8(fused: bool) -> None:
    """With norm, rounding, activation and residual inside; and, as with several ranks, after kernels of their own."""
    qkv, o = fp8(HIDDEN, HIDDEN, seed=1), fp8(HIDDEN, HIDDEN, seed=2)
    gate_up, down = fp8(2 * WIDTH, HIDDEN, seed=3), fp8(HIDDEN, WIDTH, seed=4)

    def inside(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual = stream.linear(stream.linear(residual, qkv, ROW, norm=norm()), o, ROW, residual=residual)
        h = stream.linear(residual, gate_up, ROW, norm=norm(), gated=True)
        return stream.linear(h, down, ROW, residual=residual)

    def outside(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        rows = add_norms(x, residual, norm(), rounds=True)[0]
        y = gemm.linear(gemm.linear(rows, qkv, ROW), o, ROW)
        rows = add_norms(y, residual, norm(), rounds=True)[0]
        return gemm.linear(gemm.linear(rows, gate_up, ROW, gated=True), down, ROW)

    check(inside if fused else outside, 1)


@pytest.mark.parametrize(
    ("rows", "tile", "pair", "summed"),
    [
        (8, GemmConfig("tile", 64, 16, 256, 4), GemmConfig("tile", 64, 16, 256, 3),
         GemmConfig("tile", 64, 16, 256, 4, 2)),
        (40, GemmConfig("roles", 64, 64, 128, 6), GemmConfig("roles", 128, 64, 128, 4),
         GemmConfig("roles", 64, 64, 128, 6, 2)),
        (100, GemmConfig("roles", 64, 128, 128, 6, num_warps=8), GemmConfig("roles", 128, 128, 128, 4,
         num_warps=8), GemmConfig("roles", 128, 128, 128, 6, 2, 8)),
    ],
)  # fmt: skip
def test_several_rows_in_fp8(rows: int, tile: GemmConfig, pair: GemmConfig, summed: GemmConfig) -> None:
    qkv, o = fp8(HIDDEN, HIDDEN, seed=1), fp8(HIDDEN, HIDDEN, seed=2)
    gate_up, down = fp8(2 * WIDTH, HIDDEN, seed=3), fp8(HIDDEN, WIDTH, seed=4)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed = add_norms(x, residual, norm(), rounds=True)[0]
        y = gemm.linear(gemm.linear(normed, qkv, tile), o, summed)
        normed = add_norms(y, residual, norm(), rounds=True)[0]  # type: ignore[arg-type]
        return gemm.linear(gemm.linear(normed, gate_up, pair, gated=True), down, summed)  # type: ignore[return-value]

    check(lambda x, residual: add_norms(layer(x, residual), residual, norm())[0], rows)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("rows", [2, 16, 200])
def test_experts(rows: int, in_fp8: bool) -> None:
    router = rand(EXPERTS, HIDDEN, seed=5) * 8
    weight = fp8 if in_fp8 else rand
    gate_up, down = weight(EXPERTS, 2 * WIDTH, HIDDEN, seed=6), weight(EXPERTS, HIDDEN, WIDTH, seed=7)
    router_tiles = GemmConfig("tile", 16, 16 if rows <= 16 else 64, 128, 4, split_k=4)
    first, second = expert_tiles(rows * OPTIONS.top_k, EXPERTS, FP8 if in_fp8 else "bfloat16")

    def few(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        logits = fma.linear(residual, router, FEW_ROUTER, norm=norm(), out_dtype=torch.float32)
        return mixed(residual, logits, OPTIONS, gate_up, down, norm())

    def many(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        routing = route(router_logits(x, router, router_tiles), OPTIONS, second.block_m)
        h = expert_gate_up(x, gate_up, routing, first, ExpertActivation())
        parts = expert_down(h, down, routing, second, torch.float32)
        return add_norms(parts, residual, norm())[0]

    check(few if rows <= FEW_TOKENS else many, rows)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_attention_behind_rope(rows: int, in_fp8: bool) -> None:
    """Rows of several chunks, which are merged, and in each layer a key and a value that the layer before wrote."""
    heads, kv_heads, dim, page, context = 8, 2, 128, 128, 700
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    work_list = WorkList(kv_heads, dim, None, rows, 1024, DEVICE, fp8=in_fp8)
    attention = DecodeAttention(spec, page, work_list, DecodeScratch.for_specs({spec: work_list}, DEVICE))
    how = QKNormRope(heads, kv_heads, dim, rotary_dim=dim)
    cos_sin = torch.rand(1024, dim, device=DEVICE)
    blocks = -(-context // page)
    table = torch.arange(rows * blocks, dtype=torch.int32, device=DEVICE).view(rows, blocks)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=DEVICE)
    slots = table[:, -1] * page + (context - 1) % page
    k, v = (rand(rows * blocks, kv_heads, page, dim, seed=seed) * dim**0.5 for seed in (1, 2))
    scales = None
    if in_fp8:
        (k, k_scales), (v, v_scales) = quantised_reference(k), quantised_reference(v)
        scales = torch.stack((k_scales, v_scales), dim=-1)
    work_list.make(torch.arange(rows, dtype=torch.int32, device=DEVICE), lengths, rows)
    qkv, o = rand((heads + 2 * kv_heads) * dim, HIDDEN, seed=3), rand(HIDDEN, heads * dim, seed=4)
    config = GemmConfig("fma", 8, block_k=512, stages=2)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        mixed = fma.linear(residual, qkv, config, norm=norm())
        args = (lengths - 1, slots, k, v)
        q = qk_norm_rope_store(mixed, how, *args, cos_sin=cos_sin, kv_scales=scales)
        out = torch.empty(rows, heads, dim, dtype=mixed.dtype, device=DEVICE)
        attention(q, k, v, table, 1024, out, kv_scales=scales)
        return fma.linear(out.view(rows, -1), o, config, residual=residual)

    check(layer, rows)


@pytest.mark.parametrize("rows", [1, 16])
def test_sampling_behind_the_head(rows: int) -> None:
    """A layer is a token: norm, head, draw, and the row of the embedding for the next."""
    vocab = 5000
    table = rand(vocab, HIDDEN, seed=1)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    seeds = torch.arange(rows, dtype=torch.int64, device=DEVICE)
    draws = Draws(slots, torch.ones(rows, device=DEVICE), seeds, slots)
    last = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    config = GemmConfig("tile", 64, 16, 256, 4)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed = add_norms(x, residual, norm())[0]
        tokens = sample_tokens(tile.linear(normed, table, config), draws, vocab, last)
        return embed_shard(tokens, table, 0, vocab)

    check(layer, rows)
