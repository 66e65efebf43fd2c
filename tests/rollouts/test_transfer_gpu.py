"""Weights from a trainer in another process, on the engine's GPU by CUDA IPC, or on another one by NCCL."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer import init_info, take_in

from nanovllm import LLM
from nanovllm.parallel.peer.driver import Driver
from nanovllm.transfer.receiver import WeightReceiver
from nanovllm.transfer.shared import FarTensor

pytestmark = pytest.mark.gpu
DEMO = str(Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3")


@pytest.mark.parametrize("kind", ["bucket", "group"])
def test_weights_come_from_another_process(kind: str) -> None:
    if kind == "group" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with LLM(DEMO, num_kvcache_blocks=64, max_num_seqs=8, max_num_batched_tokens=256) as llm:
        expected = llm.checksum()
        llm.begin_update(partial=True)
        with torch.inference_mode():
            for parameter in llm.engine.executor.runner.model.parameters():  # type: ignore[attr-defined]
                parameter.zero_()
        llm.finish_update()
        assert llm.checksum() != expected
        receiver = WeightReceiver(llm, "cuda:0", timeout=60)
        info, device = (init_info(packed=True), "cuda:1") if kind == "group" else ({}, "cuda:0")
        take_in(receiver, kind, DEMO, info, device)
        receiver.close()
        assert llm.checksum() == expected


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_weights_reach_the_other_rank(device: str) -> None:
    """Two ranks on one GPU."""
    options = {"num_kvcache_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 256, "enforce_eager": True}
    weights = load_file(f"{DEMO}/model.safetensors", device=device)
    with LLM(DEMO, tensor_parallel_size=2, share_gpus=True, **options) as llm:
        expected = llm.checksum()
        llm.load_weights((name, tensor.flip(0)) for name, tensor in weights.items())
        assert llm.checksum() != expected
        llm.load_weights(weights.items())
        assert llm.checksum() == expected


def test_ranges_by_copies_of_the_driver() -> None:
    """Of a tensor that is on this GPU, for want of another."""
    tensor = torch.randn(6, 5, 8, device="cuda", dtype=torch.bfloat16)
    far = FarTensor(tensor.data_ptr(), tensor.dtype, tensor.shape, Driver(tensor.device))
    assert far.whole().equal(tensor)
    for dim, size in enumerate(tensor.shape):
        assert far.narrow(dim, 1, size - 2).equal(tensor.narrow(dim, 1, size - 2))


def test_a_communicator_of_one() -> None:
    """Where there is one GPU: an id of our own, joined, summed over, broadcast over."""
    from nanovllm.transfer.nccl import Communicator, new_unique_id

    communicator = Communicator(1, 0, new_unique_id(), torch.device("cuda", 0), timeout=30)
    memory = torch.arange(200, dtype=torch.uint8, device="cuda")
    communicator.broadcast(memory, 0)
    assert memory.cpu().equal(torch.arange(200, dtype=torch.uint8))
    communicator.close()
