"""Random tiny Qwen3 checkpoints, and the texts that transformers and an engine make of them."""

from pathlib import Path
from typing import Any

import torch

from nanovllm import LLM, SamplingParams

VOCAB = 301
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
        from transformers import Qwen3Config, Qwen3ForCausalLM  # here, as it may import triton: see conftest.py

        torch.manual_seed(seed)
        config = Qwen3Config(
            **{"tie_word_embeddings": False, **changes},
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
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


def texts(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def greedy(policy: Policy, prompt: list[int], count: int = 12) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(policy.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]
