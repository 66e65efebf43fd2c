"""Wait of the server for a trainer's weights: since when, and whether that is too long."""

from nanovllm.engine.calls import CALLS
from nanovllm.engine.engine_state import EngineState


class WeightWait:
    """Wait of engines that have no weights to compute with: since when, and when a trainer was last heard."""

    def __init__(self, limit: float) -> None:
        """`limit`: seconds without a call of the trainer after which it counts as gone."""
        self.limit = limit
        self._since: float | None = None
        self._heard = 0.0

    def note_call(self, name: str, state: EngineState, now: float) -> None:
        """A call begins or is over, and has left the engines in this state."""
        if CALLS[name].brings_weights:
            self._heard = now
        if not state.lacks_weights or "weights" in state.asleep:
            self._since = None
        elif self._since is None:
            self._since = self._heard = now

    def text(self, now: float) -> str | None:
        """Text that says what requests wait for; None if they do not."""
        return None if self._since is None else f"waiting for new weights since {now - self._since:.0f} s"

    def is_over(self, now: float) -> bool:
        """Whether requests are to wait no longer."""
        return self._since is not None and now - self._heard > self.limit
