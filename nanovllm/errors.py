"""The errors of an engine; and what a user's mistake is called: option, value and bound, and never more than a line of
the value. No torch."""

import difflib
import math
import reprlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, field
from itertools import islice
from numbers import Integral, Real
from typing import Any, NoReturn, TypeGuard

MAX_SHOWN = 200
"""Characters of a value that a message repeats. Values come from clients too, and a schema can have a million."""


TEXT_ALONE = "images, sound and files are not taken: the engine serves text alone"
"""Error message for message parts that are not text."""


class _Repr(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Shows the first entries in their own order; reprlib would sort all of them before."""
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_repr = _Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 2 * MAX_SHOWN
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = 40
_repr.maxlevel = 4


class WorkerError(RuntimeError):
    """A worker died, failed or hung; the text says which, and carries the worker's traceback where it sent one."""


class StepTimeout(RuntimeError):
    """The device did not finish a step in time."""


class OutOfMemory(RuntimeError):
    """Device or host memory for sleep or wake_up is taken by others: nothing has changed, and a later call may
    succeed."""


class EngineAsleep(RuntimeError):
    """Memory of the engine sleeps: no step can run until wake_up."""


class WeightsIncomplete(RuntimeError):
    """An update of the weights stopped half-way, or sleep has dropped them: there is no model to run."""


def check_alive(closed: bool, error: BaseException | None) -> None:
    """Raises RuntimeError for an engine that is closed, or has failed by this error."""
    if closed:
        raise RuntimeError("this engine is closed")
    if error is not None:
        raise RuntimeError(f"this engine has failed and cannot go on: {short(error)}") from error


class ReplicaError(RuntimeError):
    """No replica is left; the text says why the last one was lost."""


class UnknownName(ValueError):
    """Nothing of the name that the user gives is there."""


class QueueFull(RuntimeError):
    """Refusal of a request while as many wait as max_queued_requests allows: try again later."""


def shown(value: Any) -> str:
    """repr(value), cut after MAX_SHOWN characters."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def require_unicode(text: str) -> None:
    """Raises ValueError for half a surrogate pair, which JSON and file names may bring."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"found {text[error.start]!r} at {error.start}"
        raise ValueError(f"text: must not hold half a surrogate pair alone, {found}") from None


def plain(value: Any) -> Any:
    """A number of numpy's, from an array of lengths say, as Python's own; anything else as it is."""
    if value is None or isinstance(value, (int, float, tuple, list)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number."""
    return (isinstance(value, float) or is_integer(value)) and -math.inf < value < math.inf


def short(error: object) -> str:
    """Shortens another library's message, which may repeat the user's input: its lines as one, without a worker's
    traceback, cut as `shown` cuts."""
    text = " ".join(str(error).partition("\nTraceback")[0].split()) or type(error).__name__
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def near_miss(name: str, known: Iterable[str]) -> str:
    """Hint that follows an unknown name in an error: the known name that was probably meant, else nothing."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def require_known(where: str, what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises a TypeError for the first of the given names that is not known, with the nearest known one."""
    for name in given:
        if name not in known:
            raise TypeError(f"{where}: unknown {what} {name!r}{near_miss(name, known)}")


def refuse(name: str, value: Any, bound: str) -> NoReturn:
    """Raises the ValueError for an option with a bad value; `bound` says what it must be."""
    raise ValueError(f"{name}={shown(value)}: must be {bound}")


Bound = tuple[Callable[[Any], bool], str]
"""Bound of a value: a test, and the words that describe it."""


def one_of(*words: str) -> Bound:
    return lambda value: value in words, "one of " + ", ".join(map(repr, words))


def integer(low: int, high: int | None = None) -> Bound:
    bound = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    return lambda value: is_integer(value) and low <= value and (high is None or value <= high), bound


FLAG: Bound = (lambda value: isinstance(value, bool), "True or False")
SHARE: Bound = (lambda value: is_number(value) and 0 < value <= 1, "a number in (0, 1]")


def option(default: Any = MISSING, bound: Bound = FLAG, **how: Any) -> Any:
    """Field of a dataclass of options, with the bound of its values. `how`: further arguments of dataclasses.field."""
    return field(default=default, metadata={"bound": bound}, **how)
