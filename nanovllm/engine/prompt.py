"""A prompt as engines take it. No torch, no numpy: the front makes some too."""

import msgspec

from nanovllm.engine.prefix_keys import Extras


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """Prompt with all that is known of it, from the reader of a request to its rows."""

    token_ids: list[int]
    extras: Extras = ()
    """Digests of what its keys and values depend on beside the tokens (prefix_keys.py)."""
    text: str | None = None
    """Text that the prompt was given as, for the output; it is not sent to engines in other processes."""

    def __len__(self) -> int:
        return len(self.token_ids)
