"""Random tiny Qwen3 checkpoints, and the texts that transformers and an engine make of them."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import SMALL, make_model, save

from nanovllm import LLM, SamplingParams

VOCAB = SMALL["vocab_size"]
OPTIONS: dict[str, Any] = {
    "max_logprobs": -1,
    "skip_tokenizer_init": True,
    "device": "cpu",
    "num_kvcache_blocks": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(40)), list(range(20, 52))]


class Policy:
    """A model of transformers, the folder that it was saved to, and its weights."""

    def __init__(self, folder: Path, seed: int, **changes: Any) -> None:
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
        self.model = make_model(seed, 0.2, max_position_embeddings=2048, **shape, **changes)
        self.folder = str(save(self.model, folder))
        self.weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, vocab]."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0]


def texts(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def expect_texts_of(policy: Policy, llm: LLM) -> None:
    assert texts(llm) == [greedy(policy, prompt) for prompt in PROMPTS]


def greedy(policy: Policy, prompt: list[int], count: int = 12) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(policy.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]
