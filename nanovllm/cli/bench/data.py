"""Prompts to measure with: random ones, and conversations of a ShareGPT file."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.models.files import fetch, names_hub
from nanovllm.text.checkpoint import CheckpointTokenizer

Prompt = str | list[int]


@dataclass(frozen=True)
class Sample:
    """One request: text or token ids, how many tokens they are, and how many are to come."""

    prompt: Prompt
    num_prompt_tokens: int
    num_output_tokens: int


class PromptTokenizer:
    """Tokenizer as far as drawing prompts needs it."""

    def __init__(self, folder: str) -> None:
        """`folder`: of a checkpoint, a hub id, or "demo". Raises FileNotFoundError without a tokenizer.json."""
        folder = EngineConfig(folder).model
        if names_hub("tokenizer", folder):
            folder = fetch(folder, ("tokenizer*.json", "special_tokens_map.json"))
        self._tokenizer = CheckpointTokenizer(folder)
        added = self._tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special}
        size = self._tokenizer.backend_tokenizer.get_vocab_size(False)
        self.usable = [number for number in range(size) if number not in special]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text_of_length(self, ids: list[int]) -> tuple[str, int]:
        """A text that becomes about as many tokens as `ids` has, and how many it becomes: text does not keep ids apart
        as they were, so it is encoded again, and cut or made longer, a few times."""
        wanted = len(ids)
        for _ in range(10):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            again = self.encode(text)
            if len(again) == wanted:
                return text, wanted
            ids = (again + ids)[:wanted]
        return text, len(again)


def random_lengths(rng: random.Random, length: int, ratio: float) -> int:
    """Uniform in length * (1 - ratio) .. length * (1 + ratio)."""
    return max(1, rng.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def random_samples(given: Any, tokenizer: PromptTokenizer) -> list[Sample]:
    """`--random-input-len` tokens drawn from the vocabulary, after a prefix that all share."""
    rng = random.Random(given.seed)
    if not 0 <= given.random_range_ratio < 1:
        raise ValueError(f"random_range_ratio={given.random_range_ratio}: must be in [0, 1)")
    prefix = rng.choices(tokenizer.usable, k=given.random_prefix_len)
    samples = []
    for _ in range(given.num_prompts):
        num_input = random_lengths(rng, given.random_input_len, given.random_range_ratio)
        num_output = random_lengths(rng, given.random_output_len, given.random_range_ratio)
        ids = prefix + rng.choices(tokenizer.usable, k=num_input)
        prompt, count = (ids, len(ids)) if given.prompt_token_ids else tokenizer.text_of_length(ids)
        samples.append(Sample(prompt, count, num_output))
    return samples


def sharegpt_samples(given: Any, tokenizer: PromptTokenizer) -> list[Sample]:
    """The first question of each conversation, and as many tokens as its answer has. As vLLM's benchmark does, very
    short and very long ones are left out."""
    if given.dataset_path is None:
        raise ValueError("dataset_path=None: --dataset-name sharegpt needs a file")
    try:
        entries = json.loads(Path(given.dataset_path).read_text(encoding="utf-8"))
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in entries]
        pairs = [(pair[0]["value"], pair[1]["value"]) for pair in turns if len(pair) >= 2]
    except (ValueError, TypeError, LookupError, AttributeError):
        raise ValueError(f"dataset_path={given.dataset_path!r}: must be ShareGPT's JSON") from None
    random.Random(given.seed).shuffle(pairs)
    samples: list[Sample] = []
    for question, answer in pairs:
        ids = tokenizer.encode(question)
        num_output = given.sharegpt_output_len or len(tokenizer.encode(answer))
        if min(len(ids), num_output) >= 4 and len(ids) <= 1024 and len(ids) + num_output <= 2048:
            samples.append(Sample(ids if given.prompt_token_ids else question, len(ids), num_output))
        if len(samples) == given.num_prompts:
            break
    if not samples:
        raise ValueError(f"{given.dataset_path}: no conversation of a fitting length")
    return [samples[n % len(samples)] for n in range(given.num_prompts)]


def draw_samples(given: Any, tokenizer_folder: str) -> list[Sample]:
    """Draws the requests that the options ask for. Raises ValueError, FileNotFoundError."""
    if given.num_prompts < 1:
        raise ValueError(f"num_prompts={given.num_prompts}: must be >= 1")
    tokenizer = PromptTokenizer(tokenizer_folder)
    return (random_samples if given.dataset_name == "random" else sharegpt_samples)(given, tokenizer)


def add_dataset_options(parser: Any) -> None:
    from nanovllm.cli.options import count

    group = parser.add_argument_group("prompts")
    group.add_argument("--dataset-name", choices=("random", "sharegpt"), default="random")
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT's JSON")
    group.add_argument("--num-prompts", type=count, default=1000, metavar="N", help="[1000]")
    group.add_argument("--random-input-len", "--input-len", type=count, default=1024, metavar="N", help="[1024]")
    group.add_argument("--random-output-len", "--output-len", type=count, default=128, metavar="N", help="[128]")
    text = "lengths are uniform within this share of the two above [0]"
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="N", help=text)
    text = "tokens that all prompts begin with [0]"
    group.add_argument("--random-prefix-len", type=count, default=0, metavar="N", help=text)
    group.add_argument("--sharegpt-output-len", type=count, metavar="N", help="instead of the answers' lengths")
    group.add_argument("--prompt-token-ids", action="store_true", help="token ids instead of text (completions only)")
