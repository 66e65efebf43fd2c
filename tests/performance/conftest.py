"""Makers of the scheduler's and of the processes' tests, which these tests share."""

import sys
from pathlib import Path

for neighbour in ("engine", "processes"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / neighbour))
