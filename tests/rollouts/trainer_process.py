"""A trainer in a process of its own. Arguments: how it sends, a checkpoint's folder, init_info as JSON, a device.

group: it broadcasts; bucket: it fills shared memory; sharded: the same, from a model that FSDP2 shards over this
process and another. It writes what the receiver's `update` is to take, a line at a time, and waits for an answer
to each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.receiver import WeightSender
from nanovllm.transfer.shared import SharedBucket


def send_in_buckets(weights: Iterable[tuple[str, torch.Tensor]], nbytes: int, device: str) -> None:
    bucket = SharedBucket(nbytes, device)
    for message in bucket.messages(weights):
        print(json.dumps(message), flush=True)
        sys.stdin.readline()
    bucket.close()


def send_sharded(folder: str, rank: int, port: int) -> None:
    """Rank 1 sends nothing, but has to be there when a parameter is gathered."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    parameters = list(model.state_dict().items())
    if rank == 0:
        send_in_buckets(parameters, 1 << 20, "cpu")
    else:
        for _, parameter in parameters:
            parameter.full_tensor()
    dist.destroy_process_group()


kind, folder, init_info, device = sys.argv[1:]
if kind == "sharded":
    rank, port = int(os.environ.get("RANK", 0)), json.loads(init_info)["master_port"]
    if rank == 0:
        with subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": "1"}):
            send_sharded(folder, rank, port)
    else:
        send_sharded(folder, rank, port)
    sys.exit()

weights = load_file(f"{folder}/model.safetensors", device=device)
if kind == "group":
    sender = WeightSender(json.loads(init_info), device, timeout=60)
    print(json.dumps(described([Entry.of(*pair) for pair in weights.items()])), flush=True)
    sender.send(weights.items())
    sys.stdin.readline()
    sender.close()
else:
    send_in_buckets(weights.items(), 2 * max(tensor.nbytes for tensor in weights.values()), device)
