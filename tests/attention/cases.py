"""Random steps over a paged cache, with everything in it that a kernel must not touch or must survive."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from nanovllm.attention import AttentionMetadata, AttentionSetup, AttentionSpec, KVCache
from nanovllm.kernels.attention.reference import attention_reference
from nanovllm.kernels.pointwise.kv_store import quantised_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
TOLERANCE = 1e-2 if DEVICE == "cuda" else 2e-6

FEATURES: list[tuple[int, tuple[int, int], dict[str, Any]]] = [
    (8, (3, 1), {}),
    (72, (7, 1), {"window": 100}),
    (80, (16, 1), {"softcap": 5.0}),
    (96, (6, 2), {"has_sinks": True, "block_size": 64}),
    (192, (4, 4), {"window": 7}),
    (32, (4, 2), {"window": 140, "has_sinks": True, "block_size": 48}),
    (256, (3, 1), {"window": 40, "softcap": 20.0, "has_sinks": True, "block_size": 64}),
    (512, (4, 1), {"block_size": 64}),
]
"""Heads' dimension, queries' and keys' heads, what else: windows shorter than a tile, than a chunk of decoded keys and
than some rows, odd groups, odd sizes."""


@dataclass
class Case:
    """One step: q and its caches, the rows' metadata, and what attention comes to in float64 (NaN for padding)."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata
    expected: torch.Tensor
    spec: AttentionSpec
    sinks: torch.Tensor | None
    kv_scales: torch.Tensor | None = None

    @property
    def cache(self) -> KVCache:
        return KVCache(self.k_cache, self.v_cache, self.kv_scales, mixed=self.is_mixed)

    @property
    def is_mixed(self) -> bool:
        """Whether other layers cut a block otherwise: where layers with windows are a group, all of a block lies
        together, see block_by_block."""
        return self.spec.window is not None

    def reference(self) -> torch.Tensor:
        """The plain twin's attention in float64, as this case's rows and caches are now."""
        m = self.metadata
        return attention_reference(self.q.double(), self.k_cache, self.v_cache, m.row_slot, m.cu_seqlens_q,
                                   m.context_lens, m.block_tables[0], self.spec, self.sinks, self.kv_scales)

    def error_of(self, out: torch.Tensor) -> float:
        """Relative error over the tokens of real rows; infinite if one is missing or a padding token is written."""
        real = ~self.expected.isnan().flatten(1).any(1)
        if not bool(out[real].isfinite().all()) or not bool(out[~real].isnan().all()):
            return float("inf")
        difference = out[real].double() - self.expected[real]
        return float(difference.norm() / self.expected[real].norm())


def setup_of(case: Case, more: tuple[AttentionSpec, ...] = ()) -> AttentionSetup:
    """Setup of a backend that serves this case, and layers of `more` kinds."""
    (slots, max_blocks), block_size = case.metadata.block_tables[0].shape, case.k_cache.shape[2]
    specs = tuple(dict.fromkeys((case.spec, *more)))
    types = (torch.device(DEVICE), DTYPE, None if case.kv_scales is None else case.k_cache.dtype)
    return AttentionSetup(specs, block_size, *types, slots, max_blocks * block_size)


