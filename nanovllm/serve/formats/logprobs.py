"""Log-probabilities as the two endpoints show them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanovllm.serve.formats import shapes

LOWEST = -9999.0
"""Number written for minus infinity and NaN, which JSON does not have."""


class Row(NamedTuple):
    """A position's token, its rank and log-probability, and the likeliest tokens with theirs."""

    token_id: int
    rank: int
    value: float
    top: list[tuple[int, float]]


def read_line(line: bytes, k: int) -> Row:
    """A line of LogprobRows (see outputs.py): int32 token, rank, ids; float32 own log-probability and theirs."""
    words, floats = memoryview(line).cast("i"), memoryview(line).cast("f")
    begin = (len(words) + 1) // 2
    ids, values = words[2 : 2 + k].tolist(), floats[begin + 1 : begin + 1 + k].tolist()
    # In this order: NaN, of logits that leave no token, is not above LOWEST.
    pairs = [(token_id, max(LOWEST, value)) for token_id, value in zip(ids, values, strict=True)]
    return Row(words[0], words[1], max(LOWEST, floats[begin]), pairs)


def token_formatter(
    token_bytes: Callable[[int], bytes], as_ids: bool, names_bytes: bool = False
) -> Callable[[int], str]:
    """Token id to what is shown of it: its text, or "token_id:N". `names_bytes`: a token that holds a part of a
    character is "bytes:" and its bytes, as in OpenAI's completions, so that it is told from others."""
    if as_ids:
        return lambda token_id: f"token_id:{token_id}"

    def show(token_id: int) -> str:
        found = token_bytes(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + found.decode(errors="backslashreplace") if names_bytes else found.decode(errors="replace")

    return show


def chat_entries(
    lines: Sequence[bytes], k: int, show: Callable[[int], str], token_bytes: Callable[[int], bytes]
) -> list[shapes.ContentToken]:
    """`logprobs.content` of a chat."""

    def entry(token_id: int, value: float) -> tuple[str, float, list[int]]:
        return show(token_id), value, list(token_bytes(token_id))

    found = []
    for line in lines:
        token_id, _, value, top = read_line(line, k)
        likeliest = [shapes.Token(*entry(*pair)) for pair in top]
        found.append(shapes.written(shapes.ContentToken(*entry(token_id, value), likeliest)))
    return found


def prompt_entries(
    lines: Sequence[bytes | None], k: int, show: Callable[[int], str]
) -> list[dict[str, shapes.PromptToken] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt but the first, log-probabilities by token id."""
    found: list[dict[str, shapes.PromptToken] | None] = []
    for line in lines:
        if line is None:
            found.append(None)
            continue
        token_id, rank, value, top = read_line(line, k)
        entries = {str(token_id): shapes.PromptToken(value, rank, show(token_id))}
        for place, (other, log) in enumerate(top, 1):
            entries.setdefault(str(other), shapes.PromptToken(log, place, show(other)))
        found.append(shapes.written(entries))
    return found


def id_entries(lines: Sequence[bytes], k: int) -> list[shapes.SampledToken]:
    """`logprobs.content` by token ids: each token, and below it itself and then the likeliest others."""
    found = []
    for line in lines:
        token_id, own_rank, value, top = read_line(line, k)
        own = token_id, value, own_rank
        others = [shapes.IdToken(other, log, rank) for rank, (other, log) in enumerate(top, 1) if other != token_id]
        found.append(shapes.written(shapes.SampledToken(*own, [shapes.IdToken(*own), *others])))
    return found


class TextPlace:
    """Place in a text that grows by tokens, some of which hold a part of a character."""

    def __init__(self, push: Callable[[int], str]) -> None:
        """`push`: of a detokenizer: the text that a token adds."""
        self.offset, self._push = 0, push

    def advance(self, token_id: int) -> None:
        self.offset += len(self._push(token_id))


def completion_logprobs(
    lines: Sequence[bytes | None], ids: Sequence[int], k: int, show: Callable[[int], str], place: TextPlace
) -> shapes.TextLogprobs:
    """`logprobs` of a completion, from `place` on, which moves along. A line is None at the first token of a prompt."""
    found = shapes.TextLogprobs([], [], [], [])
    for position, line in enumerate(lines):
        token_id, _, value, top = (ids[position], None, None, None) if line is None else read_line(line, k)
        text = show(token_id)
        shown: dict[str, float | None] | None = None
        if top is not None:
            shown = {text: value}
            for each, log in top:
                shown.setdefault(show(each), log)  # of tokens that look alike, the likelier counts
        found.text_offset.append(place.offset)
        found.token_logprobs.append(value)
        found.tokens.append(text)
        found.top_logprobs.append(shapes.written(shown))
        place.advance(token_id)
    return found
