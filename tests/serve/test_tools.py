"""Tool calls and reasoning over HTTP: forced by a grammar, streamed as they are unstreamed, with any weights."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import CHAT, RESPONSES, Server, streamed, user

WEATHER = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TIME = {"type": "object", "properties": {"zone": {"type": "boolean"}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {**schema, "additionalProperties": False}}}
    for name, schema in (("weather", WEATHER), ("time", TIME))
]
ASK: dict[str, Any] = {"messages": user("What is the weather in Rome?"), "tools": TOOLS, "max_tokens": 200}


@pytest.fixture
def client(hermes: Server) -> Iterator[httpx.Client]:
    with hermes.client() as opened:
        yield opened


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
def test_required(client: httpx.Client, seed: int) -> None:
    required = ASK | {"tool_choice": "required", "seed": seed, "temperature": 1.5}
    message, reason = both(client, required)
    assert reason in ("tool_calls", "length")
    for call in message["tool_calls"][: None if reason == "tool_calls" else -1]:
        assert call["function"]["name"] in ("weather", "time")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert both(client, required | {"max_tokens": 12})[1] == "length"
    message, reason = both(client, required | {"parallel_tool_calls": False})
    assert len(message["tool_calls"]) == 1 and reason == "tool_calls"


def test_named(client: httpx.Client) -> None:
    choice = {"type": "function", "function": {"name": "time"}}
    message, reason = both(client, ASK | {"tool_choice": choice, "temperature": 0})
    [call] = message["tool_calls"]
    assert (call["function"]["name"], reason, message["content"]) == ("time", "stop", None)
    assert isinstance(json.loads(call["function"]["arguments"])["zone"], bool)


def test_a_pattern_that_no_grammar_can_say_binds_strict_tools_alone(client: httpx.Client) -> None:
    """As those of zod's emails."""
    schema = {"type": "object", "properties": {"to": {"type": "string", "pattern": r"^(?!\.)\w+$", "maxLength": 9}}}
    for strict, status in ((None, 200), (True, 400)):
        tools = [{"type": "function", "function": {"name": "send", "parameters": schema, "strict": strict}}]
        body = ASK | {"tools": tools, "tool_choice": "required", "max_tokens": 5}
        assert client.post(CHAT, json=body).status_code == status


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_text_stays_text(client: httpx.Client, choice: str) -> None:
    message, _ = both(client, ASK | {"tool_choice": choice, "max_tokens": 8, "temperature": 0})
    assert "tool_calls" not in message


def test_thinking_then_schema(client: httpx.Client) -> None:
    """Free until the closing tag, then by the schema; without an end of reasoning there is no content."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": WEATHER}}
    body = {"messages": user("Where?"), "response_format": form, "max_tokens": 60, "seed": 2, "temperature": 1}
    body["chat_template_kwargs"] = {"enable_thinking": True}
    message, reason = both(client, body)
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
def test_tools_that_cannot_be(client: httpx.Client, wrong: dict[str, Any]) -> None:
    answer = client.post(CHAT, json=ASK | {"tool_choice": "required"} | wrong)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith("tool") and "start:" not in answer.text


def test_the_schema_that_does_not_compile_is_named(client: httpx.Client) -> None:
    """Of a tool, of an answer beside tools, and of one that comes after reasoning; without the grammar around it."""
    wrong = {"type": "object", "properties": {"a": {"type": "objekt"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "broken", "parameters": wrong}}]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": wrong}}
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    for body, begin in (
        ({"tools": tools}, "tools: function 'broken': "),
        ({"tools": tools, "response_format": {"type": "json_object"}}, "tools: function 'broken': "),
        ({"response_format": form}, "response_format: "),
        ({"response_format": form, "tools": None} | thinks, "response_format: "),
    ):
        error = client.post(CHAT, json=ASK | body).json()["error"]
        assert error["message"].startswith(begin) and len(error["message"]) < 200, error
        assert error["param"] == begin.partition(":")[0]


def edit(client: httpx.Client, grammar: str, **options: Any) -> httpx.Response:
    """Response to a request with one tool, whose text follows a Lark grammar."""
    tool = {"type": "custom", "name": "edit", "format": {"type": "grammar", "syntax": "lark", "definition": grammar}}
    return client.post(RESPONSES, json={"input": "Edit", "tools": [tool], "max_output_tokens": 200} | options)


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "edit"}], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tools_text_is_held_to_its_grammar(client: httpx.Client, choice: Any, stream: bool) -> None:
    grammar = 'start: part{1,4} "x"\npart: "a\\n" | "\\"b"'
    answer = edit(client, grammar, tool_choice=choice, parallel_tool_calls=False, stream=stream)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    found = answer.json() if not stream else json.loads(answer.text.rpartition("data: ")[2])["response"]
    [call] = found["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "edit")
    assert re.fullmatch(r'(a\n|"b){1,4}x', call["input"])


def test_a_custom_tools_grammar_that_is_none_is_refused(client: httpx.Client) -> None:
    for definition, said in (("start: nothing", "nothing"), ('start: "(" start? /.*/', "contain themselves")):
        answer = edit(client, definition)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
        assert said in answer.json()["error"]["message"].lower()
