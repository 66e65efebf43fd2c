"""The least time that a device's memory, arithmetic and links allow for a workload: what bench.py divides by.

Each stage of a step (the GEMMs of layers, the head, attention of decodes and of prompts, states) takes the longer of
reading its bytes once and doing its arithmetic once; stages add up. Left out, so that the result stays a floor:
activations, norm weights, kernel launches, barriers, the host. Windows of attention are not known here: where a model
has them, the least time of long contexts is lower than what comes out. With several ranks the bytes that a ring
all-reduce sends count, its latency does not.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanovllm.kernels.plan.config import FP8, INT4, INT8, ITEM_SIZES, MXFP4, NVFP4
from nanovllm.kernels.plan.plan import Rules
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.latent import LatentAttention
from nanovllm.layers.memory import Slot
from nanovllm.model_config import ModelConfig
from nanovllm.models.planned import one_of_each


@dataclass(frozen=True)
class DeviceFigures:
    """Speeds that one device reaches in practice, lower than its data sheet's."""

    read_bytes_per_second: float
    flops_per_second: float
    """Dense GEMMs in the 16-bit type that the weights have."""
    link_bytes_per_second: float = math.inf
    """Speed of the link to the other ranks, each way."""
    fp8_speedup: float = 2.0
    """Factor on arithmetic for FP8 weights and activations, by the data sheet."""


KNOWN_DEVICES: dict[str, DeviceFigures] = {
    # Measured: a sweep of reads (its sheet says 4.8 TB/s), the largest cuBLAS bf16 product; links give 380 to 400 GB/s.
    "H200": DeviceFigures(4.55e12, 790e12, 400e9),
    "H100 80GB HBM3": DeviceFigures(3.11e12, 765e12),  # SXM; its sheet says 3.35 TB/s. Links were not measured.
}


def device_figures(name: str) -> DeviceFigures | None:
    """The figures of the device that calls itself `name` ("NVIDIA H200"), or None where none was measured."""
    return next((figures for known, figures in KNOWN_DEVICES.items() if known in name), None)


@dataclass
class StepWork:
    """Work of one step, in counts that do not depend on the model."""

    tokens: int = 0
    """Tokens that go through the layers."""
    sampled: int = 0
    """Rows that go through the head."""
    decode_rows: int = 0
    decode_context: int = 0
    """KV positions that decode rows read, summed over the rows."""
    prompt_context: int = 0
    """KV positions that prompt chunks read, each once, however many queries share it."""
    prompt_pairs: int = 0
    """(query, visible key) pairs of the prompt chunks."""

    def add_decodes(self, rows: int, context: int) -> None:
        """`rows` decodes which see `context` tokens in all, their own included."""
        self.tokens += rows
        self.sampled += rows
        self.decode_rows += rows
        self.decode_context += context

    def add_chunk(self, computed: int, count: int, sampled: bool) -> None:
        """`count` prompt tokens after `computed` earlier ones; `sampled`: the prompt ends here."""
        self.tokens += count
        self.sampled += sampled
        self.prompt_context += computed + count
        self.prompt_pairs += count * computed + count * (count + 1) // 2


_SCALE_BYTES = {INT8: 4, INT4: 4, MXFP4: 1, NVFP4: 1}
"""Bytes of a scale of packed weights."""


