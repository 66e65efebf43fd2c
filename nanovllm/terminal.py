"""Terminal of generate(): a progress bar, and Ctrl-C between two steps."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from nanovllm.engine.protocol import Engine


class Interrupt:
    """Signals that have come and wait for the end of a step."""

    has_come = False
    """Whether Ctrl-C has."""
    _alarm: Callable[[], object] | None = None

    def comes(self) -> bool:
        """Lets an alarm in, whose handler may raise; returns whether Ctrl-C has come."""
        alarm, self._alarm = self._alarm, None
        if alarm is not None:
            alarm()
        return self.has_come

    def note(self, handler: Callable[..., object], number: int, frame: Any) -> None:
        """Takes a signal in place of its handler, once."""
        if number == signal.SIGALRM:
            self._alarm = partial(handler, number, frame)
        else:
            self.has_come = True
            signal.signal(number, handler)


@contextmanager
def interrupt_between_steps() -> Iterator[Interrupt]:
    """Context in which Ctrl-C is noted, and an alarm, of which a program's handler makes a timeout, so that they cut
    no step in half, and take effect at the end; a second Ctrl-C interrupts at once."""
    interrupt, handlers = Interrupt(), {}
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handlers[signal.SIGINT] = signal.default_int_handler
        if callable(alarm := signal.getsignal(signal.SIGALRM)):
            handlers[signal.SIGALRM] = alarm
    try:
        for number, handler in handlers.items():
            signal.signal(number, partial(interrupt.note, handler))
        yield interrupt
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if interrupt.comes():
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
