"""Attention kernels compiled for several compute capabilities, which takes no GPU: they fit, and keep to registers on
the one that they are tuned for."""

import pytest
from compiling import run_alone

pytest.importorskip("triton")

COMPILE = """
import sys
import torch
from compiling import SHARED_BYTES, compile_only
from nanovllm.kernels.attention import decode, prefill
from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_plan import DecodePlan
from nanovllm.kernels.attention.fixed_order_plan import FixedOrderPlan
from nanovllm.kernels.attention.prefill import PrefillAttention, fixed_order_config, prefill_config
from nanovllm.kernels.attention.spec import AttentionSpec

capability, dtype = int(sys.argv[3]), getattr(torch, sys.argv[4])
decode.supports_tma = prefill.supports_tma = lambda device: capability // 10 in (9, 10)
compile_only(most_spilled=256 if capability == 90 else None, capability=capability)
cpu, rows, page, slots = torch.device("cpu"), 8, 128, 32
spec, fp8 = AttentionSpec(*eval(sys.argv[1])), sys.argv[2] == "fp8"
def bf16(*shape):
    return torch.empty(shape, dtype=dtype)
def zeros(*shape):
    return torch.zeros(shape, dtype=torch.int32)
q = bf16(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)[:, : spec.num_heads]
cache = bf16(4, spec.num_kv_heads, page, spec.head_dim)
scales = None
if fp8:
    q, cache, scales = q.half(), cache.to(torch.float8_e4m3fn), bf16(4, spec.num_kv_heads, page, 2)
out, table, sinks = bf16(*q.shape), zeros(slots, 32), bf16(spec.num_heads) if spec.has_sinks else None
plan = DecodePlan(spec.num_kv_heads, spec.head_dim, spec.window, slots, 4096, cpu, fp8=fp8)
plan.make(zeros(rows), zeros(rows), rows)
scratch = DecodeScratch.for_specs({spec: plan}, cpu)
DecodeAttention(spec, page, plan, scratch)(q, cache, cache, table, 4096, out, sinks, kv_scales=scales)
config = prefill_config(spec.head_dim, q.dtype, fp8, SHARED_BYTES[capability])
attention = PrefillAttention(spec, page, slots, cpu, config)
tiles = attention.plan(zeros(3), zeros(2), rows)
attention(q, cache, cache, table, zeros(2), zeros(3), zeros(2), tiles, out, sinks, scales)
if not fp8 and capability == 90:
    plan = FixedOrderPlan(spec.num_kv_heads, spec.head_dim, spec.window, 64, 4096, cpu)
    scratch = DecodeScratch.for_specs({spec: plan}, cpu)
    for rows in (1, 16, 32, 48, 64):
        q = bf16(rows, spec.num_heads, spec.head_dim)
        plan.make(zeros(rows), zeros(rows), rows)
        DecodeAttention(spec, page, plan, scratch)(q, cache, cache, zeros(64, 32), 4096, bf16(*q.shape), sinks)
    attention = PrefillAttention(spec, page, slots, cpu, fixed_order_config(spec.head_dim, q.dtype))
    attention(q, cache, cache, table, zeros(2), zeros(3), zeros(2), attention.plan(zeros(3), zeros(2), rows), q, sinks)
"""


@pytest.mark.slow
@pytest.mark.parametrize("spec", [
    (16, 8, 128, 0.1), (32, 32, 96, 0.1), (3, 1, 64, 0.1, 128, None, True), (8, 4, 256, 0.1, 4096, 50.0),
    (16, 8, 192, 0.1)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_kernels_fit_a_multiprocessor(spec: tuple[object, ...], kv_cache_dtype: str) -> None:
    run_alone(COMPILE, repr(spec), kv_cache_dtype, "90", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 120])
def test_the_widest_heads_fit_a_multiprocessor_of_every_kind(capability: int) -> None:
    for spec in ((8, 4, 256, 0.1), (16, 8, 192, 0.1, 4096, 50.0)):
        for dtype in ("bfloat16", "float32"):
            run_alone(COMPILE, repr(spec), "auto", str(capability), dtype)
        run_alone(COMPILE, repr(spec), "fp8", str(capability), "bfloat16")
