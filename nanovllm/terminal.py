"""Terminal of generate(): a progress bar, and Ctrl-C between two steps."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from nanovllm.engine.protocol import Engine


class Interrupt:
    """Whether Ctrl-C has come."""

    has_come = False


@contextmanager
def interrupt_between_steps() -> Iterator[Interrupt]:
    """Context in which Ctrl-C is noted, so that it cuts no step in half, and interrupts at the end; a second Ctrl-C
    interrupts at once."""
    interrupt = Interrupt()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return

    def note(number: int, frame: Any) -> None:
        interrupt.has_come = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupt.has_come:
        raise KeyboardInterrupt


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A tqdm bar over requests, with prefill and decode tokens/s since it was opened."""

    _INTERVAL = 0.1

    def __init__(self, engine: "Engine", total: int, enabled: bool) -> None:
        self._engine = engine
        hidden = not (enabled and total) or sys.stderr is None  # as in a program whose standard error is closed
        chosen = {"disable": True} if hidden else {}  # else as the environment says (TQDM_DISABLE)
        self._bar = tqdm(total=total, desc="Generating", unit="req", dynamic_ncols=True, **chosen)
        self._prefill, self._decode = engine.computed

    def update(self, finished: int) -> None:
        if self._bar.disable:
            return
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        if finished > self._bar.n or seconds - getattr(self, "_shown", 0.0) > self._INTERVAL:
            self._shown = seconds
            prompt_tokens, decoded = self._engine.computed
            prefill, decode = (prompt_tokens - self._prefill) / seconds, (decoded - self._decode) / seconds
            self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
            self._bar.update(finished - self._bar.n)

    def __exit__(self, *_: object) -> None:
        self._bar.close()
