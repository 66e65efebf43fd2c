"""A trainer in a process of its own. Arguments: group or bucket, a checkpoint's folder, init_info as JSON, a device.

It writes what the receiver's `update` is to take, a line at a time, and waits for an answer to each.
"""

import json
import sys

from safetensors.torch import load_file

from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.receiver import WeightSender
from nanovllm.transfer.shared import SharedBucket

kind, folder, init_info, device = sys.argv[1:]
weights = load_file(f"{folder}/model.safetensors", device=device)
if kind == "group":
    sender = WeightSender(json.loads(init_info), device, timeout=60)
    print(json.dumps(described([Entry.of(*pair) for pair in weights.items()])), flush=True)
    sender.send(weights.items())
    sys.stdin.readline()
    sender.close()
else:
    bucket = SharedBucket(2 * max(tensor.nbytes for tensor in weights.values()), device)
    for message in bucket.messages(weights.items()):
        print(json.dumps(message), flush=True)
        sys.stdin.readline()
    bucket.close()
