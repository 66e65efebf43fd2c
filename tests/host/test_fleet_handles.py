"""A fleet's engines as processes: another takes the place of one that is lost."""

from typing import Any
from unittest.mock import Mock

import pytest
from test_fleet import INFO, PROMPT

from nanovllm.errors import ReplicaError
from nanovllm.host import fleet_handles, wire
from nanovllm.host.fleet_handles import FleetHandles
from nanovllm.host.handle import Lost
from nanovllm.host.start import await_ready


@pytest.mark.parametrize(("blocks", "longest", "is_given_up"), [(40, 256, False), (8, 128, True)])
def test_an_engine_may_return_with_less_room(
    blocks: int, longest: int, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for what its options give, as at its first start; the longest text that is served must fit."""
    monkeypatch.setattr(fleet_handles, "ChildHandle", lambda start: Mock(number=start.number, start=start))
    handles = FleetHandles("model", {"data_parallel_size": 2})
    handles.form([wire.Ready(INFO)] * 2)
    first: Any = handles.all[0]
    handles.take(first, Lost("died"))
    second: Any = handles.all[0]
    assert second is not first and second.start == first.start
    handles.take(second, wire.Ready({**INFO, "num_kvcache_blocks": blocks, "max_model_len": longest}))
    if is_given_up:
        second.give_up.assert_called_once_with("started with room for texts of 128 tokens, and 256 are served")
    handles.fleet.add(1, PROMPT, {"max_tokens": 8})
    handles.fleet.add(2, PROMPT, {"max_tokens": 8})
    handles.fleet.bind()
    assert bool(second.send_packed.called) != is_given_up


def test_an_engine_that_is_silent_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")  # it says nothing of itself
    monkeypatch.setattr(fleet_handles, "SILENCE", 0.5)
    handles = FleetHandles("model", {"data_parallel_size": 2})
    try:
        with pytest.raises(ReplicaError, match="could not start: gave no sign of life for"):
            await_ready(handles)
    finally:
        handles.close(patience=0)
