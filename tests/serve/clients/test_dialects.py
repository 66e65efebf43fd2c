"""/v1/responses through openai-python and /v1/messages through anthropic, with tools and streamed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import ANSWER, QUESTION, Server, ready_server, user

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

TEMPLATE = Path(__file__).resolve().parents[1] / "templates" / "hermes.jinja"
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
CLOSED = {**SCHEMA, "additionalProperties": False}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A template with tools; the calls are what a grammar makes of the demo checkpoint."""
    kwargs = ("--default-chat-template-kwargs", '{"enable_thinking": false}')
    with ready_server(tmp_path_factory.mktemp("hermes"), "--chat-template", str(TEMPLATE), *kwargs) as started:
        yield started


def openai_at(server: Server) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def anthropic_at(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def test_response(server: Server) -> None:
    answer = openai_at(server).responses.create(model="demo", input=QUESTION, temperature=0)
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.usage.output_tokens == 9
    assert answer.id.startswith("resp_")


def test_response_that_is_cut(server: Server) -> None:
    answer = openai_at(server).responses.create(model="demo", input=QUESTION, temperature=0, max_output_tokens=2)
    assert answer.output_text == "The capital"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_response_streamed(server: Server) -> None:
    events = list(openai_at(server).responses.create(model="demo", input=QUESTION, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER


def test_response_with_a_call(hermes: Server) -> None:
    tool = {"type": "function", "name": "answer", "parameters": CLOSED, "strict": True}
    arguments: dict[str, Any] = {"model": "demo", "input": QUESTION, "tools": [tool], "tool_choice": "required"}
    arguments |= {"temperature": 0, "parallel_tool_calls": False}
    client = openai_at(hermes)
    [call] = client.responses.create(**arguments).output
    assert (call.type, call.name) == ("function_call", "answer")
    with client.responses.stream(**{**arguments, "tools": [tool]}) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments


def test_response_errors(server: Server) -> None:
    client = openai_at(server)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="a")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="demo", input="a", temperature=-1)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="demo", input="a", previous_response_id="resp_1")


def test_message(server: Server) -> None:
    arguments: dict[str, Any] = {"model": "demo", "max_tokens": 50, "messages": user(QUESTION), **GREEDY}
    answer = anthropic_at(server).messages.create(**arguments)
    assert [block.text for block in answer.content] == [ANSWER]
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == 9
    stopped = anthropic_at(server).messages.create(**arguments, stop_sequences=[" of"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " of")
    assert stopped.content[0].text == "The capital"


def test_message_streamed(server: Server) -> None:
    with anthropic_at(server).messages.stream(model="demo", max_tokens=50, messages=user(QUESTION), **GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 9


@pytest.mark.parametrize("streamed", [False, True])
def test_message_with_a_call(hermes: Server, streamed: bool) -> None:
    tool = {"name": "answer", "input_schema": CLOSED}
    choice = {"type": "tool", "name": "answer"}
    arguments: dict[str, Any] = {"model": "demo", "max_tokens": 60, "messages": user(QUESTION), **GREEDY}
    client = anthropic_at(hermes)
    if streamed:
        with client.messages.stream(**arguments, tools=[tool], tool_choice=choice) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**arguments, tools=[tool], tool_choice=choice)
    [block] = answer.content
    assert (answer.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "answer")
    assert isinstance(block.input["sure"], bool)


def test_message_errors_and_counts(server: Server) -> None:
    client = anthropic_at(server)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=5, messages=user("a"))
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="demo", max_tokens=5, messages=[])
    count = client.messages.count_tokens(model="demo", messages=user(QUESTION)).input_tokens
    asked = client.messages.create(model="demo", max_tokens=1, messages=user(QUESTION)).usage
    assert count == asked.input_tokens + asked.cache_read_input_tokens
