"""Ray Data: `Predictor`. (Replicas on a Ray cluster: EngineConfig.data_parallel_backend.)"""

from nanovllm.ray.predictor import Predictor

__all__ = ["Predictor"]
