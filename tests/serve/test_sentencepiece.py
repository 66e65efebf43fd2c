"""Completions behind a SentencePiece tokenizer: texts, and what log-probabilities say of their tokens."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sentencepiece_like
from serving import CHAT, COMPLETIONS, ready_server, streamed, user

BODY: dict[str, Any] = {"prompt": "The capital is", "temperature": 2, "seed": 3, "ignore_eos": True, "max_tokens": 6}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = sentencepiece_like.save(tmp_path_factory.mktemp("tokenizer"), size=1024)
    template = folder / "echo.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    options = ("--tokenizer", str(folder), "--chat-template", str(template))
    with ready_server(tmp_path_factory.mktemp("server"), *options) as server, server.client() as opened:
        yield opened


def text_of(client: httpx.Client, path: str, **more: Any) -> str:
    """The text of an answer, streamed, which is also that of an unstreamed one."""
    body = {**BODY, **more}
    [whole] = client.post(path, json=body).json()["choices"]
    gained = [choice for chunk in streamed(client, path, body) for choice in chunk["choices"]]
    if path == COMPLETIONS:
        assert "".join(choice["text"] for choice in gained) == whole["text"]
        return str(whole["text"])
    text = str(whole["message"]["content"])
    assert "".join(choice["delta"].get("content", "") for choice in gained) == text
    return text


def test_an_answer_begins_with_its_blank(client: httpx.Client) -> None:
    only = {"allowed_token_ids": [267]}  # " Paris"
    assert text_of(client, COMPLETIONS, **only) == 6 * " Paris"
    assert text_of(client, COMPLETIONS, echo=True, **only) == "The capital is" + 6 * " Paris"
    assert text_of(client, COMPLETIONS, stop=[" Paris"], **only) == ""
    begun = [*user("The capital"), {"role": "assistant", "content": " is"}]
    for more in ({}, {"continue_final_message": True, "add_generation_prompt": False}):
        assert text_of(client, CHAT, messages=begun, **only, **more) == 6 * " Paris"


def test_tokens_join_to_the_text_and_are_told_apart(client: httpx.Client) -> None:
    body = {**BODY, "logprobs": 5, "allowed_token_ids": [*range(4, 500)], "echo": True}
    [choice] = client.post(COMPLETIONS, json=body).json()["choices"]
    logprobs = choice["logprobs"]
    halves = [token for token in logprobs["tokens"] if token.startswith("bytes:")]
    assert "".join(token for token in logprobs["tokens"] if token not in halves).startswith(" The capital is")
    assert all(len(likeliest) >= 5 for likeliest in logprobs["top_logprobs"][1:])
    only = {"allowed_token_ids": [*range(0x80 + 4, 0x100 + 4)], "logprobs": 5, "logprobs_mode": "processed"}
    [choice] = client.post(COMPLETIONS, json={**BODY, **only}).json()["choices"]
    for token, likeliest in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert token in likeliest and len(likeliest) >= 5 and all(name.startswith("bytes:\\x") for name in likeliest)


def test_bytes_of_halves_of_characters(client: httpx.Client) -> None:
    body = {**BODY, "messages": user("x"), "logprobs": True, "allowed_token_ids": [0xC3 + 4]}
    [choice] = client.post(CHAT, json=body).json()["choices"]
    assert {tuple(entry["bytes"]) for entry in choice["logprobs"]["content"]} == {(0xC3,)}
