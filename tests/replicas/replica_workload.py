"""Requests for the demo checkpoint, and what of their outputs may not depend on the replicas."""

from pathlib import Path
from typing import Any

from nanovllm import SamplingParams

DEMO = str(Path(__file__).resolve().parents[2] / "nanovllm" / "demo_model")
OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 256, "max_num_seqs": 16, "max_model_len": 256}


def batch(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with shared beginnings, greedy and sampled, with and without options."""
    prompts, params = [], []
    for n in range(count):
        prompts.append([3 + n % 5] * (20 + 7 * (n % 4)) + [5 + n, 9])
        extra: dict[str, Any] = {}
        if n % 7 == 3:
            extra = {"top_k": 20, "logprobs": 2, "n": 2, "presence_penalty": 0.5, "sampling_mask": True}
            extra |= {"seed": n} if n % 2 else {}
        elif n % 7 == 5:
            extra = {"stop": ["e"], "seed": n, "min_tokens": 4, "prompt_logprobs": 1}
        sampled = {"temperature": n % 2, "max_tokens": 20 + 20 * (n % 3), "ignore_eos": n % 3 == 0}
        params.append(SamplingParams(**sampled, **extra))
    return prompts, params


def facts(outputs: list[Any]) -> list[Any]:
    """All but times, log-probabilities rounded."""
    return [
        (
            output.request_id,
            output.prompt_logprobs is None or len(output.prompt_logprobs),
            [
                (
                    *(c.token_ids, c.text, c.finish_reason, c.stop_reason),
                    None if c.logprobs is None else round(c.logprobs.total, 3),
                    None if c.sampling_mask is None else [len(ids) for ids in c.sampling_mask],
                )
                for c in output.outputs
            ],
        )
        for output in outputs
    ]
