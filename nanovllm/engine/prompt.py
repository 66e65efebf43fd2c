"""A prompt as engines take it. No torch, no numpy: the front makes some too."""

import msgspec

from nanovllm.engine.prefix_keys import Extras, extras_of


class Prompt(msgspec.Struct, frozen=True, gc=False):
    """Prompt with all that is known of it, from the reader of a request to its rows."""

    token_ids: list[int]
    extras: Extras = ()
    """Digests of what its keys and values depend on beside the tokens (prefix_keys.py)."""
    text: str | None = None
    """Text that the prompt was given as, for the output; it is not sent to engines in other processes."""
    adapter: str | None = None
    """Digest of the bytes of its adapter (EngineState.adapters); None: it has none."""

    @classmethod
    def of(
        cls, token_ids: list[int], cache_salt: str | None = None, adapter: str | None = None, text: str | None = None
    ) -> "Prompt":
        """A prompt that shares blocks with those of the same salt and adapter alone."""
        return cls(token_ids, extras_of(cache_salt, adapter), text, adapter)

    def __len__(self) -> int:
        return len(self.token_ids)
