"""Chats that hold what the model cannot read go on: pictures, files and what other servers wrote, in every dialect."""

from typing import Any

import httpx
import pytest
from serving import CHAT, MESSAGES, RESPONSES, user

BASE64 = "iVBORw0K" * 300_000
"""2.4 MB: more than all text that the demo's context is worth."""
CALL = {"id": "c", "type": "function", "function": {"name": "view", "arguments": "{}"}}


def chat_with(part: dict[str, Any]) -> list[dict[str, Any]]:
    """A chat in which a user, an assistant, a tool and again a user have said a part."""
    roles: list[dict[str, Any]] = [{"role": "user"}, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool"}]
    return [{**message, "content": [part]} for message in [*roles, {"role": "user"}]]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "from_tomorrow"])
def test_parts_of_a_chat_are_left_out_and_named(client: httpx.Client, kind: str) -> None:
    part = {"type": kind, kind.removeprefix("input_"): {"url": "http://127.0.0.1:9/x", "data": "UklGRg=="}}
    messages = [*chat_with(part), {"role": "assistant", "content": None}, *user("Go on.")]
    answer = client.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, f"messages.{kind}"), answer.text
    text = f"[{kind.removeprefix('input_')} left out: this model reads text only]"
    shown = [{**message, "content": text} if message["content"] == [part] else message for message in messages]
    counts = [client.post("/tokenize", json={"messages": each}).json()["tokens"] for each in (messages, shown)]
    assert counts[0] == counts[1]


def test_a_picture_that_is_longer_than_all_text_ends_no_chat(client: httpx.Client) -> None:
    url = f"data:image/png;base64,{BASE64}"
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    image = {"type": "image", "source": source}
    shown: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c", "content": [image]}
    output = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": url}]}
    for path, body in (
        (CHAT, {"messages": chat_with({"type": "image_url", "image_url": {"url": url}})}),
        (MESSAGES, {"max_tokens": 1, "messages": [
            {"role": "user", "content": [shown, {"type": "document", "source": source}]}]}),
        (RESPONSES, {"input": [*user("a"), output, {"type": "image_generation_call", "result": BASE64}]}),
    ):  # fmt: skip
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text[:300]
        assert answer.headers["x-ignored-fields"]
    for path, body in (
        (CHAT, {"messages": user(BASE64)}),
        (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "document", "source": {
            "type": "text", "data": BASE64}}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": BASE64}]}]}),
    ):  # fmt: skip
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and ("maximum context" in answer.text or "too long" in answer.text)


def test_a_message_that_is_too_long_is_told_in_anthropics_words(client: httpx.Client) -> None:
    for text in ("a b " * 2000, "ab " * 1_400_000):
        error = client.post(MESSAGES, json={"max_tokens": 1, "messages": user(text)}).json()["error"]
        assert error["type"] == "invalid_request_error"
        count = int(error["message"].removeprefix("prompt is too long: ").removesuffix(" tokens > 2047 maximum"))
        assert count > 2047


@pytest.mark.parametrize("kind", ["plain", "input_text", "output_text", "nothing"])
def test_lists_of_texts_in_other_forms_are_texts(client: httpx.Client, kind: str) -> None:
    """LangChain sends lists of plain texts and, for a tool that has returned nothing, empty ones."""
    given: list[Any] = {"plain": ["a", "b"], "nothing": []}.get(kind, [{"type": kind, "text": "a"}, "b"])
    texts = [{"type": "text", "text": text} for text in "ab"] if given else ""
    answers = [
        client.post("/tokenize", json={"messages": [
            *user("x"), {"role": "assistant", "tool_calls": [CALL]}, *({"role": role, "content": content} for role in (
                "tool", "assistant", "user"))]}) for content in (given, texts)
    ]  # fmt: skip
    assert answers[0].status_code == 200, answers[0].text
    assert "x-ignored-fields" not in answers[0].headers
    assert answers[0].json() == answers[1].json()


def test_an_effort_switches_thinking(client: httpx.Client) -> None:
    """The demo's template writes <think> where it is asked to; what a request says of it itself is more."""
    def count(**more: Any) -> int:
        return int(client.post("/tokenize", json={"messages": user("a"), **more}).json()["count"])

    off, on = (count(chat_template_kwargs={"enable_thinking": think}) for think in (False, True))
    assert off != on
    for effort in ("low", "medium", "high"):
        assert count(reasoning_effort=effort) == on
        assert count(reasoning_effort=effort, chat_template_kwargs={"enable_thinking": False}) == off
    assert count(reasoning_effort="none") == off
