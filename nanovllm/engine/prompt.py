"""A prompt as engines take it. No torch, no numpy: the front makes some too."""

import msgspec

from nanovllm.engine.prefix_keys import Extras


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt and all that is known of it, from where it is read to the rows that it is computed in."""

    token_ids: list[int]
    extras: Extras = ()
    """Digests of what its keys and values depend on beside the tokens (prefix_keys.py)."""
    text: str | None = None
    """Text that it was given as, for who asks: engines elsewhere do not get it."""

    def __len__(self) -> int:
        return len(self.token_ids)
