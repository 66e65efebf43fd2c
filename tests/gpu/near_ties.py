"""Texts that may part only where two scores are nearly equal."""

import torch


def assert_parts_only_at_ties(
    found: list[list[int]], texts: list[list[int]], ours: torch.Tensor, bound: torch.Tensor, share: float
) -> None:
    """Each text is the eager one up to a token whose score is behind by at most `bound`; at least `share`
    of the tokens are compared."""
    compared = 0
    for tokens, text, scores in zip(found, texts, ours, strict=True):
        part = next((n for n, (a, b) in enumerate(zip(tokens, text, strict=True)) if a != b), len(text))
        compared += part
        if part < len(text):
            assert scores[part, text[part]] - scores[part, tokens[part]] <= bound
    assert compared >= share * sum(map(len, texts))
