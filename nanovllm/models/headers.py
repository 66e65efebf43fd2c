"""Names, types and shapes of a checkpoint's tensors without the tensors: from the headers of its files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from nanovllm.errors import short
from nanovllm.layers.weights import CheckpointWeight, DerivedTensor
from nanovllm.model_config import ModelConfig
from nanovllm.models.checkpoint import FILE_DTYPES, HEAD, check_names, open_checkpoint
from nanovllm.models.packed_tensors import CheckpointReader
from nanovllm.models.registry import names_of

_META = torch.device("meta")


def _header(shape: Sequence[int], dtype: torch.dtype) -> DerivedTensor:
    """A tensor whose contents cannot be read."""

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        size = list(shape) or [1]
        size[dim] = length
        return torch.empty(size, dtype=dtype, device=_META)

    return DerivedTensor(torch.Size(shape), dtype, narrow)


def headers_of_folder(folder: Path) -> dict[str, DerivedTensor]:
    """Empty where there are no files; raises ValueError as opening them does."""
    return {name: _header(one.shape, one.dtype) for name, one in open_checkpoint(folder, None).items()}


def headers_of_hub(model: str, revision: str | None = None) -> dict[str, DerivedTensor]:
    """Headers of a repository's tensors by name, from a few ranges of its files. Raises FileNotFoundError if the hub
    does not give them."""
    from huggingface_hub import get_safetensors_metadata

    try:
        metadata = get_safetensors_metadata(model, revision=revision)
    except Exception as error:  # of several kinds
        raise FileNotFoundError(f"model={model!r}: no headers of safetensors: {short(error)}") from error
    found = {}
    for file, contents in metadata.files_metadata.items():
        for name, info in contents.tensors.items():
            if metadata.weight_map.get(name, file) != file:
                continue
            if info.dtype not in FILE_DTYPES:
                raise ValueError(f"weight {name!r} has type {info.dtype}: must be one of {', '.join(FILE_DTYPES)}")
            found[name] = _header(info.shape, FILE_DTYPES[info.dtype])
    return found


def check_headers(
    weights: list[CheckpointWeight], model: ModelConfig, headers: Mapping[str, DerivedTensor], dtype: torch.dtype
) -> None:
    """Raises ValueError as loading into `weights` does for names that are missing or surplus, and for shapes and types
    that are not those of the configuration. dtype: the model's."""
    given = names_of(model).select(headers.items())
    found = dict(CheckpointReader(model, weights, dtype, _META).read(given, wide=False))
    check_names(weights, found, model.tie_word_embeddings)
    for weight in weights:
        if not weight.is_scale and weight.name != HEAD:
            weight.check(found[weight.name])
