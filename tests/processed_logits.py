"""Probabilities that a token is drawn by, written down straight from the text of SamplingParams."""

from typing import Any

import torch


def processed(
    logits: torch.Tensor, prompt: list[int], output: list[int], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 log-probabilities [vocab] of what is drawn from after `output`, and which ids are kept."""
    x = logits.double().clone()
    if (allowed := options.get("allowed_token_ids")) is not None:
        banned = torch.ones(len(x), dtype=torch.bool)
        banned[list(allowed)] = False
        x[banned] = -torch.inf
    for token_id, bias in options.get("logit_bias", {}).items():
        x[token_id] += bias
    repetition = options.get("repetition_penalty", 1.0)
    for token_id in {*prompt, *output}:
        x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
        x[token_id] -= options.get("frequency_penalty", 0.0) * output.count(token_id)
        x[token_id] -= options.get("presence_penalty", 0.0) * (token_id in output)
    temperature = options.get("temperature", 1.0)
    if temperature > 0:
        x = x / temperature
        likely = x.softmax(0)
        x[likely < options.get("min_p", 0.0) * likely.max()] = -torch.inf
        if top_k := options.get("top_k", 0):
            x[x < x.topk(top_k).values[-1]] = -torch.inf
        ordered = x.sort(descending=True).values
        mass = ordered.softmax(0).cumsum(0)
        last = int((mass >= options.get("top_p", 1.0) - 1e-12).nonzero()[0]) if options.get("top_p", 1.0) < 1 else -1
        x[x < ordered[last]] = -torch.inf
    return x.log_softmax(0), x > -torch.inf
