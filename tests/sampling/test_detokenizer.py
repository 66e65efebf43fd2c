"""Text token by token: the same as decoding at once, never half a character, stop strings as a plain search finds
them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece_like
from hypothesis import example, given
from hypothesis import strategies as st
from sampling_engines import DEMO
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanovllm.text.checkpoint import CheckpointTokenizer
from nanovllm.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from nanovllm.text.stops import StreamedText, VisibleText, find_stop


@pytest.fixture(scope="module")
def hf() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module", params=["bytes", "window"])
def make(request: pytest.FixtureRequest, hf: Any) -> Callable[[bool], Any]:
    if request.param == "bytes":
        ours = CheckpointTokenizer(DEMO)
        assert isinstance(ours.detokenizer(), ByteDetokenizer)
        return ours.detokenizer
    return lambda skip: WindowDetokenizer(lambda ids: hf.decode(ids, skip_special_tokens=skip))


TEXTS = st.text(st.characters(codec="utf-8"), max_size=30) | st.text("añ€😀漢 \n", max_size=40)


@given(text=TEXTS)
def test_text_comes_back_whole_character_by_character(make: Callable[[bool], Any], hf: Any, text: str) -> None:
    detokenizer = make(True)
    pieces = [detokenizer.push(token_id) for token_id in hf.encode(text)]
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == hf.decode(hf.encode(text), skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 1023) | st.integers(188, 260), max_size=60), skip=st.booleans())
def test_any_tokens_give_what_decoding_at_once_gives(
    make: Callable[[bool], Any], hf: Any, ids: list[int], skip: bool
) -> None:
    detokenizer = make(skip)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert "".join(pieces) + detokenizer.flush() == hf.decode(ids, skip_special_tokens=skip)

class Pair(NamedTuple):
    """A tokenizer of ours, and the library's of the same file."""

    ours: CheckpointTokenizer
    library: Tokenizer
    by_token: bool


