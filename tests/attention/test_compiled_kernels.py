"""Attention kernels compiled for several compute capabilities, which takes no GPU: they fit, and keep to registers on
the one that they are tuned for."""

import pytest
import torch
from compiling import SHARED_BYTES, compile_only, run_alone

pytest.importorskip("triton")

from nanovllm.attention.triton_backend import FixedOrderTritonBackend
from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_work_list import WorkList
from nanovllm.kernels.attention.fixed_order_work_list import FixedOrderWorkList
from nanovllm.kernels.attention.prefill import PrefillAttention, fixed_order_config, prefill_config
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.attention.widened import WidenedPages, copy_room
from nanovllm.kernels.latent.decode import LatentDecode, LatentWorkList
from nanovllm.kernels.latent.prefill import LatentPrefill, latent_prefill_config
from nanovllm.kernels.latent.store import latent_rope_store
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.pointwise.norm import Norm

CPU = torch.device("cpu")


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def compile_attention(
    shape: tuple[object, ...], fp8: bool, capability: int = 90, dtype: str = "bfloat16", mixed: bool = False
) -> None:
    """shape: arguments of an AttentionSpec. mixed: see KVCache."""

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype))

    Device.of = lambda _: Device("", divmod(capability, 10))
    names = ("prefill_attention_kernel",) if fp8 else ()
    compile_only(most_spilled=256 if capability == 90 else None, capability=capability, overlapping=names)
    spec, rows, page, slots = AttentionSpec(*shape), 8, 128, 32
    q = made(rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)[:, : spec.num_heads]
    cache, scales = made(4, spec.num_kv_heads, page, spec.head_dim), None
    if fp8:
        q, cache, scales = q.half(), cache.to(torch.float8_e4m3fn), made(4, spec.num_kv_heads, page, 2)
    out, table, sinks = made(*q.shape), zeros(slots, 32), made(spec.num_heads) if spec.has_sinks else None
    kind = (spec.num_kv_heads, spec.head_dim, spec.window)
    for places in (1, 4, 8):
        together = WorkList.places_together(places, spec.group_size, spec.head_dim, fp8)
        work_list = WorkList(*kind, slots, 4096, CPU, fp8=fp8, places=places, together=together)
        work_list.make(zeros(rows), zeros(rows), rows)
        decode_rows = DecodeAttention(spec, page, work_list, DecodeScratch.for_specs({spec: work_list}, CPU))
        for rounds in {False, spec.head_dim == 128}:
            decode_rows(q, cache, cache, table, 4096, out, sinks, kv_scales=scales, rounds=rounds, mixed=mixed)
    config = prefill_config(spec.head_dim, q.dtype, fp8, SHARED_BYTES[capability])
    attention = PrefillAttention(spec, page, slots, CPU, config)
    tiles = attention.list_tiles(zeros(3), zeros(2), rows)
    attention(q, cache, cache, table, zeros(2), zeros(3), zeros(2), tiles, out, sinks, scales, mixed)
    room = copy_room([spec], page, slots, 4096, q.dtype, Device.of(CPU))
    if fp8 and room[0]:
        widened = WidenedPages([spec], page, slots, CPU, *room)
        of_rows = widened.list_rows(zeros(2), zeros(3), zeros(2), (table,), rows, None)
        widened(q, cache, cache, scales, of_rows, 0, zeros(3), zeros(2), out, spec, sinks)
    if fp8 or capability != 90 or spec.head_dim > FixedOrderTritonBackend.widest:
        return
    for rows, places in ((1, 1), (16, 1), (32, 1), (48, 1), (64, 1), (16, 4), (64, 4)):
        together = FixedOrderWorkList.places_together(places, spec.group_size, spec.head_dim)
        work_list = FixedOrderWorkList(*kind, 64, 4096, CPU, places=places, together=together)
        scratch = DecodeScratch.for_specs({spec: work_list}, CPU)
        q = made(rows, spec.num_heads, spec.head_dim)
        work_list.make(zeros(rows), zeros(rows), rows)
        DecodeAttention(spec, page, work_list, scratch)(q, cache, cache, zeros(64, 32), 4096, made(*q.shape), sinks)
    attention = PrefillAttention(spec, page, slots, CPU, fixed_order_config(spec.head_dim))
    tiles = attention.list_tiles(zeros(3), zeros(2), rows)
    attention(q, cache, cache, table, zeros(2), zeros(3), zeros(2), tiles, q, sinks)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [
    (16, 8, 128, 0.1), (32, 32, 96, 0.1), (3, 1, 64, 0.1, 128, None, True), (8, 4, 256, 0.1, 4096, 50.0),
    (16, 8, 192, 0.1), (8, 1, 512, 1.0)])
