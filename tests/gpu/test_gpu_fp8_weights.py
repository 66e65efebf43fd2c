"""FP8 weights on a GPU: the log-probability of every token of prompts and texts against the definition of FP8 products
in float64, by tensor cores, CUDA cores and cuBLAS, in graphs, chunks and on two ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import BLOCKS, FILE, by_definition, quantize
from safetensors.torch import load_file, save_file
from small_models import DEVICE, GREEDY, NO_FARTHER, OPTIONS, OUTLIER, PROMPTS, load_model, make_checkpoint

from nanovllm import LLM
from nanovllm.kernels.fp8.reference import BLOCK
from nanovllm.models.quantized_modules import PARTS
from nanovllm.outputs import RequestOutput

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCORED = replace(GREEDY, prompt_logprobs=0, logprobs=0)
CACHED = replace(GREEDY, logprobs=0)
SETTINGS: dict[str, dict[str, Any]] = {
    "graphs": {}, "library": {"disable": ("gemm_kernels",)},
    "chunks": {"num_kvcache_blocks": 7, "disable": ("lookahead",), "max_num_batched_tokens": 160},
    "plain kernels": {"disable": ("fused_kernels",)}, "two ranks": {"tensor_parallel_size": 2},
}  # fmt: skip


def scores(outputs: Sequence[RequestOutput]) -> torch.Tensor:
    """Ours, of the tokens of all texts, and of their prompts where they are asked for; float64, as all here."""
    found = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        tables = [*(output.prompt_logprobs or [None]), *(output.outputs[0].logprobs or [])]
        found += [table[token].logprob for table, token in zip(tables, tokens[-len(tables) :], strict=True) if table]
    return torch.tensor(found, dtype=torch.float64)


@torch.inference_mode()
def scores_by(model: Any, outputs: Sequence[RequestOutput]) -> torch.Tensor:
    """A model's, of the same tokens."""
    found = []
    for output in outputs:
        tokens = torch.tensor([[*output.prompt_token_ids, *output.token_ids]], device=DEVICE)
        table = model(tokens[:, :-1]).logits[0].double().log_softmax(-1)
        of_all = table.gather(1, tokens[0, 1:, None])[:, 0].cpu()
        found.append(of_all if output.prompt_logprobs else of_all[-len(output.token_ids) :])
    return torch.cat(found)


def uneven_checkpoint(folder: Path) -> str:
    """Blocks of its weights are a factor of 4 apart, so that a scale in another's place is seen."""
    path = Path(make_checkpoint("llama", folder)) / FILE
    tensors, draw = load_file(path), torch.Generator().manual_seed(1)
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            factors = 4.0 ** torch.randint(2, [-(-size // BLOCK) for size in weight.shape], generator=draw) / 2
            blocks = factors.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            weight *= blocks[: weight.shape[0], : weight.shape[1]]
    save_file(tensors, path, {"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("part", PARTS)
def test_products_of_one_layer_in_float32(part: str, tmp_path: Path) -> None:
    """Nothing else is rounded to e4m3: that would make differences of 1e-2 of those of 1e-4 that tensor cores may make.
    Activations that are not rounded, or by another scale, move the median by 1e-2 and more, one scale that is 10 % off
    by 6e-3 and more."""
    folder = uneven_checkpoint(tmp_path)
    model = load_model(folder, torch.float64)
    paths = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    quantised = tuple(f"layers.1.{module}" for module in PARTS[part])
    config = {**BLOCKS, "modules_to_not_convert": [path for path in paths if not path.endswith(quantised)]}
    by_definition(model, config)
    quantize(tmp_path, config)
    with LLM(folder, **{**OPTIONS, "dtype": "float32", "max_num_batched_tokens": 160}) as llm:
        rounds = [llm.generate(PROMPTS, SCORED, use_tqdm=False), llm.generate(PROMPTS, CACHED, use_tqdm=False)]
        rounds += [llm.generate([prompt], SCORED, use_tqdm=False) for prompt in PROMPTS[:3]]
    for outputs in rounds:
        error = (scores(outputs) - scores_by(model, outputs)).abs()
        assert error.median() < 3e-3 and error.max() < 0.1, (error.median(), error.max())


def test_all_layers_in_bfloat16(tmp_path: Path) -> None:
    """No farther from float64 than the definition in bfloat16, which is far: scales in others' places are seen,
    not roundings."""
    folder = uneven_checkpoint(tmp_path)
    exact, rounded = (by_definition(load_model(folder, dtype), None) for dtype in (torch.float64, torch.bfloat16))
    for name, options in SETTINGS.items():
        with LLM(folder, **{**OPTIONS, "quantization": "fp8", **options}) as llm:
            rounds = [llm.generate(PROMPTS, params, use_tqdm=False) for params in (SCORED, CACHED)]
        for outputs in rounds:
            truth = scores_by(exact, outputs)
            error, noise = ((found - truth).abs() for found in (scores(outputs), scores_by(rounded, outputs)))
            assert error.square().mean().sqrt() <= NO_FARTHER * noise.square().mean().sqrt(), name
            assert error.median() <= NO_FARTHER * noise.median() and error.max() <= OUTLIER * noise.max(), name
