"""How far the model is, while it loads: a bar on a terminal, elsewhere a line a stage."""

import logging
import sys
from typing import Any

logger = logging.getLogger("nanovllm.serve")


class Loading:
    """Shows the stages of the engine's start until `close`."""

    def __init__(self, form: str) -> None:
        """`form`: of the log. A bar is for its text alone."""
        self._stage = ""
        self._bar: Any = None
        if form == "text" and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5)
            self._task = self._bar.add_task("starting", total=100)
            self._bar.start()

    def show(self, stage: str, percent: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=percent)
        elif stage != self._stage:
            logger.info("%s", stage)
        self._stage = stage

    def close(self) -> None:
        """Takes the bar away. Does nothing the second time."""
        if self._bar is not None:
            self._bar.stop()
