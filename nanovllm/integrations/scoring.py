"""What both evaluation harnesses ask of an engine: how likely the ends of texts are."""

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

Score = tuple[float, bool]
"""Log-probability of some tokens, and whether they are what greedy sampling gives."""


def score_ends(llm: LLM, prompts: list[list[int]], counts: list[int], use_tqdm: bool) -> list[Score]:
    """Of the last `count` tokens of each prompt; one that is longer than the engine serves loses its beginning."""
    prompts = [prompt[-llm.engine.max_total_tokens :] for prompt in prompts]
    starts = [max(1, len(prompt) - count) for prompt, count in zip(prompts, counts, strict=True)]
    params = [SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start) for start in starts]
    scores = []
    for output, start in zip(llm.generate(prompts, params, use_tqdm=use_tqdm), starts, strict=True):
        rows = output.prompt_logprobs
        assert rows is not None
        pairs = zip(rows[start:], output.prompt_token_ids[start:], strict=True)
        tokens = [row[token] for row, token in pairs if row is not None]
        scores.append((sum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)))
    return scores
