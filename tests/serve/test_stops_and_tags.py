"""Stop strings that cross the tags of reasoning, as the engine and a client's reader see them."""

import pytest
from parsing import Model, message_of

from nanovllm.text.stops import StreamedText, VisibleText


@pytest.mark.parametrize(("family", "closing"), [("hermes", "</think>"), ("mistral", "[/THINK]")])
@pytest.mark.parametrize("skips", [True, False])
def test_nothing_of_a_stop_string_behind_a_tag_is_shown(
    models: dict[tuple[str, bool], Model], family: str, closing: str, skips: bool
) -> None:
    model = models[family, True]
    opening = closing.replace("/", "")
    ids = model.ids(f"{opening}Hm.{closing}\n\nThe end of it")
    is_special = family == "mistral"
    stop = ("" if skips and is_special else closing) + "\n\nThe"
    engine, syntax = StreamedText(model.tokenizer.detokenizer(skips), [stop]), model.syntax(tools=None)
    last = next(number for number, token_id in enumerate(ids) if engine.push(token_id))
    text, reader = VisibleText(syntax.detokenizer(skips), [stop], tags=syntax.tags_seen(skips)), syntax.reader()
    assert reader is not None
    deltas = [delta for token_id in ids[:last] for delta in reader.push(text.push(token_id))]
    deltas += [*reader.push(text.end(ids[last], "stop", stop)), *reader.finish()]
    found = message_of(deltas)
    assert (found.reasoning, found.content) == ("Hm.", "")
