"""Readers of checkpoints whose matrices are packed, by the format."""

from collections.abc import Iterable
from typing import Protocol

import torch

from nanovllm.layers.weights import CheckpointWeight, TensorSource
from nanovllm.model_config import ModelConfig
from nanovllm.models.int4_tensors import Int4Reader
from nanovllm.models.mxfp4 import MXFP4Reader


class PackedReader(Protocol):
    """Translation of a checkpoint's tensors for a model that holds some matrices in 4 bits."""

    def read(self, tensors: Iterable[tuple[str, TensorSource]], wide: bool = True) -> list[tuple[str, TensorSource]]:
        """A checkpoint's (name, tensor) pairs by the names of the model's weights. wide: matrices in a wide type are
        quantised; else they raise ValueError, as do types and shapes that are none of the format's."""
        ...


def reader_for(
    config: ModelConfig, weights: Iterable[CheckpointWeight], dtype: torch.dtype, device: torch.device
) -> PackedReader | None:
    """Reader for a model with layers in 4 bits; None where there are none. dtype: the model's."""
    made = next((spec.quantization for spec in config.layers if spec.quantization is not None), None)
    if made is None or made.method == "fp8":
        return None
    if made.method == "int4":
        return Int4Reader(weights, made, dtype, device)
    return MXFP4Reader(weights, made, config, device)
