"""Tool calls and reasoning over HTTP: forced by a grammar, streamed as they are unstreamed, with any weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import CHAT, RESPONSES, ready_server, streamed, user

TEMPLATE = Path(__file__).resolve().parent / "templates" / "hermes.jinja"
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TIME = {"type": "object", "properties": {"zone": {"type": "boolean"}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {**schema, "additionalProperties": False}}}
    for name, schema in (("weather", WEATHER), ("time", TIME))
]
ASK: dict[str, Any] = {"messages": user("What is the weather in Rome?"), "tools": TOOLS, "max_tokens": 200}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The demo checkpoint behind the template of Qwen3: it writes calls because a grammar makes it."""
    folder = tmp_path_factory.mktemp("hermes")
    with ready_server(folder, "--chat-template", str(TEMPLATE)) as server, server.client() as client:
        yield client


def message_of(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Message that a client makes of a stream, and why it ended."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reason = ""
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"].startswith("call_") and call["type"] == "function"
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
        assert not reason
        reason = choice["finish_reason"]
    return message, reason


def both(client: httpx.Client, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The message, streamed and not: they must be the same."""
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    whole = choice["message"]
    calls = [call["function"] for call in whole.get("tool_calls", ())]
    found = {"content": whole["content"] or "", "reasoning": whole.get("reasoning") or "", "tool_calls": calls}
    assert message_of(streamed(client, CHAT, body)) == (found, choice["finish_reason"])
    return whole, choice["finish_reason"]


@pytest.mark.parametrize("seed", range(3))
def test_required(hermes: httpx.Client, seed: int) -> None:
    message, reason = both(hermes, ASK | NO_THINKING | {"tool_choice": "required", "seed": seed, "temperature": 1.5})
    calls = message["tool_calls"]
    assert reason in ("tool_calls", "length")
    for call in calls[: None if reason == "tool_calls" else -1]:
        assert call["function"]["name"] in ("weather", "time")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_named(hermes: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "time"}}
    message, reason = both(hermes, ASK | NO_THINKING | {"tool_choice": choice, "temperature": 0})
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "time"
    assert isinstance(json.loads(call["function"]["arguments"])["zone"], bool)
    assert reason == "stop"
    assert message["content"] is None


def test_one_call(hermes: httpx.Client) -> None:
    body = ASK | NO_THINKING | {"tool_choice": "required", "parallel_tool_calls": False, "seed": 4}
    message, reason = both(hermes, body)
    assert len(message["tool_calls"]) == 1 and reason == "tool_calls"


def test_cut_short(hermes: httpx.Client) -> None:
    _, reason = both(hermes, ASK | NO_THINKING | {"tool_choice": "required", "max_tokens": 12, "temperature": 0})
    assert reason == "length"


def test_a_pattern_that_no_grammar_can_say_binds_strict_tools_alone(hermes: httpx.Client) -> None:
    """As those of zod's emails."""
    schema = {"type": "object", "properties": {"to": {"type": "string", "pattern": r"^(?!\.)\w+$", "maxLength": 9}}}
    for strict, status in ((None, 200), (True, 400)):
        tools = [{"type": "function", "function": {"name": "send", "parameters": schema, "strict": strict}}]
        body = ASK | NO_THINKING | {"tools": tools, "tool_choice": "required", "max_tokens": 5}
        assert hermes.post(CHAT, json=body).status_code == status


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_text_stays_text(hermes: httpx.Client, choice: str) -> None:
    message, _ = both(hermes, ASK | NO_THINKING | {"tool_choice": choice, "max_tokens": 8, "temperature": 0})
    assert "tool_calls" not in message


def test_thinking_then_schema(hermes: httpx.Client) -> None:
    """Free until the closing tag, then by the schema; without an end of reasoning there is no content."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}
    body = {"messages": user("Where?"), "response_format": form, "max_tokens": 60, "seed": 2, "temperature": 1}
    message, reason = both(hermes, body)
    if reason == "stop":
        assert json.loads(message["content"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "sometimes"},
        {"tools": None, "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}]},
    ],
)
def test_tools_that_cannot_be(hermes: httpx.Client, wrong: dict[str, Any]) -> None:
    answer = hermes.post(CHAT, json=ASK | NO_THINKING | {"tool_choice": "required"} | wrong)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"].startswith("tool") and "start:" not in answer.text


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "edit"}], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tools_text_is_held_to_its_grammar(hermes: httpx.Client, choice: Any, stream: bool) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: part{1,4} "x"\npart: "a\\n" | "\\"b"'}
    tool = {"type": "custom", "name": "edit", "format": form}
    body = {"input": "Edit", "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, **NO_THINKING}
    answer = hermes.post(RESPONSES, json=body | {"stream": stream, "max_output_tokens": 200})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    found = answer.json() if not stream else json.loads(answer.text.rpartition("data: ")[2])["response"]
    [call] = found["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "edit")
    assert re.fullmatch(r'(a\n|"b){1,4}x', call["input"])


def test_a_custom_tools_grammar_that_is_none_is_refused(hermes: httpx.Client) -> None:
    for definition, said in (("start: nothing", "nothing"), ('start: "(" start? /.*/', "contain themselves")):
        form = {"type": "grammar", "syntax": "lark", "definition": definition}
        body = {"input": "Edit", "tools": [{"type": "custom", "name": "edit", "format": form}], "max_output_tokens": 9}
        answer = hermes.post(RESPONSES, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
        assert said in answer.json()["error"]["message"].lower()