@pytest.mark.parametrize("fp8", [False, True])
def test_kernels_fit_a_multiprocessor(spec: tuple[object, ...], fp8: bool) -> None:
    run_alone(compile_attention, spec, fp8)


def compile_latents(num_heads: int, capability: int, dtype: str) -> None:
    """Attention of so many heads over latents of 512 and rope keys of 64."""
    Device.of = lambda _: Device("", divmod(capability, 10), shared_bytes=SHARED_BYTES[capability])
    compile_only(most_spilled=80 if (capability, dtype) == (90, "bfloat16") else None, capability=capability)
    spec, slots = AttentionSpec(num_heads, 1, 576, 0.1, value_dim=512), 256
    cache = torch.empty(4, 1, 128, 576, dtype=getattr(torch, dtype))
    for places in (1, 2):
        together = LatentWorkList.places_together(places, num_heads, 576)
        work_list = LatentWorkList(1, 576, None, slots, 1 << 17, CPU, places=places, together=together)
        decode = LatentDecode(spec, 128, work_list, DecodeScratch.for_specs({spec: work_list}, CPU))
        for rows in work_list.size_classes():
            q = torch.empty(rows, num_heads, 576, dtype=cache.dtype)
            work_list.make(zeros(rows), zeros(rows), rows)
            decode(q, cache, zeros(slots, 1024), 1 << 17, q[..., :512].clone())
    norm, cos_sin = Norm(torch.empty(512, dtype=cache.dtype), 1e-6), torch.empty(4096, 64)
    for interleaved in (False, True):
        pages, slots_of = cache[:, 0], zeros(slots)
        latent_rope_store(q[..., :256], q[:, 0], norm, slots_of, cos_sin, slots_of, pages, q, interleaved)
    config = latent_prefill_config(cache.dtype, SHARED_BYTES[capability])
    prefill = LatentPrefill(spec, 128, slots, CPU, config)
    tiles = prefill.list_tiles(zeros(3), zeros(2), 8)
    prefill.attend(q, cache, zeros(slots, 1024), zeros(2), zeros(3), zeros(2), tiles, q[..., :512].clone())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90, 120])
@pytest.mark.parametrize("num_heads", [16, 20, 128])
def test_latents_fit_a_multiprocessor(num_heads: int, capability: int) -> None:
    for dtype in ("bfloat16", "float32") if num_heads == 20 else ("bfloat16",):
        run_alone(compile_latents, num_heads, capability, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 120])
def test_the_widest_heads_fit_a_multiprocessor_of_every_kind(capability: int) -> None:
    for spec in ((8, 4, 256, 0.1), (16, 8, 192, 0.1, 4096, 50.0), (8, 1, 512, 1.0)):
        for fp8, dtype in ((False, "bfloat16"), (False, "float32"), (True, "bfloat16")):
            run_alone(compile_attention, spec, fp8, capability, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("spec", [(16, 8, 256, 1.0, 1024), (8, 1, 512, 1.0)])
def test_blocks_that_are_cut_otherwise_elsewhere_fit_a_multiprocessor(
    spec: tuple[object, ...], capability: int
) -> None:
    for fp8 in (False, True):
        run_alone(compile_attention, spec, fp8, capability, "bfloat16", True)
