"""In bfloat16 on GPUs, on the 0.6B shape with random weights: log-probabilities against transformers, and the same
tokens on every path.

Bfloat16 has no bound that could be known beforehand, so transformers gives it: its float32 model is the truth, and its
own bfloat16 model says how far from that a right computation ends up. Ours must be no farther, up to a factor. Two of
our runs may part only where the reference's best two scores are nearer than that noise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from checkpoints import make_model, save
from observing import LogitRecorder, StepWitness, draw_scores
from test_overlap import lower_thresholds
from transformers import Qwen3ForCausalLM
from workload import Request, run

from nanovllm import LLM, SamplingParams
from nanovllm.attention import AttentionSpec, select_backend
from nanovllm.models.published import PUBLISHED_SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

DEVICE = "cuda"
SHAPE = {name: PUBLISHED_SHAPES["Qwen3-0.6B"][name] for name in (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)}
BLOCK = 128
NUM_TOKENS = 24
TIGHT_BLOCKS = 5
NO_FARTHER = 1.5
"""Times the root mean square error of transformers' own bfloat16 log-probabilities."""
OUTLIER = 3.0
"""Times its largest error: what any of our log-probabilities may be off."""
COMPARED_SHARE = 0.2
"""Of all tokens, that at least lie before the first near tie at which two runs part."""
OPTIONS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "kvcache_block_size": BLOCK,
    "num_kvcache_blocks": 64,
    "share_gpus": True,
    "max_model_len": 1024,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 1024,
}
DUMMY: dict[str, Any] = {**OPTIONS, "load_format": "dummy", "enforce_eager": True}
TIGHT = {"num_kvcache_blocks": TIGHT_BLOCKS, "max_num_batched_tokens": 160, "disable": ("lookahead",)}


