"""LiteLLM, which many gateways and agents are built on. Needs the extra "clients"."""

import os
from typing import Any

import pytest
from serving import ANSWER, QUESTION, Server, user

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
litellm = pytest.importorskip("litellm")

ITALY = user(QUESTION)


def ask(server: Server, model: str, **more: Any) -> Any:
    given = {"messages": ITALY, "temperature": 0, "num_retries": 0, "timeout": 60, **more}
    return litellm.completion(model=model, api_base=server.url + "/v1", api_key="none", **given)


@pytest.mark.parametrize("model", ["openai/demo", "hosted_vllm/demo"])
def test_chat(server: Server, model: str) -> None:
    answer = ask(server, model)
    assert answer.choices[0].message.content == ANSWER
    assert answer.usage.completion_tokens == 9
    chunks = list(ask(server, model, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == 9


@pytest.mark.parametrize("model", ["openai/demo", "hosted_vllm/demo"])
def test_forced_call(server: Server, model: str) -> None:
    pytest.importorskip("mcp")  # LiteLLM imports it for any tool
    parameters = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    tool = {"type": "function", "function": {"name": "answer", "parameters": parameters}}
    message = ask(server, model, tools=[tool], tool_choice="required").choices[0].message
    assert message.tool_calls[0].function.name == "answer"


def test_reasoning_has_its_own_field(server: Server) -> None:
    message = ask(server, "hosted_vllm/demo", chat_template_kwargs={"enable_thinking": True}).choices[0].message
    assert message.content == ANSWER
    assert message.reasoning_content and "<think>" not in message.reasoning_content


def test_errors_by_class(server: Server) -> None:
    with pytest.raises(litellm.NotFoundError):
        ask(server, "openai/other")
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(server, "openai/demo", messages=user("a b " * 2000))
    with pytest.raises(litellm.BadRequestError):
        ask(server, "openai/demo", temperature=-1)
