"""Random tiny Qwen3 checkpoints, and what torch makes of their logits."""

from pathlib import Path
from typing import Any

import torch

VOCAB = 301
OPTIONS: dict[str, Any] = {
    "max_logprobs": -1,
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_kvcache_blocks": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
}


class Policy:
    """A model of transformers, the folder that it was saved to, and its weights."""

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM  # here, as it may import triton: see conftest.py

        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
            initializer_range=0.2,
        )
        self.model = Qwen3ForCausalLM(config).eval()
        self.model.save_pretrained(folder)
        self.folder = str(folder)
        self.weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0]


def processed(
    logits: torch.Tensor, prompt: list[int], output: list[int], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 log-probabilities [vocab] of what is drawn from after `output`, and which ids are kept, written down
    straight from SamplingParams' text."""
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
