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
    engine, plan = StreamedText(model.tokenizer.detokenizer(skips), [stop]), model.plan(tools=None)
    last = next(number for number, token_id in enumerate(ids) if engine.push(token_id))
    text, reader = VisibleText(plan.detokenizer(skips), [stop], tags=plan.tags_seen(skips)), plan.reader()
    assert reader is not None
    deltas = [delta for token_id in ids[:last] for delta in reader.push(text.push(token_id))]
    deltas += [*reader.push(text.end(ids[last], "stop", stop)), *reader.finish()]
    found = message_of(deltas)
    assert (found.reasoning, found.content) == ("Hm.", "")
