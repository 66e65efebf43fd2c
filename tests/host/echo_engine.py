"""An engine that says each frame three times, and reads nothing while it cannot send; a Rouse ends its connection, but
not its process. And, without a file number, a driver that never listens: it forks, which leaves its socket open, and is
killed."""

import os
import signal
import socket
import sys
import time

from nanovllm.host import wire
from nanovllm.host.handle import Handle
from nanovllm.processes.framing import LENGTH, FrameBuffer

DEMO = os.path.join(os.path.dirname(wire.__file__), "..", "demo_model")


def echo(link: socket.socket) -> None:
    buffer, starts = FrameBuffer(), True
    while data := link.recv(1 << 18):
        for body in buffer.feed(data):
            if starts:  # the driver's first frame
                starts = False
                continue
            if isinstance(wire.down_decoder.decode(body), wire.Rouse):
                link.close()
                time.sleep(120)
                os._exit(1)
            link.sendall((LENGTH.pack(len(body)) + bytes(body)) * 3)


def drive() -> None:
    handle = Handle(wire.Start(DEMO, {"device": "cpu", "num_kvcache_blocks": 64, "skip_tokenizer_init": True}))
    pid = handle.process.pid  # it is started: the fork has one end of its connection
    if (fork := os.fork()) == 0:
        time.sleep(120)
        os._exit(0)
    if sys.argv[1] == "loaded":
        deadline = time.monotonic() + 100
        while not any(isinstance(frame, wire.Ready) for frame in handle.receive()) and time.monotonic() < deadline:
            time.sleep(0.05)
    print(pid, fork, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        echo(socket.socket(fileno=int(sys.argv[1])))
    else:
        drive()
