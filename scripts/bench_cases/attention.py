"""Decode attention: the engine's configuration, and those that it has for other batches, against plain PyTorch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from bench_cases.harness import Line, Point, Setup, compare
from nanovllm.kernels.attention.decode import DecodeAttention, DecodeScratch
from nanovllm.kernels.attention.decode_work_list import DecodeConfig, WorkList, tuning
from nanovllm.kernels.attention.reference import attention_reference
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.pointwise.kv_store import quantised_reference

BATCHES = ("1x576", "16xragged", "64xragged", "128xragged", "256xragged", "256x560")
SHORTEST, LONGEST = 100, 1800
MAX_MODEL_LEN = 4096


@dataclass
class Batch:
    """Rows over a paged cache, with several block tables so that no call reads what the call before it read."""

    q: torch.Tensor
    """[rows, Hq, D], a view into packed q, k and v, as the layers pass it."""
    k_cache: torch.Tensor
    """[blocks, Hkv, page, D], as v_cache."""
    v_cache: torch.Tensor
    kv_scales: torch.Tensor | None
    tables: list[torch.Tensor]
    """Each int32 [rows, pages]."""
    row_slot: torch.Tensor
    context_lens: torch.Tensor
    nbytes: int
    """Keys and values that one call reads."""

    @property
    def spec(self) -> AttentionSpec:
        head_dim = self.q.shape[-1]
        return AttentionSpec(self.q.shape[1], self.k_cache.shape[1], head_dim, head_dim**-0.5)


def attention(setup: Setup) -> Iterator[Line]:
    model, ranks = setup.model, setup.options.ranks
    kv_heads = max(1, model.num_key_value_heads // ranks)
    heads = model.num_attention_heads // ranks
    batches = setup.options.batches or (("2x20", "3xragged") if setup.dry else BATCHES)
    for text in batches:
        batch = make_batch(setup, text, heads, kv_heads, 16 if setup.dry else 128)
        yield compare(setup, make_point(setup, text, batch))


def make_batch(setup: Setup, text: str, heads: int, kv_heads: int, page: int) -> Batch:
    head_dim, host = setup.model.head_dim, torch.Generator().manual_seed(7)
    rows_text, keys = text.split("x")
    rows = int(rows_text)
    if keys == "ragged":
        longest = LONGEST // 16 if setup.dry else LONGEST
        lens = torch.randint(SHORTEST // 10 if setup.dry else SHORTEST, longest + 1, (rows,), generator=host).int()
    else:
        lens = torch.full((rows,), int(keys), dtype=torch.int32)
    fp8 = setup.options.kv_cache_dtype == "fp8"
    nbytes = 2 * int(lens.sum()) * kv_heads * (head_dim + 2 if fp8 else head_dim * setup.dtype.itemsize)
    pages, num_sets = -(-lens // page), setup.sets(nbytes)
    blocks = torch.randperm(num_sets * int(pages.sum()), generator=host).int()
    tables = []
    for of_set in blocks.chunk(num_sets):
        table = torch.zeros(rows, MAX_MODEL_LEN // page, dtype=torch.int32)
        table[torch.arange(table.shape[1]) < pages[:, None]] = of_set
        tables.append(table.to(setup.device))
    k_cache, v_cache = (setup.randn(len(blocks), kv_heads, page, head_dim, seed=seed) for seed in (1, 2))
    q = setup.randn(rows, heads + 2 * kv_heads, head_dim)[:, :heads]
    row_slot, kv_scales = torch.arange(rows, dtype=torch.int32, device=setup.device), None
    if fp8:
        (k_cache, k_scales), (v_cache, v_scales) = (quantised_reference(x) for x in (k_cache, v_cache))
        kv_scales = torch.stack((k_scales, v_scales), dim=-1)
        q = q if setup.dry else q.to(torch.float16)
    return Batch(q, k_cache, v_cache, kv_scales, tables, row_slot, lens.to(setup.device), nbytes)


def make_point(setup: Setup, text: str, batch: Batch) -> Point:
    heads, kv_heads = batch.q.shape[1], batch.k_cache.shape[1]
    classes = tuning(kv_heads, batch.q.shape[-1], batch.kv_scales is not None)
    chosen = next(config for most, config in classes if most is None or len(batch.q) <= most)
    configs = dict.fromkeys([chosen, *(config for _, config in classes)])
    contenders = {name_of(config): partial(attend, batch, prepared(setup, batch, config)) for config in configs}
    if setup.options.check_only:
        contenders = {"reference": partial(reference, batch), **contenders}
    spacer = torch.zeros(1024, device=setup.device)
    return Point(
        labels={"heads": f"{kv_heads}x{heads // kv_heads}", "batch": text},
        contenders=contenders,
        num_sets=len(batch.tables),
        limit_us=setup.limit_us(batch.nbytes),
        chosen=name_of(chosen),
        before=spacer.zero_,
    )


def prepared(setup: Setup, batch: Batch, config: DecodeConfig) -> DecodeAttention:
    """The kernel with the batch's work list, which the engine makes once a step."""
    rows, spec = len(batch.q), batch.spec
    work_list = WorkList(spec.num_kv_heads, spec.head_dim, None, rows, MAX_MODEL_LEN, setup.device, config=config)
    work_list.make(batch.row_slot, batch.context_lens, rows)
    scratch = DecodeScratch.for_specs({spec: work_list}, setup.device)
    return DecodeAttention(spec, batch.k_cache.shape[2], work_list, scratch)


def attend(batch: Batch, kernel: DecodeAttention, index: int) -> torch.Tensor:
    out = torch.empty(batch.q.shape, dtype=batch.q.dtype, device=batch.q.device)
    args = (batch.q, batch.k_cache, batch.v_cache, batch.tables[index], MAX_MODEL_LEN, out)
    return kernel(*args, kv_scales=batch.kv_scales)


def reference(batch: Batch, index: int) -> torch.Tensor:
    caches, table = (batch.k_cache, batch.v_cache), batch.tables[index]
    starts = torch.arange(len(batch.q) + 1)
    args = (batch.q, *caches, batch.row_slot, starts, batch.context_lens, table, batch.spec)
    return attention_reference(*args, kv_scales=batch.kv_scales)


def name_of(config: DecodeConfig) -> str:
    return f"{config.min_chunk}k-p{config.programs_per_sm}-n{config.block_n}-w{config.num_warps}-s{config.num_stages}"
