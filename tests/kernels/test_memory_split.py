"""The division of a multiprocessor's memory that kernels ask for."""

import ctypes
from types import SimpleNamespace

import pytest

from nanovllm.kernels.base.memory_split import equal_memory_split


def test_kernels_launched_within_ask_for_it_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    asked: list[tuple[int | None, int, int]] = []
    fake = SimpleNamespace(cuFuncSetAttribute=lambda function, name, value: asked.append((function.value, name, value)))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)

    def launch(function: int) -> None:
        knobs.runtime.launch_enter_hook(SimpleNamespace(get=lambda: {"function": function}))

    launch(1)
    with pytest.raises(KeyError), equal_memory_split(75):
        launch(2)
        raise KeyError
    launch(3)
    assert asked == [(2, 9, 75)]