class Roofline:
    """Limits of one model on `ranks` equal devices."""

    def __init__(
        self, model: ModelConfig, ranks: int, figures: DeviceFigures, dtype: str = "bfloat16",
        kv_element_bytes: float | None = None,
    ) -> None:  # fmt: skip
        """`dtype`: of a weight that is not quantised, and where `kv_element_bytes` is None of a KV element. Raises
        ValueError for a model without our own layers."""
        self.figures, self.element_bytes, self.ranks = figures, ITEM_SIZES[dtype], ranks
        self.kv_element_bytes = self.element_bytes if kv_element_bytes is None else kv_element_bytes
        self.num_layers, self.hidden, self.moe = len(model.layers), model.hidden_size, model.moe
        self.layer_work = self.layer_bytes = self.expert_work = self.expert_bytes = 0.0
        """Weights, each by the time that a multiplication takes (1 in 16 bits), and bytes: of what every token goes
        through, and of one expert, in all layers of a rank."""
        self.kv_elements_per_token, self.query_elements, self.state_bytes = 0, 0.0, 0
        groups = {held.method: held.group for spec in model.layers for held in spec.formats}
        of_rank, counts = one_of_each(model, Rules(world=ranks), dtype)
        for layer, count in zip(of_rank.layers, counts, strict=True):
            for one in layer.operations:
                weights = count * one.n * one.k
                work = weights / (figures.fp8_speedup if one.dtype == FP8 else 1)
                size = count * one.num_bytes + weights * _scale_bytes(one.dtype, groups)
                if one.is_of_experts:
                    self.expert_work, self.expert_bytes = self.expert_work + work, self.expert_bytes + size
                else:
                    self.layer_work, self.layer_bytes = self.layer_work + work, self.layer_bytes + size
            if isinstance(mixer := layer.self_attn, PagedAttention):
                parts, spec = 1 if mixer.spec.value_dim else 2, mixer.spec
                self.kv_elements_per_token += count * parts * spec.num_kv_heads * spec.head_dim
                self.query_elements += count * spec.num_heads * (spec.head_dim + spec.out_dim) / 2
            if isinstance(mixer, LatentAttention):
                self.layer_work += count * mixer.kv_proj.numel()
                self.layer_bytes += count * mixer.kv_proj.numel() * self.element_bytes
            self.state_bytes += count * sum(each.nbytes for each in mixer.memory if isinstance(each, Slot))
        self.head_weights = self.hidden * math.ceil(model.vocab_size / ranks)

    def _stage(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.figures.read_bytes_per_second, flops / self.figures.flops_per_second)

    def step_seconds(self, work: StepWork) -> float:
        """Least seconds of one step."""
        # A pair costs two dot products (scores, values) of head_dim multiply-adds for each query head.
        pair_flops = 4.0 * self.query_elements
        seconds = self._stage(self.layer_bytes, 2.0 * self.layer_work * work.tokens)
        seconds += self._experts_seconds(work.tokens)
        head_bytes = self.head_weights * self.element_bytes if work.sampled else 0
        seconds += self._stage(head_bytes, 2.0 * self.head_weights * work.sampled)
        kv_bytes = self.kv_elements_per_token * self.kv_element_bytes
        seconds += self._stage(kv_bytes * work.decode_context, pair_flops * work.decode_context)
        seconds += self._stage(kv_bytes * work.prompt_context, pair_flops * work.prompt_pairs)
        seconds += self._stage(2 * self.state_bytes * work.decode_rows, 0)  # read and written
        return seconds + self._wire_seconds(work.tokens)

    def _experts_seconds(self, tokens: int) -> float:
        """The experts that somebody chose are read once, and every token goes through its own; choices are uniform."""
        if self.moe is None:
            return 0.0
        count, chosen = self.moe.num_experts, self.moe.top_k
        hit = count * (1 - (1 - chosen / count) ** tokens)
        return self._stage(hit * self.expert_bytes, 2.0 * chosen * self.expert_work * tokens)

    def _wire_seconds(self, tokens: int) -> float:
        """Two all-reduces of [tokens, hidden] in each layer; a ring sends each element 2 (n - 1) / n times."""
        sent = 2.0 * (self.ranks - 1) / self.ranks
        message = tokens * self.hidden * self.element_bytes
        return 2 * self.num_layers * sent * message / self.figures.link_bytes_per_second

    def first_token_seconds(self, prompt_len: int) -> float:
        """Least seconds from a prompt to its first token, alone on the device and in one step."""
        work = StepWork()
        work.add_chunk(0, prompt_len, sampled=True)
        return self.step_seconds(work)

    def token_seconds(self, prompt_len: int, output_len: int) -> float:
        """Least seconds per token after the first, for one request alone: the mean over its growing context."""
        work = StepWork()
        work.add_decodes(1, prompt_len + output_len // 2)
        return self.step_seconds(work)

    def batch_seconds(
        self, prompt_lens: Sequence[int], output_lens: Sequence[int], max_num_seqs: int, max_num_batched_tokens: int
    ) -> float:
        """Least seconds for requests that are all there from the start, first come first served.

        Walks the schedule: in each step every running request gains a token and the budget that is left goes to
        prompts, in order; beginning with the longest would lift the limits of README.md by 0.04 to 0.28 %. Only counts
        are kept, so a step costs the same at any batch size.
        """
        waiting = deque(zip(prompt_lens, output_lens, strict=True))
        leaving: defaultdict[int, list[int]] = defaultdict(list)  # last step of requests -> their contexts in it
        running = context = computed = step = 0  # `computed`: computed tokens of the first of `waiting`
        seconds = 0.0
        while waiting or running:
            work = StepWork()
            context += running
            work.add_decodes(running, context)
            budget = max_num_batched_tokens - running
            joining: list[tuple[int, int]] = []
            while waiting and budget > 0 and running + len(joining) < max_num_seqs:
                prompt_len, output_len = waiting[0]
                count = min(prompt_len - computed, budget)
                ends = computed + count == prompt_len
                work.add_chunk(computed, count, ends)
                budget -= count
                computed += count
                if ends:
                    waiting.popleft()
                    joining.append((prompt_len, output_len))
                    computed = 0
            seconds += self.step_seconds(work)
            for final in leaving.pop(step, ()):
                running -= 1
                context -= final
            for prompt_len, output_len in joining:
                if output_len > 1:  # its first token came with the prompt
                    running += 1
                    context += prompt_len
                    leaving[step + output_len - 1].append(prompt_len + output_len - 1)
            step += 1
        return seconds


def _scale_bytes(dtype: str, groups: Mapping[str, int]) -> float:
    """Bytes of scales of a weight. `groups`: columns that share a scale, by the method."""
    group = groups.get(dtype, 0)
    return _SCALE_BYTES[dtype] / min(group, 128) if group and dtype in _SCALE_BYTES else 0.0
