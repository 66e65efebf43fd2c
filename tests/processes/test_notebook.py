"""Notebooks: a kernel whose main module has no file and whose event loop runs while a cell does."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_checks import MARK, marked_processes
from system import wait_for

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parents[2]

IMPORTS = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(Path(__file__).parent)!r}]
from process_checks import GREEDY, LONG, tiny_llm, token_ids
"""


class Notebook:
    """Runs cells in a kernel of its own."""

    def __init__(self, mark: str) -> None:
        self.kernel, self.client = manager.start_new_kernel(
            kernel_name="python3", env={**os.environ, MARK: mark}, startup_timeout=120
        )

    def run(self, cell: str) -> str:
        """Runs a cell; returns what it prints and shows. Raises RuntimeError with what the cell raised."""
        shown: list[str] = []

        def note(message: dict[str, Any]) -> None:
            content = message["content"]
            shown.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        reply = {"status": "aborted"}  # as a kernel also says that a cell came too soon after one that raised
        while reply["status"] == "aborted":
            reply = self.client.execute_interactive(cell, output_hook=note, timeout=120)["content"]
        if reply["status"] == "error":
            raise RuntimeError(f"{reply['ename']}: {reply['evalue']}")
        return "".join(shown)

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)


@pytest.fixture
def notebook(new_mark: str) -> Iterator[Notebook]:
    notebook = Notebook(new_mark)
    yield notebook
    notebook.close()


def test_an_engine_lives_over_cells_and_goes_with_the_kernel(notebook: Notebook, tiny: str, new_mark: str) -> None:
    notebook.run(IMPORTS)
    notebook.run(f"llm = tiny_llm({tiny!r})")
    assert len(marked_processes(new_mark)) == 2, "the kernel and one worker"
    first = notebook.run("token_ids(llm, [5] * 9)")
    assert "[[" in first
    assert "tok/s" in notebook.run("outputs = llm.generate([5] * 9, GREEDY)"), "progress shows"
    with pytest.raises(RuntimeError, match=r"ValueError: .*max_model_len"):
        notebook.run("token_ids(llm, [5] * 900)")
    assert notebook.run("token_ids(llm, [5] * 9)") == first
    # Whoever runs the cell again that makes an engine has two, until the name's old value goes.
    notebook.run(f"llm = tiny_llm({tiny!r})")
    assert notebook.run("token_ids(llm, [5] * 9)") == first
    notebook.kernel.shutdown_kernel(now=False)
    wait_for(lambda: not marked_processes(new_mark), "end of the processes")


def test_interrupting_a_cell_leaves_the_engine_usable(notebook: Notebook, tiny: str) -> None:
    notebook.run(IMPORTS)
    notebook.run(f"llm = tiny_llm({tiny!r})")
    expected = notebook.run("token_ids(llm, [5] * 9)")
    stop = threading.Timer(1.0, notebook.kernel.interrupt_kernel)
    stop.start()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        notebook.run("while True: token_ids(llm, [5] * 9, params=LONG)")
    assert notebook.run("token_ids(llm, [5] * 9)") == expected
