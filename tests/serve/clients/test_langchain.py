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


def model_of(server: Server, **options: Any) -> Any:
    options = {"model": "demo", "api_key": "none", "temperature": 0, "max_retries": 0, "timeout": 60, **options}
    return langchain.ChatOpenAI(base_url=server.url + "/v1", **options)


@pytest.fixture(scope="module")
def model(server: Server) -> Any:
    return model_of(server, stream_usage=True)


def test_chat(model: Any) -> None:
    answer = model.invoke(QUESTION)
    assert (answer.content, answer.usage_metadata["output_tokens"]) == (ANSWER, 9)
    assert answer.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == ANSWER
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 9


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model: Any, method: str) -> None:
    found = model.with_structured_output(Place, method=method).invoke(QUESTION)
    assert isinstance(found, Place)


def test_responses_api(server: Server) -> None:
    assert model_of(server, use_responses_api=True).invoke(QUESTION).text == ANSWER
