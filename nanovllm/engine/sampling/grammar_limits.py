"""Limits of a grammar: bounds on its text, and on the time that its masks take. No torch.

A client chooses a grammar, and each step of all requests waits for its mask. A schema of 5,000 optional properties
takes 57 ms for one mask, and a chain of 1,000 references takes more stack than a thread has by default.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

MAX_BYTES = {"json": 128 << 10, "grammar": 128 << 10, "choice": 128 << 10, "regex": 16 << 10, "gbnf": 16 << 10}
"""UTF-8 bytes of a constraint's text, by its kind. GBNF takes time that grows by their square to translate."""
JSON_BLANKS = r"(\n {0,16}|[ ])"
"""Blanks between JSON's tokens: nothing, a blank, or a line break and an indentation. Without a bound a model can go on
with blanks for ever."""
MAX_RULES = 500
"""Definitions of a JSON schema; rules of a grammar; schemas within it that are no JSON."""
MAX_PROPERTIES = 1000
"""Maximum properties of all objects of a JSON schema together."""
MAX_DEPTH = 128
"""Lists and objects of a JSON schema within each other. Deeper ones take more stack to read than a thread has."""
NUM_TIMED_MASKS = 20
MAX_MASK_SECONDS = 0.005
STACK_BYTES = 512 << 20
"""Address space of a stack, not memory: only what is used gets pages."""

_PATIENCE = 60.0  # seconds that a compilation may take
_MOST_LEFT = 4  # compilations that took longer and still run
_RULE = re.compile(r"^[ \t]*[?!]?\w[\w.-]*[ \t]*(?:\[[^]\n]*\][ \t]*)?:", re.MULTILINE)
"""A rule's head. Linear in the text: no two of its repeats can share characters, and none goes past its line."""

UNSATISFIABLE = "no text satisfies it"
_TOO_DEEP = f"its lists and objects nest deeper than {MAX_DEPTH} levels"
_Result = TypeVar("_Result")


def check_text(kind: str, text: str) -> None:
    """Raises ValueError where a constraint's text is larger than the bounds above, or names another document."""
    most = MAX_BYTES.get(kind)
    if most is not None and (size := len(text.encode("utf-8", "surrogatepass"))) > most:
        raise ValueError(f"it has {size} bytes, at most {most} are allowed")
    if kind in ("grammar", "gbnf"):
        _check_count("rules", len(_RULE.findall(text)), MAX_RULES)
    for _, _, schema in schemas_of(kind, text):
        _check_schema(schema)


def is_too_long(grammar: str) -> bool:
    """Whether a Lark grammar has more bytes or rules than are allowed."""
    return len(grammar.encode()) > MAX_BYTES["grammar"] or len(_RULE.findall(grammar)) > MAX_RULES


def schemas_of(kind: str, text: str) -> list[tuple[int, int, Any]]:
    """(begin, end, document) of the JSON schemas of a constraint: itself, or those within a grammar (%json {...}). What
    is none there is left to the compiler to refuse. Raises ValueError."""
    try:
        if kind == "json":
            return [(0, len(text), json.loads(text))]
        return _inline_schemas(text) if kind == "grammar" else []
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _inline_schemas(grammar: str) -> list[tuple[int, int, Any]]:
    schemas = []
    num_broken = 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except json.JSONDecodeError:  # made in time that grows with the text before it, whose lines it counts
            num_broken += 1
            _check_count("schemas that are no JSON", num_broken, MAX_RULES)
            continue
        schemas.append((found.end(), end, schema))
    return schemas


def _check_schema(schema: Any) -> None:
    num_rules = num_properties = 0
    left = [(schema, 1)]
    while left:
        node, depth = left.pop()
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        if isinstance(node, dict):
            for name, value in node.items():
                if isinstance(value, dict):
                    num_rules += len(value) * (name in ("$defs", "definitions"))
                    num_properties += len(value) * (name in ("properties", "patternProperties"))
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                raise ValueError(f"$ref={reference[:80]!r}: must point into the schema itself, as '#/...' does")
            left += ((value, depth + 1) for value in node.values() if isinstance(value, (dict, list)))
        elif isinstance(node, list):
            left += ((value, depth + 1) for value in node if isinstance(value, (dict, list)))
    _check_count("definitions", num_rules, MAX_RULES)
    _check_count("properties", num_properties, MAX_PROPERTIES)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"it has {count} {what}, at most {most} are allowed")


def check_masks(matcher: Any, eos_ids: frozenset[int]) -> str | None:
    """Follows one text through a fresh matcher of llguidance. Returns what is wrong where one of the first masks takes
    too long. CPU time of this thread counts, so that other work on the machine does not. Raises ValueError where the
    library gives up."""
    for number in range(NUM_TIMED_MASKS):
        begin = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        seconds = time.thread_time() - begin
        if matcher.is_error():
            raise ValueError(failure(matcher))
        if seconds > MAX_MASK_SECONDS:
            limit = f"{1e3 * MAX_MASK_SECONDS:.0f} ms"
            return f"the mask of token {number} takes {1e3 * seconds:.1f} ms, at most {limit} are allowed"
        for eos_id in eos_ids:
            mask &= ~(1 << eos_id)
        if not mask:
            break
        place = number * 7919 % mask.bit_length()
        left = mask >> place  # of which the lowest is taken
        matcher.consume_token(place + (left & -left).bit_length() - 1)
    return None


def failure(matcher: Any) -> str:
    """Words of a matcher of llguidance that has failed, without the state of its parser, which follows them."""
    said = str(matcher.get_error()).partition("<state>")[0]
    return said.replace("NoExtensionBias", UNSATISFIABLE).strip()


class LargeStackThread:
    """Threads whose stacks take deep recursion, one after the other. One that takes too long is left behind: it holds
    up neither the next nor the interpreter's exit."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._left: list[threading.Thread] = []

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Returns or raises what `work` does in such a thread. Raises ValueError where it takes too long, or too many
        that were left behind still run."""
        result: Future[_Result] = Future()

        def compute() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        with self._turn:
            self._left = [thread for thread in self._left if thread.is_alive()]
            if len(self._left) >= _MOST_LEFT:
                raise ValueError(f"{_MOST_LEFT} others that take more than {_PATIENCE:.0f} s are still being compiled")
            thread = threading.Thread(target=compute, name="nanovllm-grammar", daemon=True)
            before = threading.stack_size(STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
            try:
                return result.result(timeout=_PATIENCE)
            except TimeoutError:
                self._left.append(thread)
                raise ValueError(f"it takes more than {_PATIENCE:.0f} s") from None
