"""What a router knows of servers and of requests, by the bytes of their prompts: the costs of replicas/router.py."""

import json
from collections import defaultdict
from typing import Any

import xxhash

from nanovllm.replicas.router import DECODE_COST, HeldPrefixes

_BLOCK = 512  # bytes of a prompt that are held or not together, some 128 tokens
_BLOCK_TOKENS = 128
_OUTPUT_TOKENS = 256  # what a request is expected to generate
_HELD_BLOCKS = 100_000  # of a server, as the router remembers


def prefix_of(body: bytes) -> list[bytes]:
    """Chained hashes of the blocks that a request's prompt begins with; none where it has no prompt."""
    try:
        request = json.loads(body)
        prompt = request.get("messages") or request.get("input") or request.get("prompt") or ""
        text = json.dumps([request.get("system"), request.get("tools"), prompt]).encode()
    except (ValueError, AttributeError):
        return []
    hashes = [b""]
    for begin in range(0, len(text) - _BLOCK + 1, _BLOCK):
        hashes.append(xxhash.xxh3_128_digest(hashes[-1] + text[begin : begin + _BLOCK]))
    return hashes[1:]


class ServerLoads:
    """Loads and held prefixes of the servers that a router sends requests to."""

    def __init__(self) -> None:
        self._held: dict[Any, HeldPrefixes] = defaultdict(lambda: HeldPrefixes(_HELD_BLOCKS))
        self._loads: dict[Any, float] = defaultdict(float)
        self._running: dict[str, tuple[Any, float]] = {}

    def cost(self, server: Any, prefix: list[bytes]) -> float:
        """Tokens to compute for a request, in prompt tokens."""
        missing = len(prefix) - self._held[server].num_hits(prefix)
        return 1 + missing * _BLOCK_TOKENS + DECODE_COST * _OUTPUT_TOKENS

    def order(self, servers: list[Any], prefix: list[bytes]) -> list[Any]:
        """Best first; of equal ones, that which has to compute less."""
        costs = {server: self.cost(server, prefix) for server in servers}
        return sorted(servers, key=lambda server: (self._loads[server] + costs[server], costs[server]))

    def begin(self, server: Any, request: str, prefix: list[bytes]) -> None:
        cost = self.cost(server, prefix)
        self._running[request] = server, cost
        self._loads[server] += cost
        self._held[server].touch(prefix)

    def end(self, request: str) -> None:
        server, cost = self._running.pop(request, (None, 0.0))
        if server in self._loads:
            self._loads[server] -= cost

    def keep(self, servers: set[Any]) -> None:
        """Forgets those that are gone."""
        for known in (self._held, self._loads):
            for server in set(known) - servers:
                del known[server]  # type: ignore[attr-defined]
