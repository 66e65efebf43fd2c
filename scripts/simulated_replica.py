"""A replica without an engine, for bench_replicas.py: every row gains a token at once, in steps of up to 256 rows.

Started by the front in place of nanovllm.replicas.replica.
"""

import os
import pickle
import socket
import sys
from array import array
from typing import Any

from nanovllm.outputs import EngineStats
from nanovllm.replicas.channel import Channel
from nanovllm.replicas.messages import Completed, Counted, Gained, Ready, Start

ROWS = 256
STATS = EngineStats(0, 0, 0.0, 0, 0, 0, 0, 0, {}, (0,) * 14, 0)


def step(rows: dict[int, int]) -> Gained:
    """A token for each of the first ROWS rows; drops those that end. `rows`: tokens that are left, by request."""
    ids = list(rows)[:ROWS]
    ended = {}
    for entry, request_id in enumerate(ids):
        rows[request_id] -= 1
        if not rows[request_id]:
            del rows[request_id]
            ended[entry] = Completed("length", None, 0, 0.0, None, None)
    columns = array("q", ids + [0] * len(ids) + [7] * len(ids))
    return Gained(columns.tobytes(), ended, {})


def main(fd: int) -> None:
    link = Channel(socket.socket(fileno=fd))
    rows: dict[int, int] = {}
    prefilled = decoded = 0

    def take(message: Any) -> None:
        nonlocal prefilled
        if isinstance(message, Start):
            info = {"num_kvcache_blocks": 1 << 16}
            link.send(pickle.dumps(Ready(message.config, info["num_kvcache_blocks"], info)))
        elif message[0] == "add":
            for request_id, prompt, params, _ in message[1]:
                prefilled += len(prompt) // 4
                rows[request_id] = params.max_tokens
        elif message[0] == "leave":
            os._exit(0)

    try:
        while True:
            for message in link.receive(waits=not rows):
                take(message)
            if not rows:
                continue
            decoded += min(len(rows), ROWS)
            gained = step(rows)
            if gained.ended:
                link.send(pickle.dumps(Counted(prefilled, decoded, STATS), pickle.HIGHEST_PROTOCOL))
            link.send(pickle.dumps(gained, pickle.HIGHEST_PROTOCOL))
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
