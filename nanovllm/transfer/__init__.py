"""Weights from a trainer in another process: through memory that both map, or broadcast over a group that both join."""
