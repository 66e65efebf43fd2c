"""Latent attention; the twin says what it computes."""

from nanovllm.kernels.latent.reference import latent_attention_reference

__all__ = ["latent_attention", "latent_attention_reference"]

latent_attention = latent_attention_reference  # which reads lengths on the host: the mixer is not captured