def make_requests() -> list[Request]:
    """Greedy and sampled in turn; lengths around blocks, a shared beginning, one that needs nearly all TIGHT_BLOCKS."""
    generator = torch.Generator().manual_seed(9)

    def tokens(count: int) -> list[int]:
        return torch.randint(SHAPE["vocab_size"], (count,), generator=generator).tolist()

    shared = tokens(BLOCK)
    prompts = [
        tokens(1),
        tokens(BLOCK - 1),
        shared,
        [*shared, *tokens(1)],
        [*shared, *tokens(90)],
        tokens(2 * BLOCK + 3),
        tokens(TIGHT_BLOCKS * BLOCK - NUM_TOKENS),
        tokens(BLOCK - 5),
        tokens(40),
        [*shared, *tokens(BLOCK)],
    ]
    return [
        Request(prompt, SamplingParams(temperature=0.8 * (i % 2), max_tokens=NUM_TOKENS, seed=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]


REQUESTS = make_requests()


@dataclass(frozen=True)
class Text:
    """A request's tokens, and the logits float32 [n, vocab_size] that they were drawn from."""

    token_ids: list[int]
    logits: torch.Tensor


@dataclass(frozen=True)
class Noise:
    """Errors of transformers' bfloat16 log-probabilities against its float32 ones."""

    rms: float
    largest: float


class Transformers:
    """The same checkpoint in transformers, in both types."""

    def __init__(self, folder: str) -> None:
        load = Qwen3ForCausalLM.from_pretrained
        self._models = [load(folder, dtype=dtype).to(DEVICE).eval() for dtype in (torch.float32, torch.bfloat16)]

    @torch.inference_mode()
    def log_probs(self, prompt: list[int], output: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32, bfloat16 model's), each [len(output), vocab_size] on the CPU: where each output token is drawn."""
        tokens = torch.tensor([prompt + output], device=DEVICE)
        wanted = slice(len(prompt) - 1, len(prompt) + len(output) - 1)
        exact, rounded = (model(tokens).logits[0, wanted].float().log_softmax(-1).cpu() for model in self._models)
        return exact, rounded

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach() for name, value in self._models[1].state_dict().items()}


def backends() -> list[str]:
    """Those that are installed and can run here."""
    spec = AttentionSpec(SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"], scale=1.0)
    found = []
    for name in ("flash", "triton", "torch"):
        try:
            select_backend(name, [spec], device=DEVICE, dtype=torch.bfloat16, block_size=BLOCK)
            found.append(name)
        except ValueError:
            continue
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with torch.device(DEVICE):
        model = make_model(seed=6, weight_std=0.04, **SHAPE, max_position_embeddings=2048)
    path = str(save(model, tmp_path_factory.mktemp("model"), dtype=torch.bfloat16))
    del model
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return path


@pytest.fixture(scope="module")
def reference_model(folder: str) -> Transformers:
    return Transformers(folder)


@pytest.fixture(scope="module")
def eager_texts(folder: str) -> dict[str, list[Text]]:
    """The requests in eager steps whose logits are seen, prompts cut into chunks: with every backend in one crowd, and
    in crowds of eight and two, which the kernels for few rows serve."""
    texts = {}
    settings: dict[str, dict[str, Any]] = {
        name: {"attention_backend": name, "disable": ("gemm_kernels",)} for name in backends()
    }
    settings["few-row kernels"] = {}
    for label, options in settings.items():
        crowds = [REQUESTS] if "attention_backend" in options else [REQUESTS[:8], REQUESTS[8:]]
        with LLM(folder, **{**OPTIONS, "max_num_batched_tokens": 512, "enforce_eager": True, **options}) as llm:
            recorder, witness = LogitRecorder(llm), StepWitness().watch(llm)
            outputs = [output for crowd in crowds for output in run(llm, crowd)]
            assert witness.num_partial_chunks > 0
            assert llm.engine_info()["attention_backend"] == options.get("attention_backend", backends()[0])
        texts[label] = [
            Text(output.token_ids, recorder.of(output.request_id, len(request.prompt), NUM_TOKENS))
            for request, output in zip(REQUESTS, outputs, strict=True)
        ]
    return texts


@pytest.fixture(scope="module")
def reference(eager_texts: dict[str, list[Text]]) -> list[Text]:
    """The first backend's, which "auto" would choose, with the library's matrix products."""
    return next(iter(eager_texts.values()))


@pytest.fixture(scope="module")
def noise(reference: list[Text], reference_model: Transformers) -> Noise:
    squares, largest, count = 0.0, 0.0, 0
    for request, text in zip(REQUESTS, reference, strict=True):
        exact, rounded = reference_model.log_probs(request.prompt, text.token_ids)
        error = rounded - exact
        squares += error.double().square().sum().item()
        largest = max(largest, error.abs().max().item())
        count += error.numel()
    return Noise((squares / count) ** 0.5, largest)


def test_log_probabilities_against_transformers(
    eager_texts: dict[str, list[Text]],
    reference_model: Transformers,
    noise: Noise,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of every backend and kernel choice, for every output token and the whole vocabulary; and the greedy tokens are
    the float32 model's best wherever its best two are farther apart than the noise."""
    figures = [f"transformers in bfloat16: rms {noise.rms:.5f}, largest {noise.largest:.4f}"]
    for backend, texts in eager_texts.items():
        squares, largest, count, best = 0.0, 0.0, 0, 0
        for request, text in zip(REQUESTS, texts, strict=True):
            exact, _ = reference_model.log_probs(request.prompt, text.token_ids)
            error = text.logits.log_softmax(-1) - exact
            squares += error.double().square().sum().item()
            largest = max(largest, error.abs().max().item())
            count += error.numel()
            if not request.params.temperature:
                chosen = exact.gather(1, torch.tensor(text.token_ids).unsqueeze(1)).squeeze(1)
                behind = exact.max(dim=1).values - chosen
                assert behind.max().item() <= 2 * OUTLIER * noise.largest, (backend, behind)
                best += int((behind == 0).sum())
        rms = (squares / count) ** 0.5
        figures.append(f"{backend}: rms {rms:.5f}, largest {largest:.4f}, {best} greedy tokens are the float32 model's")
        assert rms <= NO_FARTHER * noise.rms, figures
        assert largest <= OUTLIER * noise.largest, figures
    with capsys.disabled():
        print("\nlog-probability errors against transformers in float32:", *figures, sep="\n  ")


def assert_parts_only_at_ties(
    token_ids: Sequence[Sequence[int]], requests: Sequence[Request], reference: Sequence[Text], noise: Noise
) -> None:
    """Each text is the reference's up to a token that scores within the noise of the reference's own choice."""
    compared = 0
    for i, (tokens, request, text) in enumerate(zip(token_ids, requests, reference, strict=True)):
        assert len(tokens) == NUM_TOKENS
        differs = (n for n, pair in enumerate(zip(tokens, text.token_ids, strict=True)) if pair[0] != pair[1])
        part = next(differs, NUM_TOKENS)
        compared += part
        if part < NUM_TOKENS:
            params, position = request.params, len(request.prompt) + part
            assert params.seed is not None
            scores = draw_scores(text.logits[part : part + 1], position, params.temperature, params.seed)[0]
            behind = (scores[text.token_ids[part]] - scores[tokens[part]]).item()
            bound = 2 * noise.largest / (params.temperature or 1.0)
            assert behind <= bound, f"request {i} parts at token {part}, where the other choice is behind by {behind}"
    assert compared >= COMPARED_SHARE * NUM_TOKENS * len(requests), f"{compared} tokens compared"


def test_backends_agree(eager_texts: dict[str, list[Text]], reference: list[Text], noise: Noise) -> None:
    """Triton = FlashAttention = plain PyTorch = the kernels for few rows."""
    for texts in eager_texts.values():
        assert_parts_only_at_ties([text.token_ids for text in texts], REQUESTS, reference, noise)


SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "graphs, tight": TIGHT,
    "graphs on the triton backend": {"attention_backend": "triton"},
    "graphs, ordinary launches, copies": {"disable": ("pdl", "mailbox")},
    "plain kernels": {"disable": ("fused_kernels",)},
    "eager, tight, synchronous": {**TIGHT, "enforce_eager": True, "disable": ("lookahead", "async_scheduling")},
    "two ranks": {"tensor_parallel_size": 2},
    "two ranks, tight, NCCL": {**TIGHT, "tensor_parallel_size": 2, "disable": ("lookahead", "peer_all_reduce")},
    "four ranks": {"tensor_parallel_size": 4},
    "two ranks, eager, tight, in halves": {
        **TIGHT,
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "disable": ("lookahead", "gemm_kernels"),  # their parts of sums are for fewer rows than real halves have
    },
}


def require_gpus(ranks: int, shared: bool) -> None:
    """Skips where there are fewer; `shared`: where two ranks a GPU, which take turns, are not enough either."""
    if DEVICE == "cuda" and ranks > torch.cuda.device_count() * (2 if shared else 1):
        pytest.skip(f"needs {ranks // 2 if shared else ranks} GPUs")


@pytest.fixture(scope="module", params=list(SETTINGS.values()), ids=list(SETTINGS))
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    options = request.param
    require_gpus(options.get("tensor_parallel_size", 1), "peer_all_reduce" not in options.get("disable", ()))
    with pytest.MonkeyPatch.context() as patch:
        lower_thresholds(patch, min_rows=32, cut_multiple=16)  # of halves
        with LLM(folder, **{**OPTIONS, **options}) as engine:
            yield engine


def test_same_tokens(llm: LLM, reference: list[Text], noise: Noise) -> None:
    """In a crowd on an empty cache, again in another order with hits, in a smaller crowd, and alone; graphs, chunks and
    preemption on the way where the setting has them."""
    witness = StepWitness().watch(llm)
    outputs = run(llm, REQUESTS)
    assert_parts_only_at_ties([output.token_ids for output in outputs], REQUESTS, reference, noise)
    if llm.config.num_kvcache_blocks == TIGHT_BLOCKS:
        assert witness.num_partial_chunks > 0
        assert witness.num_rows_after_preemption > 0
    captured = not llm.config.enforce_eager and llm.config.uses("fused_kernels") and DEVICE == "cuda"
    assert (llm.engine_info()["cuda_graphs"] > 0) == captured
    outputs = run(llm, REQUESTS[::-1])
    assert any(output.num_cached_tokens for output in outputs)
    assert_parts_only_at_ties([output.token_ids for output in outputs], REQUESTS[::-1], reference[::-1], noise)
    outputs = run(llm, REQUESTS[:8])
    assert_parts_only_at_ties([output.token_ids for output in outputs], REQUESTS[:8], reference[:8], noise)
    alone = [run(llm, [request])[0].token_ids for request in REQUESTS[3:6]]
    assert_parts_only_at_ties(alone, REQUESTS[3:6], reference[3:6], noise)


def test_weights_replaced_in_place(
    llm: LLM, reference: list[Text], reference_model: Transformers, noise: Noise
) -> None:
    """Graphs go on with what is in the same memory: other weights, other texts; the old weights, the old texts."""
    weights = reference_model.weights()
    requests, texts = REQUESTS, reference
    negated = {name: -value if name == "model.norm.weight" else value for name, value in weights.items()}
    llm.load_weights(negated.items())
    for output, text in zip(run(llm, requests), texts, strict=True):
        assert output.num_cached_tokens == 0 or output.prompt_token_ids[:BLOCK] == REQUESTS[2].prompt
        assert output.token_ids != text.token_ids
    llm.load_weights(weights.items())
    tokens = [output.token_ids for output in run(llm, requests)]
    assert_parts_only_at_ties(tokens, requests, texts, noise)


@pytest.fixture(scope="module", params=["0.6B", "8B"])
def dummy_texts(request: pytest.FixtureRequest) -> tuple[str, list[Text]]:
    """A published shape by name, without a file, on one rank: near ties are those of its logits."""
    shape = f"Qwen3-{request.param}"
    with LLM(shape, **DUMMY) as one:
        recorder = LogitRecorder(one)
        outputs = run(one, REQUESTS)
        texts = [
            Text(output.token_ids, recorder.of(output.request_id, len(request.prompt), NUM_TOKENS))
            for request, output in zip(REQUESTS, outputs, strict=True)
        ]
    return shape, texts


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_on_dummy_weights(dummy_texts: tuple[str, list[Text]], ranks: int) -> None:
    """Several ranks give the texts of one; and from graphs the same tokens every time, to the last."""
    require_gpus(ranks, shared=True)
    shape, texts = dummy_texts
    options = {**DUMMY, "enforce_eager": False, "enable_prefix_caching": False, "tensor_parallel_size": ranks}
    with LLM(shape, **options) as several:
        first, second = ([output.token_ids for output in run(several, REQUESTS)] for _ in range(2))
    assert first == second
    # Logits of these weights have a standard deviation of 0.02 * sqrt(hidden_size), 0.64 on 0.6B and 1.28 on 8B, of
    # which bfloat16 moves one by a few hundredths.
    largest = 0.1 * (several.model_config.hidden_size / 1024) ** 0.5
    assert_parts_only_at_ties(first, REQUESTS, texts, Noise(rms=0.01, largest=largest))
