"""Exactness in bfloat16 on GPUs, the 0.6B shape with fewer layers and random weights: scores against transformers,
and the same tokens on every path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from observing import StepWitness, draw_scores
from safetensors.torch import load_file
from small_models import (
    DEVICE,
    OPTIONS,
    assert_no_farther,
    assert_parts_only_at_ties,
    eager_scores,
    make_checkpoint,
    references,
)
from test_overlap import lower_thresholds
from workload import Request, run

from nanovllm import LLM, SamplingParams
from nanovllm.attention import flash_import
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.outputs import RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LAYERS = {"num_hidden_layers": 6}
SHAPE = {name: value for name, value in PUBLISHED_SHAPES["Qwen3-0.6B"].items() if name in (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "tie_word_embeddings",
)} | LAYERS  # fmt: skip
BLOCK = OPTIONS["kvcache_block_size"]
NUM_TOKENS = 24
TIGHT_BLOCKS = 5
ROOMY = {"max_num_seqs": 10, "max_model_len": 1024, "max_num_batched_tokens": 1024}
TIGHT = {"num_kvcache_blocks": TIGHT_BLOCKS, "max_num_batched_tokens": 160, "disable": ("lookahead",)}


def make_requests() -> list[Request]:
    """Greedy and sampled in turn; lengths around blocks, a shared beginning, one that needs nearly all TIGHT_BLOCKS."""
    generator = torch.Generator().manual_seed(9)

    def tokens(count: int) -> list[int]:
        return torch.randint(SHAPE["vocab_size"], (count,), generator=generator).tolist()

    shared = tokens(BLOCK)
    prompts = [
        tokens(1), tokens(BLOCK - 1), shared, [*shared, *tokens(1)], [*shared, *tokens(90)], tokens(2 * BLOCK + 3),
        tokens(TIGHT_BLOCKS * BLOCK - NUM_TOKENS), tokens(BLOCK - 5), tokens(40), [*shared, *tokens(BLOCK)],
    ]  # fmt: skip
    return [
        Request(prompt, SamplingParams(temperature=0.8 * (i % 2), max_tokens=NUM_TOKENS, seed=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]


REQUESTS = make_requests()


def drawn_by(requests: list[Request], log_probs: torch.Tensor) -> torch.Tensor:
    """Scores of which each request's tokens are the largest, in the unit of `log_probs`."""
    scores = []
    for request, table in zip(requests, log_probs, strict=True):
        temperature, seed = request.params.temperature, request.params.seed
        assert seed is not None
        scores.append(draw_scores(table, len(request.prompt), temperature, seed) * (temperature or 1.0))
    return torch.stack(scores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with torch.device(DEVICE):
        return make_checkpoint("Qwen3", tmp_path_factory.mktemp("model"), **SHAPE)


KINDS: dict[str, dict[str, Any]] = {
    name: {"attention_backend": name, "disable": ("gemm_kernels",)} for name in ("flash", "triton", "torch")
} | {"kernels for few rows": {}}


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_against_transformers(kind: str, folder: str) -> None:
    """For every output token and the whole vocabulary, prompts cut into chunks: with every backend in one crowd, and in
    crowds of eight and two, which the kernels for few rows serve. The tokens are the best of them."""
    if kind == "flash" and not flash_import.installed():
        pytest.skip("needs flash-attn-4")
    crowds = [REQUESTS] if "attention_backend" in KINDS[kind] else [REQUESTS[:8], REQUESTS[8:]]
    texts, ours = eager_scores(folder, crowds, **{**ROOMY, "max_num_batched_tokens": 512, **KINDS[kind]})
    exact, theirs = references(folder, texts, [request.prompt for request in REQUESTS])
    assert_no_farther(ours, theirs, exact)
    scores = drawn_by(REQUESTS, ours)
    assert (scores.amax(-1) - scores.gather(-1, torch.tensor(texts)[..., None])[..., 0]).max() < 1e-3


@dataclass(frozen=True)
class Reference:
    """Eager steps of the default backend, with the library's matrix products."""

    texts: list[list[int]]
    scores: torch.Tensor
    bound: float
    """Bounds on how far one of two scores may be behind where two runs part."""

    def assert_same(self, llm: LLM, *crowds: list[int]) -> list[RequestOutput]:
        """Runs the requests of these numbers, one crowd after another."""
        outputs = [output for crowd in crowds for output in run(llm, [REQUESTS[i] for i in crowd])]
        picked = [i for crowd in crowds for i in crowd]
        texts = [self.texts[i] for i in picked]
        assert_parts_only_at_ties([one.token_ids for one in outputs], texts, self.scores[picked], self.bound)
        return outputs


@pytest.fixture(scope="module")
def reference(folder: str) -> Reference:
    texts, ours = eager_scores(folder, [REQUESTS], **ROOMY, disable=("gemm_kernels",))
    exact, theirs = references(folder, texts, [request.prompt for request in REQUESTS])
    return Reference(texts, drawn_by(REQUESTS, ours), 2 * (theirs - exact).abs().max().item())


SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "graphs, tight": TIGHT,
    "graphs on the triton backend": {"attention_backend": "triton"},
    "graphs, ordinary launches": {"disable": ("pdl",)},
    "plain kernels": {"disable": ("fused_kernels",)},
    "eager, tight, synchronous": {**TIGHT, "enforce_eager": True, "disable": ("lookahead", "async_scheduling")},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, tight, NCCL": {**TIGHT, "tensor_parallel_size": 2, "disable": ("lookahead", "peer_all_reduce")},
    "four ranks": {"tensor_parallel_size": 4},
    "two ranks, eager, tight, in halves": {
        **TIGHT, "tensor_parallel_size": 2, "enforce_eager": True,
        "disable": ("lookahead", "gemm_kernels"),  # their parts of sums are for fewer rows than real halves have
    },
}


