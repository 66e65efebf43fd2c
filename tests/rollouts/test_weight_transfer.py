"""Weights from another process: over a group that is made from an address, and through shared memory."""

import ctypes
import json
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_policy import Policy
from trainer import init_info, take_in

from nanovllm import LLM
from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.group import read_unique_id
from nanovllm.transfer.nccl import Communicator
from nanovllm.transfer.receiver import WeightReceiver, WeightSender
from nanovllm.transfer.shared import FarTensor, MappedBuckets, SharedBucket


@pytest.fixture
def receiver(llm: LLM) -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(llm, "cpu", timeout=60)
    yield receiver
    receiver.close()


def fields(policy: Policy) -> dict[str, Any]:
    return described([Entry.of(name, tensor) for name, tensor in policy.weights.items()])


def checksum_of(llm: LLM, policy: Policy) -> dict[str, str]:
    llm.load_weights(policy.weights.items())
    return llm.checksum()


@pytest.mark.parametrize("packed", [{}, {"packed": True, "packed_buffer_size_bytes": 50_000}], ids=["single", "packed"])
def test_a_trainer_broadcasts(
    llm: LLM, receiver: WeightReceiver, policies: tuple[Policy, Policy], packed: dict[str, Any]
) -> None:
    before, info = checksum_of(llm, policies[0]), init_info(**packed)

    def train() -> None:
        sender = WeightSender(info, "cpu", timeout=60)
        sender.send(policies[1].weights.items())
        sender.close()

    with ThreadPoolExecutor() as trainer:
        sent = trainer.submit(train)
        receiver.init(info)
        version = llm.weight_version
        receiver.start()
        receiver.update(fields(policies[1]))
        assert receiver.finish() == version + 1 == llm.weight_version
        sent.result()
    found = llm.checksum()
    assert found != before and found == checksum_of(llm, policies[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["group", "bucket", "sharded"])
def test_a_trainer_in_another_process(
    llm: LLM, receiver: WeightReceiver, policies: tuple[Policy, Policy], kind: str
) -> None:
    llm.load_weights(policies[0].weights.items())
    take_in(receiver, kind, policies[1].folder, init_info(), "cpu")
    assert llm.checksum() == checksum_of(llm, policies[1])


def test_a_bucket_is_shared(llm: LLM, receiver: WeightReceiver, policies: tuple[Policy, Policy]) -> None:
    """Filled as often as it takes; every message goes through JSON."""
    bucket = SharedBucket(max(tensor.nbytes for tensor in policies[1].weights.values()), "cpu")
    receiver.start()
    messages = [receiver.update(json.loads(json.dumps(one))) for one in bucket.messages(policies[1].weights.items())]
    receiver.finish()
    bucket.close()
    assert len(messages) > 1
    assert llm.checksum() == checksum_of(llm, policies[1])


def test_a_tensor_must_fit_a_bucket() -> None:
    bucket = SharedBucket(100, "cpu")
    with pytest.raises(ValueError, match="nbytes=100: must be at least the 400 of 'wide'"):
        list(bucket.messages([("wide", torch.zeros(100))]))


def test_a_bucket_for_which_there_is_no_room_leaves_no_file() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError):
        SharedBucket(1 << 62, "cpu")
    assert os.listdir("/proc/self/fd") == before


def test_a_bucket_is_not_taken_for_one_before_it() -> None:
    """That had the same name, in an update that was not finished."""
    mapped, names = MappedBuckets(torch.device("cpu")), set()
    for value in (1.0, 2.0):
        bucket = SharedBucket(16, "cpu")
        message = bucket.fill([("w", torch.full([4], value))])
        [(_, tensor)] = mapped.tensors(message)
        assert tensor.tolist() == [value] * 4
        names.add(message["shared_memory"])
        bucket.close()
    assert len(names) == 1


