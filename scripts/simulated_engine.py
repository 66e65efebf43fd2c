"""An engine process without an engine, for bench_front.py: every row gains a token each 1/--rate seconds.

Started by the front in place of nanovllm.serve.engine_process. Its options: {"rate": steps a second, "text": ids}.
"""

import os
import queue
import socket
import sys
import threading
import time
from typing import Any

from nanovllm.serve import frames


class _Row:
    def __init__(self, request_id: int, row: int, max_tokens: int, text: list[int]) -> None:
        self.request_id, self.row, self.left, self.text = request_id, row, max_tokens, text
        self.at = row % len(text)

    def next_token(self) -> int:
        self.at = (self.at + 1) % len(self.text)
        self.left -= 1
        return self.text[self.at]


class Simulator:
    """Rows in flight, and the clock that they follow."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rows: dict[int, _Row] = {}
        self._open: dict[int, int] = {}
        """Completions of each request that have not ended."""

    def run(self) -> None:
        threading.Thread(target=self._receive, daemon=True).start()
        start = self._inbox.get()
        self._text, rate = start.options["text"], start.options["rate"]
        info = {"max_model_len": 1 << 20, "max_num_seqs": 4096, "vocab_size": 1024, "eos_token_ids": [1023]}
        self._send(frames.Progress("simulating", 50, start.model))
        self._send(frames.Ready(info | {"num_kv_tokens": 1 << 30}))
        deadline = time.monotonic()
        while True:
            if not self._rows:
                self._take(self._inbox.get())
                deadline = time.monotonic()
            while not self._inbox.empty():
                self._take(self._inbox.get())
            deadline += 1 / rate
            time.sleep(max(0.0, deadline - time.monotonic()))
            self._send(self._step())

    def _receive(self) -> None:
        buffer = frames.FrameBuffer()
        while data := self._link.recv(1 << 18):
            for body in buffer.feed(data):
                self._inbox.put(frames.down_decoder.decode(body))
        os._exit(0)

    def _take(self, frame: Any) -> None:
        if isinstance(frame, frames.Add):
            n = frame.params.get("n", 1)
            self._open[frame.request_id] = n
            for row in range(frame.request_id, frame.request_id + n):
                self._rows[row] = _Row(frame.request_id, row, frame.params["max_tokens"], self._text)
        elif isinstance(frame, frames.Abort):
            self._open.pop(frame.request_id, None)
            self._rows = {i: row for i, row in self._rows.items() if row.request_id != frame.request_id}

    def _step(self) -> frames.Step:
        step = frames.Step([], [])
        for row in list(self._rows.values()):
            token = row.next_token()
            if row.left:
                step.rows.append(row.row)
                step.tokens.append(token)
                continue
            del self._rows[row.row]
            step.finishes.append(frames.Finish(row.row, token, "length", None))
            self._open[row.request_id] -= 1
            if not self._open[row.request_id]:
                del self._open[row.request_id]
                step.done.append(frames.Done(row.request_id, 0, 0.0, 0.0, 0.0))
        return step

    def _send(self, frame: frames.Frame) -> None:
        self._link.sendall(frames.pack(frame))


if __name__ == "__main__":
    Simulator(frames.opened(socket.socket(fileno=int(sys.argv[1])))).run()
