"""A caller's own loop over an engine."""

from collections.abc import Callable

import torch
from system import wait_for

from nanovllm import LLM
from nanovllm.outputs import CompletionOutput, StepOutput


def drain(llm: LLM) -> list[StepOutput]:
    """Steps until nothing is left; returns all outputs."""
    outputs: list[StepOutput] = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    return outputs


def assert_nothing_is_left(llm: LLM) -> None:
    """Steps until nothing is left; the scheduler's books must agree then."""
    drain(llm)
    llm.engine.scheduler.check_integrity()  # type: ignore[attr-defined]


def clear(llm: LLM) -> None:
    """Ends what a test has left behind, which may have failed anywhere."""
    llm.resume()
    llm.abort_all()
    drain(llm)


def tokens_of(outputs: list[StepOutput]) -> dict[int, list[int]]:
    """Tokens that each request gained."""
    found: dict[int, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.new_token_ids)
    return found


def ends_of(outputs: list[StepOutput]) -> dict[int, str | None]:
    """Reason of each request that ended."""
    return {output.request_id: output.finish_reason for output in outputs if output.finished}


def finish(llm: LLM, ids: list[int]) -> list[CompletionOutput]:
    """Steps until nothing is left; returns the first completions of these requests."""
    rows = [llm.engine.book.rows[request_id][0] for request_id in ids]
    drain(llm)
    return [llm.engine.book.completion(row) for row in rows]


def wait_for_tokens(llm: LLM, count: int = 1, step: Callable[[], object] = lambda: None) -> None:
    """Waits until an engine, which others step unless `step` does, has generated `count` more tokens."""
    before = llm.stats().generation_tokens
    wait_for(lambda: (step(), llm.stats().generation_tokens >= before + count)[1], "tokens", interval=0.001)


def replace_one(llm: LLM, name: str, weight: torch.Tensor, version: int | None = None) -> None:
    """Replaces one weight alone."""
    llm.begin_update(partial=True)
    llm.update([(name, weight)])
    llm.finish_update(version)
