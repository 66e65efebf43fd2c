"""The division of a multiprocessor's memory that kernels ask for."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from nanovllm.kernels.base.memory_split import equal_memory_split
from nanovllm.kernels.plan.plan import LayerPlan
from nanovllm.runner import kernel_choice
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.wire.shapes import StepShape


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


CHAIN, FILLING = LayerPlan(is_chain=True), LayerPlan(fills_registers=True)


@pytest.mark.parametrize(
    ("plans", "splits", "fills"),
    [([CHAIN, CHAIN], True, False), ([CHAIN, FILLING], False, True), ([FILLING, CHAIN], False, True)],
)
def test_every_layer_has_a_say(
    plans: list[LayerPlan], splits: bool, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the last alone, which may hold experts where the first are dense."""
    model: Any = SimpleNamespace(plans=lambda rows: plans, few_layers=nullcontext)
    monkeypatch.setattr(kernel_choice, "equal_memory_split", split := Mock(return_value=nullcontext()))
    with kernel_choice.before_capture(model, StepShape(1, 0)):
        assert split.called is splits
    runner = SimpleNamespace(model_config=SimpleNamespace(implementation="native"), model=model, backend=Mock())
    ModelRunner._tell_backend(cast(ModelRunner, runner))
    runner.backend.prefer_small_shared_memory.assert_called_once_with(fills)
