"""Embeddings on the host, float32: computed one after the other, so that no bit of one depends on others. No torch."""

from collections.abc import Iterable

import numpy as np

from nanovllm.errors import is_integer, plain, refuse
from nanovllm.model_config import ModelConfig, Pooling


def finished(vector: np.ndarray, pooling: Pooling) -> np.ndarray:
    """A vector, float32 [dimensions], as `pooling` hands it out; one of zeros stays so."""
    return vector / max(np.linalg.norm(vector), 1e-12) if pooling.normalizes else vector


def pooling_of(model: ModelConfig, dimensions: int | None) -> Pooling:
    """The pooling of a model of embeddings. Raises ValueError where the model is none, or has fewer `dimensions`."""
    if model.pooling is None:
        raise ValueError("runner='generate': must be 'pooling' for embeddings")
    if dimensions is not None and not (is_integer(plain(dimensions)) and 0 < dimensions <= model.hidden_size):
        refuse("dimensions", dimensions, f"an integer in 1..{model.hidden_size} (hidden_size)")
    return model.pooling


def stacked(vectors: Iterable[np.ndarray | None], dimensions: int | None, model: ModelConfig) -> np.ndarray:
    """Vectors of a model of embeddings as one array, float32 [vectors, dimensions], cut after the first `dimensions`.
    Raises RuntimeError where one is None: its request was aborted."""
    found, pooling = [], pooling_of(model, dimensions)
    for vector in vectors:
        if vector is None:
            raise RuntimeError("embed: a request was aborted")
        found.append(vector if dimensions is None else finished(vector[:dimensions], pooling))
    return np.stack(found) if found else np.empty((0, dimensions or model.hidden_size), np.float32)
