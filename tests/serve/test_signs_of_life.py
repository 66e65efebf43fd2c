"""Signs of life before the first token, cached tokens with it, and what clients of the dialects look for."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front import InProcess
from serving import ANSWER, CHAT, MESSAGES, QUESTION, RESPONSES, Server, ready_server, user

LIMITS = {"PING_SECONDS": 0.5, "BEGIN_SECONDS": 0.1}
ADMIN = {"authorization": "Bearer admin"}
SAID: dict[str, Any] = {"max_tokens": 60, "messages": user(QUESTION), "temperature": 0, "stream": True}
ASKED: dict[str, Any] = {"input": QUESTION, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def paused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready_server(tmp_path_factory.mktemp("paused"), "--admin-api-key", "admin", limits=LIMITS) as started:
        yield started


def named_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_streams_begin_before_their_first_token_and_show_signs_of_life(paused: Server) -> None:
    with paused.client() as client:
        assert client.post("/pause", headers=ADMIN, json={"mode": "keep"}).is_success
        for path, body, first, sign in (
            (MESSAGES, SAID, "ping", "ping"), (RESPONSES, ASKED, "response.created", "response.in_progress"),
        ):  # fmt: skip
            with client.stream("POST", path, json=body) as response:
                found = named_events(response)
                assert next(found)["type"] == first
                assert [next(found)["type"] for _ in range(3)] == [sign] * 3
                assert client.post("/resume", headers=ADMIN).is_success
                rest = [*found]
            starts = [event for event in rest if event["type"] in ("message_start", "response.created")]
            assert len(starts) == (path == MESSAGES)
            deltas = [event["delta"] for event in rest if event["type"].endswith(("text.delta", "block_delta"))]
            assert "".join(each if isinstance(each, str) else each["text"] for each in deltas) == ANSWER
            assert client.post("/pause", headers=ADMIN, json={"mode": "keep"}).is_success
        assert client.post("/resume", headers=ADMIN).is_success


def test_the_first_event_of_a_message_knows_the_cached_tokens(paused: Server) -> None:
    body = SAID | {"messages": user("many words " * 60)}
    with paused.client() as client:
        for is_cached in (False, True):
            with client.stream("POST", MESSAGES, json=body) as response:
                events = [event for event in named_events(response) if "usage" in str(event)]
            begin, end = events[0]["message"]["usage"], events[-1]["usage"]
            for name in ("input_tokens", "cache_read_input_tokens"):
                assert begin[name] == end[name]
            assert (begin["cache_read_input_tokens"] > 0) is is_cached


def test_chunks_that_tell_their_usage_know_the_cached_tokens(paused: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": user("other words " * 60), "max_tokens": 4, "stream": True, "stream_options": options}
    with paused.client() as client:
        for _ in range(2):
            with client.stream("POST", CHAT, json=body) as response:
                usages = [event["usage"]["prompt_tokens_details"]["cached_tokens"] for event in named_events(response)]
        assert usages[0] > 0 and len({*usages}) == 1


def test_references_to_items_of_the_last_answer_are_taken(client: httpx.Client) -> None:
    first = client.post(RESPONSES, json=ASKED | {"stream": False}).json()
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    again = {"input": [{"role": "user", "content": QUESTION}, reference, {"role": "user", "content": "And now?"}]}
    answer = client.post(RESPONSES, json=again)
    assert answer.is_success and "x-ignored-fields" not in answer.headers
    shown = [*user(QUESTION), {"role": "assistant", "content": ANSWER}, *user("And now?")]
    count = client.post("/v1/responses/input_tokens", json=again).json()
    assert count == {"object": "response.input_tokens", "input_tokens": answer.json()["usage"]["input_tokens"]}
    assert client.post("/tokenize", json={"messages": shown}).json()["count"] == count["input_tokens"]
    unstored = client.post(RESPONSES, json=ASKED | {"stream": False, "store": False}).json()
    again["input"][1]["id"] = unstored["output"][0]["id"]
    assert client.post(RESPONSES, json=again).headers["x-ignored-fields"] == "input.item_reference"


def test_what_anthropics_clients_look_for(front: InProcess) -> None:
    """The list of models in their form, and a header with the request's id."""
    found = httpx.get(front.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    [entry] = found["data"]
    assert (entry["type"], entry["id"], entry["display_name"]) == ("model", "demo", "demo")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["created_at"])
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "demo", "demo")
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        for body in ({"messages": user("a"), "max_tokens": 1}, {}):
            headers = httpx.post(front.url + path, json=body).headers
            assert headers["request-id"] == headers["x-request-id"]
