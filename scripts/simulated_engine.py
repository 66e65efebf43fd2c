"""An engine without a model, for bench_front.py, bench_bounds.py, bench_replicas.py and the tests of the server.

Run by a front in place of nanovllm.host.program. Its options, also as JSON in SIMULATED_ENGINE: {"text": ids that every
row gains in turn, "shift": ids that each row begins later than the one before, "rate": steps a second, 0 for as many as
it can, "rows": of a step, "stamps": a file to which it adds the moment (time.monotonic(), a double) at which it sends
each step}, and limits of EngineConfig. Where the text has the end token, rows end there.
"""

import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.step import Done, Finish, Step
from nanovllm.host import wire
from nanovllm.host.program import DriverLink

BLOCK_SIZE, BLOCKS = 128, 1 << 16
END = 1023
"""The end token."""


class _Row:
    def __init__(self, request_id: int, row: int, params: dict[str, Any], text: list[int], shift: int) -> None:
        self.request_id, self.row, self.left, self.text = request_id, row, params["max_tokens"], text
        self.ends = not params.get("ignore_eos", False)
        self.at = shift * row - 1

    def next_token(self) -> tuple[int, str]:
        """A token, and why it is the last one, or ""."""
        self.at = (self.at + 1) % len(self.text)
        self.left -= 1
        token = self.text[self.at]
        return token, "stop" if self.ends and token == END else "" if self.left > 0 else "length"


class Simulator:
    """Rows in flight, and the clock that they follow."""

    def __init__(self, link: socket.socket) -> None:
        self._driver = DriverLink(link)
        self._rows: dict[int, _Row] = {}
        self._open: dict[int, int] = {}
        """Completions of each request that have not ended."""
        self._alive = 0.0

    def run(self) -> None:
        """Serves until the front leaves, which EOFError says."""
        start = None
        while start is None:
            start = self._driver.next(1.0)
        assert isinstance(start, wire.Start)
        options = json.loads(os.environ.get("SIMULATED_ENGINE", "{}")) | start.options
        self._text, rate, self._most = options["text"], options["rate"], options.get("rows", 1 << 30)
        self._shift = options.get("shift", 1)
        stamps = os.open(options.get("stamps", os.devnull), os.O_WRONLY | os.O_APPEND)
        limits = {name: options.get(name, most) for name, most in (("max_model_len", 1 << 20), ("max_num_seqs", 4096))}
        info = {**limits, "runner": "generate", "vocab_size": 1024, "eos_token_ids": [END]}
        self._driver.send(wire.Progress("simulating", 50, start.model))
        memory = {"num_kvcache_blocks": BLOCKS, "num_kv_tokens": BLOCKS * BLOCK_SIZE, "block_size": BLOCK_SIZE}
        self._driver.send(wire.Ready(info | memory | {"page_groups": [(None, 1)]}))
        self._driver.send(Step(stats=EngineStats(iteration_tokens=(0,) * 14)))
        deadline = time.monotonic()
        while True:
            self._take_in(0.0 if self._rows else 1.0)
            if not self._rows:
                deadline = time.monotonic()
                continue
            if rate:
                deadline += 1 / rate
                time.sleep(max(0.0, deadline - time.monotonic()))
                self._take_in(0.0)
            step = self._step()
            sent = time.monotonic()
            self._driver.send(step)
            os.write(stamps, struct.pack("<d", sent))

    def _take_in(self, seconds: float) -> None:
        if time.monotonic() - self._alive > 1.0:
            self._alive = time.monotonic()
            self._driver.send(wire.Alive())
        while (frame := self._driver.next(seconds)) is not None:
            self._take(frame)
            seconds = 0.0

    def _take(self, frame: Any) -> None:
        if isinstance(frame, wire.Add):
            n = frame.params.get("n", 1)
            self._open[frame.request_id] = n
            for row in range(frame.request_id, frame.request_id + n):
                self._rows[row] = _Row(frame.request_id, row, frame.params, self._text, self._shift)
        elif isinstance(frame, wire.Abort):
            self._open.pop(frame.request_id, None)
            self._rows = {i: row for i, row in self._rows.items() if row.request_id != frame.request_id}

    def _step(self) -> Step:
        step = Step()
        for row in list(self._rows.values())[: self._most]:
            token, reason = row.next_token()
            if not reason:
                step.rows.append(row.row)
                step.tokens.append(token)
                continue
            del self._rows[row.row]
            step.finishes.append(Finish(row.row, token, reason, None))
            self._open[row.request_id] -= 1
            if not self._open[row.request_id]:
                del self._open[row.request_id]
                step.done.append(Done(row.request_id))
        return step


def simulate(link: socket.socket) -> None:
    """Runs a simulator until its front has left."""
    with link, suppress(EOFError, OSError):
        Simulator(link).run()


if __name__ == "__main__":
    simulate(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)
