"""A replica that says every message back three times, before it reads the next."""

import pickle
import socket
import sys

from nanovllm.replicas.channel import Channel

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
while True:
    for message in channel.receive(waits=True):
        for _ in range(3):
            channel.send(pickle.dumps(message))
