"""The garbage collector where an engine runs: a full collection of what torch and others have imported would delay all
requests by some 90 ms."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def freeze_objects() -> None:
    """Exempts all existing objects from garbage collection; called at the end of a start."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exempts all existing objects from garbage collection until the end, in a process that is not ours alone. What the
    caller has frozen stays so."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect(1)  # or what is young and garbage would become old, and stay until the next full collection
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