def test_a_communicator_is_left_once() -> None:
    one = object.__new__(Communicator)
    one._comm, one._lib = ctypes.c_void_p(5), Mock()
    one.close()
    one.close()
    one._lib.ncclCommAbort.assert_called_once()
    with pytest.raises(RuntimeError, match="ncclBroadcast: this rank has left the group"):
        one.broadcast(torch.zeros(1, dtype=torch.uint8), 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": None}, "names=None"),
        ({"shapes": [[1]]}, "shapes="),
        ({"dtype_names": ["float12", "float32"]}, "dtype_names='float12'"),
        ({"nbytes": 3}, "nbytes=3: must be an integer >= 12"),
        ({"shared_memory": "/etc/passwd"}, "shared_memory='/etc/passwd'"),
        ({"ipc_handle": {"gpu_uuid": "none"}}, "handle_b64=None"),
        ({"ipc_handle": {"gpu_uuid": "none", "handle_b64": "\u00e9"}}, "handle_b64='\u00e9'"),
        ({"ipc_handle": {"gpu_uuid": "none", "handle_b64": "A" * 86 + "=="}}, "this engine runs on cpu"),
        *[
            ({"packed": True, "packed_buffer_size_bytes": size}, f"_bytes={size!r}: must be an integer >= 1")
            for size in (0.5, "1", -1, True)
        ],
    ],
    ids=str,
)
def test_broken_messages(change: dict[str, Any], said: str) -> None:
    receiver = WeightReceiver(Mock(), "cpu")
    receiver._group = Mock()
    message = {"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[1], [2]], "nbytes": 12}
    message |= {} if "packed" in change else {"shared_memory": "/proc/1/fd/1"}
    with pytest.raises(ValueError, match=said):
        receiver.update({**message, **change})


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({"world_size": 1}, "world_size=1"),
        ({"world_size": 2}, "master_address=None"),
        ({"world_size": 2, "master_address": "127.0.0.1", "master_port": 0}, "master_port=0"),
        ({"world_size": 2, "rank_offset": 0}, "rank_offset=0"),
        ({"world_size": 2, "nccl_unique_id_b64": "AAAA"}, "128 bytes in base64"),
        ({"world_size": 2, "nccl_unique_id_b64": "\u00e9"}, "128 bytes in base64"),
    ],
    ids=str,
)
def test_broken_groups(info: dict[str, Any], said: str) -> None:
    receiver = WeightReceiver(Mock(), "cpu")
    with pytest.raises(ValueError, match=said):
        receiver.init(info)
    with pytest.raises(RuntimeError, match="no group was joined"):
        receiver.update({"names": [], "dtype_names": [], "shapes": []})


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def test_an_id_is_read_and_nothing_else() -> None:
    """Whatever module its class is from; a pickle that would run something is refused."""
    token = bytes(range(128))
    pickled = pickle.dumps(ncclUniqueId.from_buffer_copy(token))
    assert read_unique_id(pickled.replace(b"test_weight_transfer", b"some_other_packages1")) == token
    for other in (pickle.dumps(os.getcwd), pickle.dumps(b"short"), b"garbage"):
        with pytest.raises(ValueError, match="not the pickle of a ncclUniqueId"):
            read_unique_id(other)


class MemoryOfThisProcess:
    """A Driver whose devices are the host."""

    device = torch.device("cpu")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_rows(self, target: int, source: int, nbytes: int, stride: int, rows: int, stream: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * nbytes, source + row * stride, nbytes)


def test_ranges_of_a_tensor_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every range along every dimension, of a scalar and of nothing too."""
    driver: Any = MemoryOfThisProcess()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    for shape in ((), (5,), (4, 3), (3, 2, 4), (0, 2)):
        tensor = torch.randn(shape).to(torch.bfloat16)
        far = FarTensor(tensor.data_ptr(), tensor.dtype, tensor.shape, driver)
        assert far.whole().equal(tensor)
        assert far.view(torch.int16).whole().equal(tensor.view(torch.int16))
        for dim, size in enumerate(shape):
            for start in range(size):
                for length in range(size - start + 1):
                    assert far.narrow(dim, start, length).equal(tensor.narrow(dim, start, length))
