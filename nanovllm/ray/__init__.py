"""For programs of Ray: `Predictor` for Ray Data, `app` for Ray Serve."""

from nanovllm.ray.predictor import Predictor
from nanovllm.ray.serving import app

__all__ = ["Predictor", "app"]
