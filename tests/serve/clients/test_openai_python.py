"""openai-python, unchanged: every kind of call that chat and completions have. Needs the extra "clients"."""

import json
from pathlib import Path
from typing import Any

import pytest
from embedders import make_embedder
from serving import ANSWER, QUESTION, Server, ready_server, user

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

ITALY = user(QUESTION)
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60)


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(messages=ITALY, **GREEDY)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason, answer.model) == (ANSWER, "stop", "demo")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(client: Any) -> None:
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=ITALY, stream=True, stream_options=options, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 9
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(messages=ITALY, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert "content.delta" in kinds and "content.done" in kinds


class Place(pydantic.BaseModel):
    name: str
    population: int


def test_parse(client: Any) -> None:
    arguments = {"messages": ITALY, "response_format": Place, "model": "demo", "seed": 5, "temperature": 0.2}
    with client.chat.completions.stream(**arguments) as stream:
        for answer in (stream.get_final_completion(), client.chat.completions.parse(**arguments)):
            assert isinstance(answer.choices[0].message.parsed, Place)


def test_json_object(client: Any) -> None:
    form = {"type": "json_object"}
    answer = client.chat.completions.create(messages=ITALY, model="demo", response_format=form, seed=1, max_tokens=99)
    text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(messages=ITALY, logprobs=True, top_logprobs=3, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content[:-1]) == ANSWER
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert bytes(entry.bytes).decode() == entry.token
    chunks = client.chat.completions.create(messages=ITALY, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    streamed = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content or []]
    assert [(entry.token, entry.bytes) for entry in streamed] == [(entry.token, entry.bytes) for entry in content]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in content], abs=1e-5)


def test_completion_logprobs(client: Any) -> None:
    arguments: dict[str, Any] = {"prompt": "Monday, Tuesday,", "max_tokens": 40, "logprobs": 2, **GREEDY}
    answer = client.completions.create(**arguments)
    [whole] = answer.choices
    assert whole.text == " Wednesday, Thursday, Friday, Saturday, Sunday." and answer.object == "text_completion"
    assert "".join(whole.logprobs.tokens).startswith(whole.text)
    assert all(len(top) == 2 for top in whole.logprobs.top_logprobs)
    pieces = [chunk.choices[0] for chunk in client.completions.create(stream=True, **arguments)]
    tokens = [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens]
    offsets = [offset for piece in pieces if piece.logprobs for offset in piece.logprobs.text_offset]
    assert (tokens, offsets) == (whole.logprobs.tokens, whole.logprobs.text_offset)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("owner/other")


def test_errors_by_class(client: Any) -> None:
    for wrong, kind, param, code in (
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"messages": user("a b " * 2000)}, openai.BadRequestError, "messages", "context_length_exceeded"),
    ):
        with pytest.raises(kind) as refused:
            client.chat.completions.create(**GREEDY | {"messages": ITALY} | wrong)
        assert (refused.value.param, refused.value.code) == (param, code)


def test_embeddings(tmp_path: Path) -> None:
    with ready_server(tmp_path, model=make_embedder(tmp_path / "model")) as started:
        client = openai.OpenAI(base_url=started.url + "/v1", api_key="none", max_retries=0, timeout=60)
        packed = client.embeddings.create(model="demo", input=["Rome", "Hello"])  # which asks for base64
        plain = client.embeddings.create(model="demo", input=["Rome", "Hello"], encoding_format="float")
        assert [len(one.embedding) for one in packed.data] == [192, 192]
        for one, other in zip(packed.data, plain.data, strict=True):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        few = client.embeddings.create(model="demo", input="Rome", dimensions=8)
        assert len(few.data[0].embedding) == 8 and few.usage.total_tokens == few.usage.prompt_tokens
        with pytest.raises(openai.BadRequestError, match="--runner pooling"):
            client.chat.completions.create(messages=ITALY, **GREEDY)
