#!/usr/bin/env python3
"""Layers in halves, whose sums are moved by the copy engines beside the other half's work: checks them, times them.

    python scripts/bench_overlap.py --world 4 --model Qwen3-32B --out logs/
    python scripts/bench_overlap.py --world 2 --model Qwen3-8B --out logs/

Checks first that layers in halves give the results of whole layers up to rounding, the same bits on all ranks and in
every eager and captured run, ranks delayed at random; that whole steps may come in between; and that a wait without
peers ends when it is told to. Then, us:

- the sum of half a step, with residual and norm: by copies, by programs of its kernel; by the two-shot kernel;
- a layer, attention of prompts of --prompt tokens included: whole, and in halves, by programs.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_ranks import EPS, MAX_SPINS, Rank, capture, check_abort, launch, rank_parser, time_call  # isort: skip  # it forbids multicast

import numpy as np
import torch

from nanovllm.attention.base import AttentionMetadata
from nanovllm.attention.triton_backend import TritonBackend
from nanovllm.kernels import select_kernels
from nanovllm.layers.attention import ForwardStep
from nanovllm.layers.linear import HeadSplit
from nanovllm.layers.rotary import cos_sin_table
from nanovllm.model_config import ModelConfig
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.qwen3 import HalfSteps, ModelContext, Qwen3DecoderLayer
from nanovllm.models.registry import parse_config
from nanovllm.parallel.peer.all_reduce import PeerAllReduce
from nanovllm.parallel.peer.copy_engine import CopyEngineSums
from nanovllm.parallel.two_batch import Overlap

LAYERS, CALLS, RUNS = 4, 8, 36
PROGRAMS = (32, 64, 128, 256, 1024)
BLOCK_SIZE, DECODES, DECODE_CONTEXT = 256, 9, 300


class Layer:
    """One decoder layer of the model over and over, on a step of `tokens` tokens: some decodes, then prompts."""

    def __init__(self, rank: Rank, peer: PeerAllReduce, sums: CopyEngineSums, config: ModelConfig, tokens: int) -> None:
        self.rank, self.peer, self.sums, self.overlap = rank, peer, sums, Overlap(rank.device)
        self.usable = False
        self.overlap.sums = sums
        fields: Any = {"rank": rank.rank, "size": rank.world, "device": rank.device, "overlap": self.overlap}
        group = cast(Any, SimpleNamespace(**fields, fused_all_reduce=lambda rows: peer))
        heads = HeadSplit(config.num_attention_heads, config.num_key_value_heads, rank.rank, rank.world)
        generator, same = (torch.Generator(rank.device).manual_seed(seed) for seed in (rank.rank, 99))
        counts = [1] * DECODES
        while left := tokens - sum(counts):
            counts.append(min(left, rank.options.prompt))
        max_len = max(rank.options.prompt, DECODE_CONTEXT)
        sizes = (heads.local_heads, heads.local_kv_heads, config.head_dim)
        backend = TritonBackend(*sizes, BLOCK_SIZE, len(counts), max_len, rank.device, torch.bfloat16)
        kernels = select_kernels(rank.device)
        context = ModelContext(config, heads, group, kernels, backend, torch.bfloat16, rank.device, max_len)
        rope, longest = config.ropes["full_attention"], config.max_position_embeddings
        table = cos_sin_table(rope, config.head_dim, max_len, longest, rank.device)
        self.layer = Qwen3DecoderLayer(context, table)
        for parameter in self.layer.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.02, generator=same)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        blocks = -(-max_len // BLOCK_SIZE)
        cache = (2, len(counts) * blocks, heads.local_kv_heads, BLOCK_SIZE, config.head_dim)
        attention = self.layer.self_attn
        attention.k_cache, attention.v_cache = torch.zeros(cache, dtype=torch.bfloat16, device=rank.device)
        self.step = step_of(counts, blocks, max_len, rank.device)
        self.embedded = torch.randn(tokens, config.hidden_size, device=rank.device, generator=generator).bfloat16()
        cut = self.overlap.cut(tokens, DECODES)
        assert cut is not None
        self.cut, self.prepared = cut, self.step.halves(cut)

    def whole(self) -> torch.Tensor:
        partial, residual = self.embedded.clone(), None
        for _ in range(LAYERS):
            partial, residual = self.layer(partial, residual, self.step)
        return self.layer.input_layernorm(partial, residual)[0]

    def halves(self, steps: HalfSteps | None = None) -> torch.Tensor:
        steps = steps or self.step.halves(self.cut)
        norm, partial = self.layer.input_layernorm, self.embedded.clone()
        halves = norm.start(partial[: self.cut], None, 0), norm.start(partial[self.cut :], None, 1)
        for _ in range(LAYERS):
            halves = self.layer.forward_in_halves(halves, steps, norm)
        return torch.cat([half.wait()[0] for half in halves])


def step_of(counts: list[int], blocks: int, max_len: int, device: torch.device) -> ForwardStep:
    """Rows of so many tokens, of `blocks` cache blocks each; the first DECODES have a context, the others begin."""
    contexts = np.array([DECODE_CONTEXT] * DECODES + counts[DECODES:])
    positions = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, contexts, strict=True)])
    slots = positions + np.repeat(np.arange(len(counts)), counts) * blocks * BLOCK_SIZE

    def on_device(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    ends = np.cumsum(counts)
    table = np.arange(len(counts) * blocks).reshape(len(counts), blocks)
    rows = (on_device(np.arange(len(counts))), on_device(contexts), on_device([0, *ends]), on_device(table))
    metadata = AttentionMetadata(len(counts), DECODES, *rows, max(counts), max_len, num_tokens=len(positions))
    return ForwardStep(on_device(positions), on_device(slots), metadata)


def check(rank: Rank, layer: Layer) -> bool:
    """In halves as whole, up to rounding; and the same bits again and again, whatever memory each run is given."""
    whole, first = layer.whole(), layer.halves()
    torch.cuda.synchronize()
    difference = (first.float() - whole.float()).square().mean() / whole.float().square().mean()
    error = difference.sqrt().item()
    rank.say(f"{layer.step.positions.shape[0]} tokens, cut at {layer.cut}: error {error:.5f}")
    captured: list[torch.Tensor] = []
    graph = capture(lambda: captured.append(layer.halves()))
    rank.say("captured")
    different, delays, clutter = 0, random.Random(rank.rank), []
    for turn in range(RUNS):
        torch.cuda._sleep(delays.choice((0, 1_000, 100_000, 1_000_000)))
        if turn % 5 == 4:
            different += int((layer.whole().view(torch.int16) != whole.view(torch.int16)).sum().item())
        if turn % 3 == 2:
            graph.replay()
        again = captured[0] if turn % 3 == 2 else layer.halves()
        different += int((again.view(torch.int16) != first.view(torch.int16)).sum().item())
        clutter = [*clutter[-3:], torch.full_like(first[: 20 * (turn + 1)], float("nan"))]  # other blocks next time
    layer.usable = rank.all_agree(error < 0.05 and layer.peer.memory.aborted() == 0)
    fine = rank.same_bits(first) and layer.usable and different == 0
    if not fine:
        print(f"rank {rank.rank}: relative error {error:.4f}, {different} elements differ between runs", flush=True)
    fine = rank.all_agree(fine)
    rank.say(f"{LAYERS} layers in halves, {RUNS} more runs:", "right" if fine else "WRONG")
    return fine


def sum_once(rank: Rank, sums: CopyEngineSums, hidden: int) -> None:
    partial_sum = torch.zeros(1024, hidden, device=rank.device, dtype=torch.bfloat16)
    sums.start(0, partial_sum, None, sums.empty_residual(partial_sum), partial_sum[0], EPS)
    sums.finish(0, 1024)


def time_layer(rank: Rank, layer: Layer, say: Callable[[str], None]) -> None:
    peer, sums, rows = layer.peer, layer.sums, layer.cut
    x, residual = (torch.randn(rows, layer.embedded.shape[1], device=rank.device).bfloat16() for _ in range(2))
    gain, kept = torch.ones_like(x[0]), sums.empty_residual(residual).zero_()

    def by_copies() -> None:
        sums.start(0, x, kept, kept, gain, EPS)
        sums.finish(0, rows)

    def by_programs(call: Callable[[], object], calls: int) -> list[float]:
        times, usual = [], CopyEngineSums.programs
        for sums.programs in PROGRAMS:
            times.append(time_call(rank, peer, call, calls) / (LAYERS if calls == 1 else 1))
        sums.programs = usual
        return times

    def line(title: str, times: list[float]) -> None:
        say(f"{title:24}" + "".join(f"{us:8.0f}" for us in times))

    say(f"{'programs':24}" + "".join(f"{n:8d}" for n in PROGRAMS))
    line("sum of a half by copies", by_programs(by_copies, CALLS))
    two_shot = partial(peer.all_reduce_add_rms_norm, x, residual, gain, EPS, path="two_shot")
    line("sum of a half, two-shot", [time_call(rank, peer, two_shot, CALLS)])
    whole = time_call(rank, peer, layer.whole, 1) / LAYERS
    halves = by_programs(lambda: layer.halves(layer.prepared), 1)
    line("a layer, whole", [whole])
    line("a layer, in halves", halves)
    best = min(zip(halves, PROGRAMS, strict=True))
    say(f"best: {best[1]} programs: {best[0]:.0f} us, {100 * (1 - best[0] / whole):.1f} % less than whole")


@torch.inference_mode()
def work(rank: Rank) -> bool:
    config = parse_config(PUBLISHED_SHAPES[rank.options.model])
    half_rows = max(Overlap(torch.device("cpu")).first_half(tokens) for tokens in rank.options.tokens)
    memory = rank.memory(config.hidden_size, half_rows)
    peer, sums = PeerAllReduce(memory, max_spins=MAX_SPINS), CopyEngineSums(memory, max_spins=MAX_SPINS)
    rank.say(f"{memory.layout.nbytes >> 20} MiB mapped among {rank.world} ranks")
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        if rank.rank == 0:
            print(text, flush=True)

    fine = True
    for tokens in rank.options.tokens:
        layer = Layer(rank, peer, sums, config, tokens)
        fine = check(rank, layer) and fine
        if layer.usable and not rank.options.check_only:
            say(f"{rank.options.model}, {rank.world} ranks, {tokens} tokens, the first {layer.cut} a half; us:")
            time_layer(rank, layer, say)
        if not layer.usable:
            break
        del layer
    else:
        fine = check_abort(rank, memory, partial(sum_once, rank, sums, config.hidden_size)) and fine
    memory.close()
    if rank.rank == 0:
        Path(rank.options.out, "overlap.txt").write_text("\n".join(lines) + "\n")
    return fine


def main() -> int:
    parser = rank_parser(__doc__, "bench_overlap", limit=90.0)
    parser.add_argument("--model", default="Qwen3-8B", choices=sorted(PUBLISHED_SHAPES))
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=[4096, 2305, 8001])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompts that make up a step")
    parser.add_argument("--check-only", action="store_true")
    return launch(work, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
