"""Shared prompts on a GPU, whose blocks hold 128 tokens: with exact_bits what is copied gives the bits of what is
computed."""

import random
from dataclasses import replace

import numpy as np
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

pytestmark = pytest.mark.gpu
COMMON = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2048, "max_num_seqs": 64,
    "num_kvcache_blocks": 400, "hf_overrides": {"num_hidden_layers": 4}, "attention_backend": "triton",
    "exact_bits": "batch",
}  # fmt: skip


def bits(output: RequestOutput) -> tuple[list[int], list[int]]:
    tables = output.outputs[0].logprobs
    assert tables is not None
    pairs = zip(tables, output.token_ids, strict=True)
    return output.token_ids, [int(np.float32(table[token].logprob).view(np.int32)) for table, token in pairs]


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True, "max_num_batched_tokens": 300}], ids=str)
def test_copies_have_the_bits_of_what_was_computed(options: dict[str, object]) -> None:
    draw = random.Random(1)
    with LLM("Qwen3-0.6B", **COMMON, **options) as llm:
        assert llm.config.kvcache_block_size == 128
        texts = [[draw.randrange(100_000) for _ in range(length)] for length in (500, 512, 60, 1000)]
        prompts = [[*text, *[number % 3] * (number % 3)] for text in texts for number in range(8)]
        params = [
            SamplingParams(temperature=float(number % 2), seed=number, max_tokens=40, ignore_eos=True, logprobs=0)
            for number in range(len(prompts))
        ]
        apart = [replace(param, cache_salt=str(number)) for number, param in enumerate(params)]
        before = llm.engine.computed[0]
        shared = [bits(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        computed = llm.engine.computed[0] - before
        assert computed <= sum(map(len, texts)) + 30 * len(prompts)
        assert shared == [bits(output) for output in llm.generate(prompts, apart, use_tqdm=False)]