def require_gpus(ranks: int, shared: bool) -> None:
    """Skips where there are fewer; `shared`: where two ranks a GPU, which take turns, are not enough either."""
    if DEVICE == "cuda" and ranks > torch.cuda.device_count() * (2 if shared else 1):
        pytest.skip(f"needs {ranks // 2 if shared else ranks} GPUs")


@pytest.mark.parametrize("name", SETTINGS)
def test_same_tokens(name: str, folder: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a crowd on an empty cache, again in another order with hits, in a smaller crowd, and alone; graphs, chunks and
    preemption on the way where the setting has them. Then with other weights in the same memory, which give other
    texts, and with the old ones again."""
    options = {**OPTIONS, **ROOMY, **SETTINGS[name]}
    require_gpus(options.get("tensor_parallel_size", 1), "peer_all_reduce" not in options.get("disable", ()))
    lower_thresholds(monkeypatch, min_rows=32, cut_multiple=16)  # of halves
    everybody = list(range(len(REQUESTS)))
    with LLM(folder, **options) as llm:
        witness = StepWitness().watch(llm)
        reference.assert_same(llm, everybody)
        if llm.config.num_kvcache_blocks == TIGHT_BLOCKS:
            assert witness.num_partial_chunks > 0
            assert witness.num_rows_after_preemption > 0
        captured = not llm.config.enforce_eager and llm.config.uses("fused_kernels") and DEVICE == "cuda"
        assert (llm.engine_info()["cuda_graphs"] > 0) == captured
        assert sum(output.num_cached_tokens for output in reference.assert_same(llm, everybody[::-1])) > 0
        reference.assert_same(llm, everybody[:8])
        reference.assert_same(llm, [3], [4], [5])
        weights = load_file(Path(folder) / "model.safetensors")
        llm.load_weights((name, -value if name == "model.norm.weight" else value) for name, value in weights.items())
        for output, text in zip(run(llm, REQUESTS), reference.texts, strict=True):
            assert output.num_cached_tokens == 0 or output.prompt_token_ids[:BLOCK] == REQUESTS[2].prompt
            assert output.token_ids != text
        llm.load_weights(weights.items())
        reference.assert_same(llm, everybody)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_on_8b(ranks: int) -> None:
    """Several ranks give the texts of one; and from graphs the same tokens every time, to the last."""
    require_gpus(ranks, shared=True)
    options = {**OPTIONS, **ROOMY, "load_format": "dummy", "hf_overrides": LAYERS}
    texts, ours = eager_scores("Qwen3-8B", [REQUESTS], **options)
    with LLM("Qwen3-8B", **options, enable_prefix_caching=False, tensor_parallel_size=ranks) as llm:
        first, second = ([output.token_ids for output in run(llm, REQUESTS)] for _ in range(2))
    assert first == second
    # Logits of these weights have a standard deviation of 1.28, of which bfloat16 moves one by a few hundredths.
    assert_parts_only_at_ties(first, texts, drawn_by(REQUESTS, ours), 0.4)