@pytest.fixture(scope="module", params=[*sentencepiece_like.DECODERS, "demo"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = DEMO
    if request.param != "demo":
        folder = str(sentencepiece_like.save(tmp_path_factory.mktemp("tokenizer"), request.param))
    return Pair(CheckpointTokenizer(folder), Tokenizer.from_file(f"{folder}/tokenizer.json"), request.param != "pieces")


PROMPTS = st.lists(st.integers(0, 280), max_size=8)
OUTPUTS = st.lists(st.integers(0, 280) | st.sampled_from([*range(260, 276), 198, 163, 2000]), max_size=24)


@example(prompt=[1], ids=[267], skip=True)
@example(prompt=[265], ids=[267, 261, 261], skip=True)
@example(prompt=[260], ids=[267], skip=True)
@given(prompt=PROMPTS, ids=OUTPUTS, skip=st.booleans())
def test_an_output_is_what_the_text_gains(pair: Pair, prompt: list[int], ids: list[int], skip: bool) -> None:
    """Whatever cut, streamed or not: what prompt and output decoded together have more than the prompt has."""
    ours, library, _ = pair
    detokenizer = ours.detokenizer(skip, prompt)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    assert text == ours.decode(ids, skip, prompt)
    before = library.decode(prompt, skip_special_tokens=skip)
    whole = library.decode([*prompt, *ids], skip_special_tokens=skip)
    if "\ufffd" not in whole + before + text:
        assert before + text == whole


@given(ids=OUTPUTS)
def test_bytes_of_tokens_join_to_the_text(pair: Pair, ids: list[int]) -> None:
    ours, _, by_token = pair
    if by_token:
        joined = b"".join(map(ours.token_bytes, ids))
        assert joined.decode("utf-8", "replace") == ours.decode(ids, False, ours.encode("x"))


def test_tokens_of_one_byte_have_that_byte(tmp_path: Path) -> None:
    ours = CheckpointTokenizer(sentencepiece_like.save(tmp_path))
    for token, expected in (("<0xC3>", b"\xc3"), ("<0x20>", b" "), ("▁true", b" true"), ("</s>", b"</s>")):
        assert ours.token_bytes(ours.backend_tokenizer.token_to_id(token)) == expected


def test_the_window_stays_small(hf: Any) -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return hf.decode(ids, skip_special_tokens=True)

    half = hf.encode("€")[0]
    for ids in ([half] * 300, [1023] * 300, hf.encode("word " * 100)):
        detokenizer = WindowDetokenizer(decode)
        for token_id in ids:
            detokenizer.push(token_id)
    assert max(lengths) < 40


class Letters:
    """Token i is the text pieces[i]; an empty piece is a token whose text comes with the next."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, token_id: int) -> str:
        return self.pieces[token_id]

    def flush(self) -> str:
        return ""


PIECES = st.lists(st.text("ab.", max_size=5) | st.just("ab" * 40), max_size=30)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3)


@example(pieces=[*"aab"], stops=["aab"], include=False, first=0)
@given(pieces=PIECES, stops=STOPS, include=st.booleans(), first=st.integers(0, 4))
def test_stop_strings_against_a_plain_search(pieces: list[str], stops: list[str], include: bool, first: int) -> None:
    """Stops count from token `first` on; the token that completes one ends the text, at the one that begins first."""
    expected, stopped = "".join(pieces), None
    for count in range(first + 1, len(pieces) + 1):
        before, text = "".join(pieces[: count - 1]), "".join(pieces[:count])
        ends = [(n, s) for s in stops for n in range(len(before) + 1, len(text) + 1) if text[:n].endswith(s)]
        if ends:
            begin = min(end - len(stop) for end, stop in ends)
            stopped = next(s for s in stops if any(end - len(s) == begin and s == stop for end, stop in ends))
            expected = text[: begin + (len(stopped) if include else 0)]
            break
    streamed = StreamedText(Letters(pieces), stops, include)
    last = next((n for n in range(len(pieces)) if streamed.push(n, watch=n >= first)), None)
    assert (streamed.finish(), streamed.stopped_by) == (expected, stopped)
    visible, seen = VisibleText(Letters(pieces), stops, include), ""
    for index in range(len(pieces) if last is None else last):
        seen += visible.push(index)
        assert expected.startswith(seen), "what a client has seen is not taken back"
    assert seen + visible.end(last, "length" if last is None else "stop", stopped) == expected


@example(pieces=[*"xTb"], stops=["ab.b"], include=False, name="ab.")
@given(
    pieces=st.lists(st.text("abT", max_size=4) | st.just("T"), max_size=20), stops=STOPS, include=st.booleans(),
    name=st.sampled_from(["ab.", "", "b"]),
)  # fmt: skip
def test_a_stop_string_may_cross_a_tag(pieces: list[str], stops: list[str], include: bool, name: str) -> None:
    """The engine sees a tag's name; a client's text has one character in its place, whole or not at all."""
    pieces = [piece.replace("T", "\ud800") for piece in pieces]
    engine = StreamedText(Letters([piece.replace("\ud800", name) for piece in pieces]), stops, include)
    last = next((n for n in range(len(pieces)) if engine.push(n)), None)
    visible, seen = VisibleText(Letters(pieces), stops, include, (), {0xD800: name}), ""
    for index in range(len(pieces) if last is None else last):
        seen += visible.push(index)
    seen += visible.end(last, "length" if last is None else "stop", engine.stopped_by)
    shown, expected = seen.replace("\ud800", name), engine.finish()
    assert expected.startswith(shown)
    assert shown == expected or (name.startswith(expected[len(shown) :]) and len(expected) - len(shown) < len(name))


def test_the_first_in_the_list_wins_a_tie() -> None:
    assert find_stop("xabc", ["abc", "ab"], 3) == (1, "abc")
    assert find_stop("xabc", ["ab", "abc"], 3) == (1, "ab")
    assert find_stop("xabc", ["ab"], 1) is None
