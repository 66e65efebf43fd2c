"""Dependent launches: of devices that can, unless the call, or the engine around it, does not want it."""

import threading

import pytest
import torch

from nanovllm.kernels.base.device import ordinary_launch, pdl_options
from nanovllm.kernels.plan.device import Device
from nanovllm.runner.device_io import DeviceIO

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DEPENDENT, ORDINARY = {"PDL": True, "launch_pdl": True}, {"PDL": False}


@pytest.fixture
def one_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "of", lambda asked: Device("", (9, 0) if asked == GPU else (0, 0)))


def test_ordinary_launches_end_with_their_block_and_stay_in_their_thread(one_gpu_can: None) -> None:
    assert pdl_options(GPU) == DEPENDENT
    assert pdl_options(GPU, wanted=False) == pdl_options(CPU) == ORDINARY
    seen: list[dict[str, bool]] = []
    with pytest.raises(KeyError), ordinary_launch():
        assert pdl_options(GPU) == ORDINARY
        other = threading.Thread(target=lambda: seen.append(pdl_options(GPU)))
        other.start()
        other.join()
        raise KeyError
    assert seen == [DEPENDENT], "another engine, in another thread"
    assert pdl_options(GPU) == DEPENDENT


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("enabled", [True, False])
def test_an_engine_launches_as_it_was_told(enabled: bool) -> None:
    with DeviceIO(GPU, enabled).stream_context():
        expected = DEPENDENT if enabled and Device.of(GPU).has_pdl else ORDINARY
        assert pdl_options(GPU) == expected
