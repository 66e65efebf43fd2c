"""Engines in the event loop of the server: each loss is noticed."""

import asyncio
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from nanovllm.host import engines
from nanovllm.host.engines import Engines
from nanovllm.host.handle import Lost
from nanovllm.serve.driver import Driver
from nanovllm.serve.http.server import run_loop


@pytest.mark.parametrize("run", [run_loop, asyncio.run], ids=["uvloop", "asyncio"])
def test_an_engine_that_dies_with_frames_it_has_not_read_is_lost(run: Any) -> None:
    """uvloop tells once of a connection that was reset; the exit code may come later."""
    ours, theirs = socket.socketpair()
    lost = Lost("died by signal 9")
    receive = Mock(side_effect=[[], [lost], *[[]] * 1000])
    handle = Mock(number=0, is_ending=False, waits=False, fileno=ours.fileno, receive=receive)

    async def notice() -> int:
        found = asyncio.get_running_loop().create_future()
        with patch.object(engines, "Handle", lambda start: handle):
            driver = Driver(Engines("m", {}), Mock(), Mock(), found.set_result)
        driver.listen()
        ours.send(b"a frame")
        theirs.close()
        assert await asyncio.wait_for(found, 10) is lost
        driver.close()
        return 0

    assert run(notice if run is run_loop else notice()) == 0
    ours.close()


@pytest.mark.parametrize("run", [run_loop, asyncio.run], ids=["uvloop", "asyncio"])
def test_an_engine_whose_process_lingers_leaves_the_loop_to_others(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket stays readable until it is known how it ended."""
    monkeypatch.setattr("nanovllm.host.handle.MODULE", "echo_engine")
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "host")

    async def notice() -> int:
        handles = Engines("m", {})
        [handle] = handles.all
        found = asyncio.get_running_loop().create_future()
        driver = Driver(handles, Mock(), Mock(), found.set_result)
        driver.listen()
        with patch.object(handle, "receive", wraps=handle.receive) as looks:
            handle.rouse()
            assert await asyncio.wait_for(found, 20) == Lost("closed its connection")
        assert looks.call_count < 300
        driver.close()
        handles.close(patience=0)
        return 0

    assert run(notice if run is run_loop else notice()) == 0