def make_case(query_lens: list[int], context_lens: list[int], num_decode_rows: int, *, num_q_heads: int,
              num_kv_heads: int, head_dim: int = 32, block_size: int = 16, seed: int = 0, padding_tokens: int = 0,
              max_num_seqs: int | None = None, spare_blocks: int = 2, window: int | None = None,
              softcap: float | None = None, has_sinks: bool = False, fp8: bool = False) -> Case:
    """A row of context length 0 is padding. Slots and pages are permuted, blocks that no row owns hold NaN, owned
    blocks hold large numbers past their row's end, and unused entries of the table name a NaN block. fp8: keys and
    values are e4m3, of very different sizes; no value is NaN."""
    scale = head_dim**-0.5 * (4 if softcap else 1)  # large scores: a cap must show
    spec = AttentionSpec(num_q_heads, num_kv_heads, head_dim, scale, window, softcap, has_sinks)
    rng = torch.Generator().manual_seed(seed)
    num_rows = len(query_lens)
    max_num_seqs = max_num_seqs or num_rows + 2
    max_blocks = -(-max(context_lens) // block_size) + spare_blocks
    counts = [-(-n // block_size) for n in context_lens]
    order = torch.randperm(sum(counts) + 3, generator=rng)
    shape = (len(order), num_kv_heads, block_size, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=torch.float64) for _ in range(2))
    table = torch.full((max_num_seqs, max_blocks), int(order[-1]), dtype=torch.int32)
    row_slot = torch.randperm(max_num_seqs, generator=rng)[:num_rows].int()
    used = 0
    for row, (count, context) in enumerate(zip(counts, context_lens, strict=True)):
        if context == 0:
            row_slot[row] = -1
            continue
        blocks = order[used : used + count]
        used += count
        table[row_slot[row], :count] = blocks.int()
        for cache in (k, v):
            cache[blocks] = torch.randn(count, *shape[1:], generator=rng, dtype=torch.float64)
            cache[blocks[-1], :, context - (count - 1) * block_size :] *= 1e3
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = int(starts[-1]) + padding_tokens
    # The layers pass a view into the packed projections.
    qkv = torch.randn(tokens, num_q_heads + 2 * num_kv_heads, head_dim, generator=rng, dtype=torch.float64)
    scales = None
    if fp8:
        sizes = 10 ** (torch.rand(2, *shape[:3], 1, generator=rng) * 4 - 3)
        k8, k_scales = quantised_reference(k * sizes[0] ** 0.2)
        v8, v_scales = quantised_reference(v.nan_to_num(1e4) * sizes[1])
        scales = torch.stack((k_scales, v_scales), dim=-1)
        k, v = (x.double() * scale[..., None].double() for x, scale in ((k8, k_scales), (v8, v_scales)))
    else:
        k, v = k.to(DTYPE), v.to(DTYPE)
    qkv = qkv.to(torch.float16 if fp8 and torch.bfloat16 == DTYPE else DTYPE)
    sinks = torch.randn(num_q_heads, generator=rng).to(DTYPE) if has_sinks else None
    expected = _attention(qkv[:, :num_q_heads], k, v, starts.tolist(), context_lens, table, row_slot, spec, sinks)
    metadata = AttentionMetadata(
        num_rows=num_rows, num_decode_rows=num_decode_rows, row_slot=row_slot.to(DEVICE),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=DEVICE), cu_seqlens_q=starts.to(DEVICE),
        block_tables=(table.to(DEVICE),), max_seqlen_q=max(query_lens), max_context_len=max_blocks * block_size,
        num_tokens=tokens)
    sinks = None if sinks is None else sinks.to(DEVICE)
    q = qkv.to(DEVICE)[:, :num_q_heads]
    if scales is not None:
        k, v = k8, v8
    cache = [None if part is None else part.to(DEVICE) for part in (k, v, scales)]
    if window is not None:  # where layers with windows are a group, all that is of a block lies together
        cache = block_by_block(cache)
        _spoil(cache[1:], context_lens, table[row_slot], block_size)
    return Case(q, cache[0], cache[1], metadata, expected.to(DEVICE), spec, sinks, cache[2])


def _spoil(parts: list[Any], context_lens: list[int], blocks: torch.Tensor, block_size: int) -> None:
    """Puts NaN behind the values of each row, which may be what keys of other layers were, whose rows have ended."""
    for context, own in zip(context_lens, blocks, strict=True):
        for part in parts if context % block_size else ():
            if part is not None:
                part[own[context // block_size], :, context % block_size :] = float("nan")


def block_by_block(parts: list[torch.Tensor | None]) -> list[Any]:
    """Tensors [blocks, ..] as views of memory in which each block's parts follow each other."""
    there = [part for part in parts if part is not None]
    sizes = [part[0].nbytes for part in there]
    memory = torch.zeros(len(there[0]), sum(sizes), dtype=torch.uint8, device=there[0].device)
    views = [each.view(part.dtype).unflatten(1, part.shape[1:]).copy_(part)
             for each, part in zip(memory.split(sizes, 1), there, strict=True)]
    return [None if part is None else views.pop(0) for part in parts]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], context_lens: list[int],
               table: torch.Tensor, row_slot: torch.Tensor, spec: AttentionSpec,
               sinks: torch.Tensor | None) -> torch.Tensor:
    """Token by token and head by head from the definition, in float64; NaN where there is no row."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64)
    block_size, group = k.shape[2], q.shape[1] // k.shape[1]
    for row, context in enumerate(context_lens):
        count = starts[row + 1] - starts[row]
        if context == 0 or count == 0:
            continue
        blocks = table[row_slot[row], : -(-context // block_size)].long()
        keys, values = (x[blocks].transpose(0, 1).flatten(1, 2).double() for x in (k, v))
        for i in range(count):
            end = context - count + 1 + i
            visible = slice(max(0, end - spec.window) if spec.window else 0, end)
            for head in range(q.shape[1]):
                scores = keys[head // group, visible] @ q[starts[row] + i, head].double() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * (scores / spec.softcap).tanh()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                shares = scores.softmax(0)[: end - visible.start]
                out[starts[row] + i, head] = shares @ values[head // group, visible]
    return out


def make_places_case(counts: list[int], context_lens: list[int], places: int, **options: Any) -> Case:
    """A step of decodes with `places` rows each, of which the first counts[d] are tokens of the sequence, the last one
    seeing context_lens[d] keys, and the others padding."""
    rows = [decode * places + place for decode, count in enumerate(counts) for place in range(count)]
    num_rows = len(counts) * places
    case = make_case(counts, context_lens, 0, max_num_seqs=num_rows + 2, **options)
    m, row_slot, lens = case.metadata, torch.full((num_rows,), -1).int(), torch.zeros(num_rows).int()
    row_slot[rows] = m.row_slot.cpu().repeat_interleave(torch.tensor(counts))
    ends = [c - n + i for n, c in zip(counts, context_lens, strict=True) for i in range(1, n + 1)]
    lens[rows] = torch.tensor(ends).int()
    metadata = replace(
        m, num_rows=num_rows, num_decode_rows=num_rows, row_slot=row_slot.to(DEVICE), context_lens=lens.to(DEVICE),
        cu_seqlens_q=torch.arange(num_rows + 1, device=DEVICE).int(), num_tokens=num_rows)

    def spread(x: torch.Tensor) -> torch.Tensor:
        return x.new_full((num_rows, *x.shape[1:]), float("nan")).index_copy(0, torch.tensor(rows, device=DEVICE), x)

    return replace(case, q=spread(case.q), expected=spread(case.expected), metadata=metadata)


Items = list[tuple[int, int, int, int, int, int]]


def items_of(work: torch.Tensor, count: torch.Tensor) -> Items:
    """Entries of a work list of decode attention: (row, key head, first key, end, chunk, chunks of its row)."""
    return [(a & 0xFFFF, a >> 16, start, end, c & 0xFFFF, c >> 16) for a, start, end, c in work[: int(count)].tolist()]


def rows_of_any_length(longest: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots, of 40, and lengths of 37 rows; one is padding."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (37,), generator=rng).int()
    slots = torch.randperm(40, generator=rng)[:37].int()
    slots[3] = -1
    return slots, lengths


def nan_like(q: torch.Tensor) -> torch.Tensor:
    """An output to write into, poisoned."""
    return torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)
