"""Requests around every boundary of a block of 16, and the runs of them that are compared."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints import SMALL
from comparing import Expected, assert_mostly_sure, assert_same
from observing import LogitRecorder, margins

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

BLOCK = 16
LONGEST = 6 * BLOCK
"""Tokens of the longest request, output included: six blocks hold its KV (the last token needs none)."""
ROOMY: dict[str, Any] = {
    "num_kvcache_blocks": 128, "max_num_seqs": 16, "skip_tokenizer_init": True, "device": "cpu", "max_model_len": 256,
}  # fmt: skip
"""Options of an engine that runs all of make_requests() at once."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams


def make_requests(seed: int = 11, vocab_size: int = SMALL["vocab_size"], most_tokens: int = LONGEST) -> list[Request]:
    """Greedy and sampled in turn. Some share a beginning, some are whole blocks, one needs all of LONGEST unless texts
    are shorter."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    shared = tokens(2 * BLOCK)
    prompts_and_lengths = [
        (tokens(1), 20),
        (tokens(BLOCK - 1), 18),
        (tokens(BLOCK), 6),
        (shared[:BLOCK], 17),  # one exact block, the beginning of the next ones
        (shared, 5),
        (shared + tokens(1), 12),
        (shared + tokens(13), 21),
        (shared[:BLOCK] + tokens(BLOCK), 1),  # leaves the others at the block's boundary
        (tokens(3 * BLOCK), 16),
        (tokens(LONGEST - 20), 20),
        (tokens(5), 2 * BLOCK + 3),  # grows by blocks
        (shared[:BLOCK] * 2 + tokens(5), 9),  # the same block again, behind another one: not the same KV
        ([7] * 40, 9),
    ]
    lengths = [min(length, most_tokens) for _, length in prompts_and_lengths]
    return [
        Request(prompt, SamplingParams(temperature=0.8 * (i % 2), max_tokens=length, seed=1000 + i, ignore_eos=True))
        for i, ((prompt, _), length) in enumerate(zip(prompts_and_lengths, lengths, strict=True))
    ]


def run(llm: LLM, requests: Sequence[Request]) -> list[RequestOutput]:
    """All in one call; the engine is idle and whole afterwards."""
    outputs = llm.generate([r.prompt for r in requests], [r.params for r in requests], use_tqdm=False)
    assert llm.is_finished()
    llm.engine.scheduler.check_integrity()
    return outputs


def run_alone(llm: LLM, requests: Sequence[Request]) -> list[Expected]:
    """The reference: one after another, with the margin of every token."""
    recorder = LogitRecorder(llm)
    expected = []
    for request in requests:
        (output,) = run(llm, [request])
        begin = len(request.prompt)
        logits = recorder.of(output.request_id, begin, len(output.token_ids))
        assert request.params.seed is not None
        lead = margins(logits, begin, request.params.temperature, request.params.seed)
        expected.append(Expected(output.token_ids, lead, output.finish_reason))
    return expected


def tokens_alone(model: str | Path, requests: Sequence[Request], **options: Any) -> list[Expected]:
    """The reference by an engine of its own, in steps that wait for each other and without prefix cache; nearly all of
    its tokens are sure."""
    plain = {**ROOMY, "disable": ("async_scheduling",), "enable_prefix_caching": False, "max_num_seqs": 2}
    with LLM(str(model), **{**plain, **options}) as llm:
        expected = run_alone(llm, requests)
    assert_mostly_sure(expected)
    return expected


def assert_outputs(
    outputs: Sequence[RequestOutput], requests: Sequence[Request], expected: Sequence[Expected], what: object = ""
) -> None:
    """Every output is the reference's, and belongs to the prompt in its place."""
    for i, (output, request, one) in enumerate(zip(outputs, requests, expected, strict=True)):
        assert output.prompt_token_ids == request.prompt
        assert_same(output.token_ids, one, (what, f"request {i}"))
        assert output.finish_reason == one.finish_reason


def shuffles(
    requests: Sequence[Request], expected: Sequence[Expected], seed: int
) -> Iterator[tuple[list[Request], list[Expected]]]:
    """Endless other orders of the same requests."""
    draw = random.Random(seed)
    pairs = list(zip(requests, expected, strict=True))
    while True:
        draw.shuffle(pairs)
        yield [request for request, _ in pairs], [one for _, one in pairs]
