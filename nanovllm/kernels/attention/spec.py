"""Description of one kind of attention layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of one kind of attention layer. Head counts are this rank's."""

    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores, before the soft-cap."""
    window: int | None = None
    """A query at position p sees the keys p - window + 1 .. p; None: all keys up to p."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    has_sinks: bool = False
    """Each query head has one more score, a parameter, that takes part in the softmax and has no value."""
    value_dim: int | None = None
    """Dimensions of a value, which are the first of its key (latent attention); None: values are apart, of head_dim."""

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: must be a multiple of num_kv_heads={self.num_kv_heads}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap={self.softcap}: must be greater than 0")

    @property
    def out_dim(self) -> int:
        """Dimensions of a head's result."""
        return self.value_dim or self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads
