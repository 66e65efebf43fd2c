"""Workloads of bench.py: requests drawn from a seed, arrivals of long prompts, and the sampling options to compare."""

import random
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from nanovllm.sampling_params import SamplingParams, StructuredOutput

PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.1}
SCHEMA = {"type": "object", "properties": {"sizes": {"type": "array", "items": {"type": "number"}, "minItems": 500}}}
SAMPLING_ROWS: list[tuple[str, dict[str, Any], int]] = [
    ("temperature 0.6", {}, 1),
    ("greedy", {"temperature": 0.0}, 1),
    ("seed per request", {"seed": 1}, 1),  # replaced by the request's number
    ("top_p 0.9", {"top_p": 0.9}, 1),
    ("top_k 50", {"top_k": 50}, 1),
    ("top_k 50, top_p 0.9", {"top_k": 50, "top_p": 0.9}, 1),
    ("min_p 0.05", {"min_p": 0.05}, 1),
    ("presence, repetition penalty", PENALTIES, 1),
    ("logprobs 5", {"logprobs": 5}, 1),
    ("one request in 4 with top_p 0.9", {"top_p": 0.9}, 4),
    ("one request in 4 with penalties", PENALTIES, 4),
    ("one request in 4 with logprobs 5", {"logprobs": 5}, 4),
    ("one request in 4 with a JSON schema", {"structured_outputs": StructuredOutput(json=SCHEMA)}, 4),
]
"""Name, options, and which requests have them: each, or one in so many. The last needs a tokenizer: where it is loaded
(--no-skip-tokenizer-init)."""


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def prompt_lens(self) -> list[int]:
        return [len(prompt) for prompt in self.prompts]


_Count = Annotated[int, msgspec.Meta(ge=1)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StallWorkload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decodes that run from the start, and long prompts that arrive one by one while they do."""

    decodes: _Count = 64
    decode_input: _Count = 256
    decode_output: _Count = 600
    prompts: Annotated[int, msgspec.Meta(ge=0)] = 22
    prompt_len: _Count = 4096
    prompt_output: _Count = 1
    first_at: _Seconds = 1.0
    """Seconds after the decodes' arrival."""
    interval: _Seconds = 0.25


def draw_workload(
    num_seqs: int, input_len: tuple[int, int], output_len: tuple[int, int], seed: int, vocab_size: int, repeat: int = 0
) -> Workload:
    """Random prompts and output lengths, uniform in the given bounds (both included).

    Repeat 0 draws in the order of nano-vllm's benchmark: length then ids of each prompt, then the output lengths. Later
    repeats keep these lengths, so that they compare, and draw other ids, so that no prompt is in the prefix cache.
    """
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(*input_len), vocab_size) for _ in range(num_seqs)]
    output_lens = [rng.randint(*output_len) for _ in range(num_seqs)]
    if repeat:
        rng = random.Random(f"{seed}, repeat {repeat}")
        prompts = [random_prompt(rng, len(prompt), vocab_size) for prompt in prompts]
    return Workload(prompts, output_lens)


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randint(0, 10000) % vocab_size for _ in range(length)]


def sampling(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.6, "ignore_eos": True, "max_tokens": max_tokens, **options})
