"""Functions side by side."""

import threading
from collections.abc import Callable
from typing import Any


def run_in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Results of the functions, each in a thread of its own; an error stands where its function raised it."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return results
