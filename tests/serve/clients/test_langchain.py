"""LangChain's chat model for OpenAI's API. Needs the extra "clients"."""

from typing import Any

import pydantic
import pytest
from serving import ANSWER, QUESTION, Server

langchain = pytest.importorskip("langchain_openai")



class Place(pydantic.BaseModel):
    """A town."""

    name: str
    population: int


@pytest.fixture(scope="module")
def model(server: Server) -> Any:
    options = {"model": "demo", "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 60}
    return langchain.ChatOpenAI(base_url=server.url + "/v1", stream_usage=True, **options)


def test_chat(model: Any) -> None:
    answer = model.invoke(QUESTION)
    assert answer.content == ANSWER
    assert answer.usage_metadata["output_tokens"] == 9
    assert answer.response_metadata["finish_reason"] == "stop"


def test_stream(model: Any) -> None:
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == ANSWER
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 9


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(Place, method=method).invoke(QUESTION)
    assert isinstance(found, Place)


def test_responses_api(server: Server) -> None:
    options = {"model": "demo", "api_key": "none", "temperature": 0, "max_retries": 0, "use_responses_api": True}
    answer = langchain.ChatOpenAI(base_url=server.url + "/v1", **options).invoke(QUESTION)
    assert answer.text == ANSWER
