"""A worker that cuts its steps in halves from a few tokens on, as the test says: CUT="least tokens:multiple"."""

import os
import sys

from nanovllm.executor.worker import main


def lower_thresholds() -> None:
    from nanovllm.parallel import two_batch

    two_batch.MIN_ROWS, two_batch.CUT_MULTIPLE = map(int, os.environ["CUT"].split(":"))


if __name__ == "__main__":
    lower_thresholds()
    main(*map(int, sys.argv[1:7]))
