"""LiteLLM, which many gateways and agents are built on. Needs the extra "clients"."""

import os
from pathlib import Path
from typing import Any

import pytest
from embedders import make_reranker
from serving import ANSWER, QUESTION, Server, ready_server, user

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


def test_reranking(tmp_path: Path) -> None:
    """By the providers that people name for such a server; Cohere's clients cut long documents."""
    with ready_server(tmp_path, model=make_reranker(tmp_path / "model")) as started:
        check_reranking(started.url)


def check_reranking(url: str) -> None:
    asked: dict[str, Any] = {"query": QUESTION, "documents": ["Rome", "Italy is a country. " * 50], "api_key": "none"}
    for model, path in (("hosted_vllm/demo", ""), ("jina_ai/demo", "/v1"), ("cohere/demo", "/v2/rerank")):
        whole = litellm.rerank(model=model, api_base=url + path, return_documents=True, **asked).results
        assert {one["document"]["text"] for one in whole} == {*asked["documents"]}
        assert whole[0]["relevance_score"] >= whole[1]["relevance_score"]
    options = {"model": "cohere/demo", "api_base": f"{url}/v2/rerank", "max_tokens_per_doc": 5}
    cut = {one["index"]: one["relevance_score"] for one in litellm.rerank(**options, **asked).results}
    full = {one["index"]: one["relevance_score"] for one in whole}
    assert cut[0] == pytest.approx(full[0], rel=1e-3) and cut[1] != pytest.approx(full[1], rel=1e-3)
