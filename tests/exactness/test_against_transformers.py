"""Logits of every token and greedy texts, against transformers on the same files."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_model, read_json, save
from comparing import Expected, assert_mostly_sure, assert_same
from family_cases import reference_logits
from observing import LogitRecorder, StepWitness, margins
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, SamplingParams

NUM_TOKENS = 24
LOGIT_TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}  # of logits that spread over about 10


@dataclass(frozen=True)
class Variant:
    """A model's config, and how it is written down."""

    config: dict[str, Any]
    files: dict[str, Any] = field(default_factory=dict)


def new_rope(rope_type: str, theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **scaling}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
OLD_YARN = {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", **YARN}}
VARIANTS = {
    "one query head a group, old theta": Variant(
        {"num_key_value_heads": 8, **new_rope("default", 5000.0)}, {"old_rope_spelling": {"rope_theta": 5000.0}}
    ),
    "two a group, head 64, tied, new theta": Variant(
        {"num_attention_heads": 4, "head_dim": 64, "tie_word_embeddings": True, **new_rope("default", 1e6)}
    ),
    "four a group, head 128, linear, in many files": Variant(
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, **new_rope("linear", 1e4, factor=3.0)},
        {"max_shard_size": "100KB"},
    ),
    "five a group, old yarn, three layers": Variant(
        {"num_attention_heads": 10, "num_hidden_layers": 3, **new_rope("yarn", 10000.0, **YARN)},
        {"old_rope_spelling": OLD_YARN},
    ),
    "new yarn with its own factor and ramp": Variant(
        new_rope("yarn", 1e5, **YARN, attention_factor=1.3, beta_fast=16.0, beta_slow=2.0, truncate=False)
    ),
    "old linear, tied": Variant(
        {"tie_word_embeddings": True, **new_rope("linear", 10000.0, factor=2.0)},
        {"old_rope_spelling": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}},
    ),
    "bfloat16 files, one layer, wide": Variant(
        {"num_hidden_layers": 1, "hidden_size": 160, "vocab_size": 512}, {"dtype": torch.bfloat16}
    ),
    "float64 files": Variant({"num_hidden_layers": 1, "vocab_size": 512}, {"dtype": torch.float64}),
}


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Lengths around the block of 16, and past the original length of the YaRN variants."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (1, 7, 16, 33, 90)]


def greedy_reference(model: Qwen3ForCausalLM, prompt: list[int]) -> Expected:
    """transformers' own greedy generation."""
    result = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits = torch.cat(result.logits)
    return Expected(result.sequences[0, len(prompt) :].tolist(), margins(logits, 0, temperature=0, seed=0))


@pytest.fixture(scope="module", params=list(VARIANTS.values()), ids=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant: Variant = request.param
    return save(make_model(**variant.config), tmp_path_factory.mktemp("model"), **variant.files)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(reference: Qwen3ForCausalLM) -> list[Expected]:
    texts = [greedy_reference(reference, prompt) for prompt in prompts_of(reference.config.vocab_size)]
    assert_mostly_sure(texts)
    return texts


@pytest.mark.parametrize("budget", [512, 40])
def test_logits_and_greedy_tokens(
    folder: Path, reference: Qwen3ForCausalLM, expected: list[Expected], budget: int
) -> None:
    """All prompts at once; a budget of 40 cuts the longer ones into chunks beside decodes."""
    prompts = prompts_of(reference.config.vocab_size)
    options = {"num_kvcache_blocks": 64, "max_num_batched_tokens": budget, "skip_tokenizer_init": True, "device": "cpu"}
    with LLM(str(folder), **options) as llm:
        recorder, witness = LogitRecorder(llm), StepWitness().watch(llm)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
        llm.engine.scheduler.check_integrity()
    assert (witness.num_partial_chunks > 0) == (budget < sum(map(len, prompts)))
    for prompt, output, greedy in zip(prompts, outputs, expected, strict=True):
        ours = recorder.of(output.request_id, len(prompt), NUM_TOKENS)
        theirs = reference_logits(reference, prompt, output.token_ids)
        torch.testing.assert_close(ours, theirs, **LOGIT_TOLERANCE)
        assert_same(output.token_ids, greedy, f"prompt of {len(prompt)} tokens")


def test_generation_ends_at_any_end_of_text_token(tmp_path: Path) -> None:
    """The ids of generation_config.json end the text, as they end transformers'; ignore_eos goes past them."""
    model = make_model(seed=3)
    prompts = prompts_of(model.config.vocab_size)
    endless = [greedy_reference(model, prompt).token_ids for prompt in prompts]
    stops = [endless[0][5], endless[1][9]]
    folder = save(model, tmp_path, eos_token_id=stops)
    assert read_json(folder / "config.json")["eos_token_id"] is None
    with LLM(str(folder), num_kvcache_blocks=64, skip_tokenizer_init=True, device="cpu") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        ended = llm.generate(prompts, greedy, use_tqdm=False)
        ignored = llm.generate(prompts, replace(greedy, ignore_eos=True), use_tqdm=False)
        llm.engine.scheduler.check_integrity()
    for output, whole, full in zip(ended, endless, ignored, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stops]
        assert output.token_ids == (whole[: ends[0] + 1] if ends else whole)
        assert output.finish_reason == ("stop" if ends else "length")
        assert full.token_ids == whole
        assert full.finish_reason == "length"
    assert ended[0].finish_reason == ended[1].finish_reason == "stop"
