"""The least time that a device's memory, arithmetic and links allow for a workload: what bench.py divides by.

Each stage of a step (the GEMMs of layers, the head, attention of decodes and of prompts, states) takes the longer of
reading its bytes once and doing its arithmetic once; stages add up. Left out, so that the result stays a floor:
activations, norm weights, kernel launches, barriers, the host. Windows of attention are not known here: where a model
has them, the least time of long contexts is lower than what comes out. With several ranks the bytes that a ring
all-reduce sends count, its latency does not.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.model_config import ModelConfig, Quantization


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


def bytes_of_weight(held: Quantization | None, element_bytes: int) -> float:
    """Bytes of one weight of a linear layer, scales included. held: how the layer holds it; None: not quantised."""
    if held is None:
        return element_bytes
    number, scale = {"fp8": (1.0, 0), "int8": (1.0, 4), "int4": (0.5, 4)}.get(held.method, (0.5, 1))
    return number + (scale / min(held.group, 128) if held.group else 0)


def _is_fp8(held: Quantization | None) -> bool:
    return held is not None and held.method == "fp8"


def _of_delta(options: Any, hidden: int) -> tuple[int, int, int]:
    keys, values, key_dim, value_dim, *_ = options  # of layers/delta.py
    return 2 * keys * key_dim + 2 * values * (value_dim + 1), values * value_dim, values * key_dim * value_dim


def _of_mamba(options: Any, hidden: int) -> tuple[int, int, int]:
    heads, groups, dim, state, *_ = options  # of layers/mamba.py
    return heads * (2 * dim + 1) + 2 * groups * state, heads * dim, heads * dim * state


_WIDTHS: dict[str, Callable[[Any, int], tuple[int, int, int]]] = {
    "delta": _of_delta, "mamba": _of_mamba, "conv": lambda _, hidden: (3 * hidden, hidden, 0),
    "none": lambda *_: (0, 0, 0),
}  # fmt: skip
"""Mixers without KV: (options, hidden size) -> outputs of their first projections, inputs of the last one, elements of
a row's state."""


class Roofline:
    """Limits of one model on `tensor_parallel_size` equal devices."""

    def __init__(
        self, model: ModelConfig, tensor_parallel_size: int, figures: DeviceFigures, element_bytes: int = 2,
        kv_element_bytes: float | None = None,
    ) -> None:  # fmt: skip
        """`element_bytes`: of a weight that is not quantised, and where `kv_element_bytes` is None of a KV element."""
        size, hidden = tensor_parallel_size, model.hidden_size
        self.figures, self.element_bytes, self.tensor_parallel_size = figures, element_bytes, size
        self.kv_element_bytes = element_bytes if kv_element_bytes is None else kv_element_bytes
        self.num_layers, self.hidden = len(model.layers), hidden
        # Per rank. KV heads are replicated where ranks exceed them.
        parts: list[tuple[int, Quantization | None]] = []
        kv_width, self.query_elements, self.state_elements = 0, 0, 0
        for layer in model.layers:
            if layer.mixer in _WIDTHS:
                into, out, state = _WIDTHS[layer.mixer](layer.options, hidden)
                self.state_elements += state // size
            else:
                heads, kv = layer.num_heads or model.num_attention_heads, layer.num_kv_heads
                out, projected = heads * layer.head_dim, 0 if layer.shares_keys else 2 - layer.values_are_keys
                gates = 0 if model.attention_gate is None else heads if model.gate_per_head else out
                into = out + gates + projected * size * math.ceil(kv / size) * layer.head_dim
                kv_width += math.ceil(kv / size) * layer.head_dim
                self.query_elements += out // size
            parts.append((hidden * into // size, layer.precision("qkv")))
            parts.append((hidden * out // size, layer.precision("o")))
            if layer.has_dense_mlp:
                mlp = hidden * (layer.intermediate_size or model.intermediate_size) // size
                gate_up = (1 + model.gated_mlp) * mlp
                parts += [(gate_up, layer.precision("gate_up")), (mlp, layer.precision("down"))]
        if model.layer_inputs is not None:  # whose projection every rank has whole
            count, width, _ = model.layer_inputs
            parts.append((count * width * hidden + len(model.layers) * 2 * width * hidden // size, None))
        sparse = [layer for layer in model.layers if layer.has_experts]
        self.moe, num_moe = model.moe, len(sparse)
        self.expert_work, self.expert_bytes = 0.0, 0.0
        """Work and bytes of one expert, in all layers together."""
        if self.moe is not None:
            ups = 2 + self.moe.gated
            count = num_moe * ups * hidden * self.moe.intermediate_size // size
            held = sparse[0].precision("experts")
            self.expert_work = count / (figures.fp8_speedup if _is_fp8(held) else 1)
            self.expert_bytes = count * bytes_of_weight(held, element_bytes)
            router = self.moe.num_experts * hidden
            parts.append((num_moe * (router + ups * hidden * self.moe.shared_size // size), None))
        self.layer_work = sum(count / (figures.fp8_speedup if _is_fp8(held) else 1) for count, held in parts)
        """Weights, each by the time that a multiplication takes: 1 in 16 bits."""
        self.layer_bytes = sum(count * bytes_of_weight(held, element_bytes) for count, held in parts)
        self.head_weights = hidden * math.ceil(model.vocab_size / size)
        self.kv_elements_per_token = 2 * kv_width

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
        seconds += self._stage(2 * 4 * self.state_elements * work.decode_rows, 0)  # in float32, read and written
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
        sent = 2.0 * (self.tensor_parallel_size - 1) / self.tensor_parallel_size
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
