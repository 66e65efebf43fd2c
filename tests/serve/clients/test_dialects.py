"""/v1/responses through openai-python and /v1/messages through anthropic, with tools and streamed."""

from typing import Any

import pytest
from serving import ANSWER, QUESTION, Server, user

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

OPTIONS: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 60}
ASKED: dict[str, Any] = {"model": "demo", "input": QUESTION, "temperature": 0}
SAID: dict[str, Any] = {
    "model": "demo", "max_tokens": 60, "messages": user(QUESTION), "extra_body": {"temperature": 0},
}  # fmt: skip
CLOSED = {
    "type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", **OPTIONS).responses


@pytest.fixture(scope="module")
def messages(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, **OPTIONS).messages


def test_response(client: Any) -> None:
    answer = client.create(**ASKED)
    assert (answer.output_text, answer.status, answer.usage.output_tokens) == (ANSWER, "completed", 9)
    assert answer.id.startswith("resp_")
    events = list(client.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER
    cut = client.create(**ASKED, max_output_tokens=2)
    assert (cut.output_text, cut.status) == ("The capital", "incomplete")
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_response_with_a_call(hermes: Server) -> None:
    tool = {"type": "function", "name": "answer", "parameters": CLOSED, "strict": True}
    arguments = ASKED | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    client = openai.OpenAI(base_url=hermes.url + "/v1", **OPTIONS).responses
    [call] = client.create(**arguments).output
    assert (call.type, call.name) == ("function_call", "answer")
    with client.stream(**{**arguments, "tools": [tool]}) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


def test_response_errors(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.create(model="other", input="a")
    for wrong in ({"temperature": -1}, {"previous_response_id": "resp_1"}):
        with pytest.raises(openai.BadRequestError):
            client.create(model="demo", input="a", **wrong)


def test_message(messages: Any) -> None:
    answer = messages.create(**SAID)
    with messages.stream(**SAID) as stream:
        assert "".join(stream.text_stream) == ANSWER
        for one in (answer, stream.get_final_message()):
            assert [block.text for block in one.content] == [ANSWER]
            assert (one.stop_reason, one.usage.output_tokens) == ("end_turn", 9)
    stopped = messages.create(**SAID, stop_sequences=[" of"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " of")
    assert stopped.content[0].text == "The capital"


def test_message_with_a_call(hermes: Server) -> None:
    messages = anthropic.Anthropic(base_url=hermes.url, **OPTIONS).messages
    tools: dict[str, Any] = {"tools": [{"name": "answer", "input_schema": CLOSED}]}
    tools["tool_choice"] = {"type": "tool", "name": "answer"}
    with messages.stream(**SAID, **tools) as stream:
        for answer in (stream.get_final_message(), messages.create(**SAID, **tools)):
            [block] = answer.content
            assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "answer")
            assert isinstance(block.input["sure"], bool)


def test_message_errors_and_counts(messages: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        messages.create(model="other", max_tokens=5, messages=user("a"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        messages.create(model="demo", max_tokens=5, messages=[])
    count = messages.count_tokens(model="demo", messages=user(QUESTION)).input_tokens
    asked = messages.create(model="demo", max_tokens=1, messages=user(QUESTION)).usage
    assert count == asked.input_tokens + asked.cache_read_input_tokens
