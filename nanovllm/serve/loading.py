"""Progress of loading the model: a bar on a terminal, elsewhere a line a stage."""

import logging
import sys
from contextlib import ExitStack

logger = logging.getLogger("nanovllm.serve")


class Loading(ExitStack):
    """Shows the stages of the engine's start until `close`."""

    def __init__(self, form: str) -> None:
        """`form`: of the log. A bar is for its text alone."""
        super().__init__()
        self._stage = ""
        self._bar = None
        if form == "text" and sys.stderr.isatty():
            from tqdm import tqdm
            from tqdm.contrib.logging import logging_redirect_tqdm

            form = "{desc} {bar} {percentage:3.0f}% {elapsed}"
            self._bar = self.enter_context(tqdm(total=100, desc="starting", bar_format=form, leave=False))
            self.enter_context(logging_redirect_tqdm([logger]))

    def show(self, stage: str, percent: int) -> None:
        if self._bar is not None:
            self._bar.set_description_str(stage, refresh=False)
            self._bar.update(percent - self._bar.n)
        elif stage != self._stage:
            logger.info("%s", stage)
        self._stage = stage
