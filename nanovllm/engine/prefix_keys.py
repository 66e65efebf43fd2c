"""Keys of blocks: digests of all that the keys and values in a block depend on.

That is the block's tokens, the tokens before them, and the extras of the text: digests of what else changes keys and
values, each by the position from which on it does. A cache_salt is one, at position 0. The digest is a cryptographic
one: two blocks with one key hold the same text, whoever made it.
"""

from array import array
from hashlib import blake2b

KEY_SIZE = 16
"""Bytes of a key."""
Extras = tuple[tuple[int, bytes], ...]
"""(position, digest), by ascending position."""
_ROOT = bytes(KEY_SIZE)


def _digest(content: bytes, kind: bytes = b"") -> bytes:
    return blake2b(content, digest_size=KEY_SIZE, person=kind).digest()


def extras_of(cache_salt: str | None, adapter: str | None = None) -> Extras:
    """Extras of a text with this cache_salt and the adapter of this digest, if it has them."""
    salt = () if cache_salt is None else ((0, _digest(cache_salt.encode("utf-8", "surrogatepass"), b"salt")),)
    return salt if adapter is None else (*salt, (0, _digest(adapter.encode(), b"adapter")))


def before_block(keys: list[bytes], index: int, block_size: int, extras: Extras) -> bytes:
    """KEY_SIZE bytes that identify all that block `index` depends on except its own tokens. `keys`: keys of the blocks
    before it, at least."""
    parent = keys[index - 1] if index else _ROOT
    digests = [digest for position, digest in extras if index * block_size <= position < (index + 1) * block_size]
    return _digest(parent + b"".join(digests), b"extras") if digests else parent


def extend_keys(keys: list[bytes], token_ids: list[int], num_blocks: int, block_size: int, extras: Extras = ()) -> None:
    """Extends `keys`, the keys of a text's first blocks, to `num_blocks` of them; their tokens must be there."""
    first = len(keys)
    if first >= num_blocks:
        return
    tokens = array("I", token_ids[first * block_size : num_blocks * block_size]).tobytes()  # faster than signed ones
    assert len(tokens) == 4 * block_size * (num_blocks - first)
    for index in range(first, num_blocks):
        begin = 4 * block_size * (index - first)
        before = before_block(keys, index, block_size, extras)
        keys.append(_digest(before + tokens[begin : begin + 4 * block_size]))


def prefix_keys(token_ids: list[int], block_size: int, extras: Extras = ()) -> list[bytes]:
    """Keys of the full blocks of a text: equal where a PrefixCache would share the block."""
    keys: list[bytes] = []
    extend_keys(keys, token_ids, len(token_ids) // block_size, block_size, extras)
    return keys
