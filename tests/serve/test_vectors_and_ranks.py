"""Embeddings, scores and reranking over HTTP: the numbers of the library, in the forms that clients read."""

from array import array
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from embedders import END, QUERY, make_embedder, make_reranker
from serving import Server, ready_server

from nanovllm import LLM
from nanovllm.serve.api.routes import ROUTES

EMBEDDINGS, SCORE, RERANKS = "/v1/embeddings", "/v1/score", ("/rerank", "/v1/rerank", "/v2/rerank")
TEXTS = ["Rome", "The capital of Italy is Rome.", "Hello"]
ASKED = "Where is Rome?"


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = make_embedder(tmp_path_factory.mktemp("embedder"))
    with ready_server(tmp_path_factory.mktemp("server"), "--api-key", "sesame", model=folder) as started:
        yield started


@pytest.fixture
def client(embedder: Server) -> Iterator[httpx.Client]:
    with embedder.client("sesame") as opened:
        yield opened


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = make_reranker(tmp_path_factory.mktemp("reranker"))
    with ready_server(tmp_path_factory.mktemp("server"), model=folder) as started, started.client() as opened:
        yield opened


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    with LLM(str(make_embedder(tmp_path_factory.mktemp("library"))), device="cpu", num_kvcache_blocks=64) as llm:
        return llm.embed([*TEXTS, QUERY + "Rome"], use_tqdm=False)


def rows(answer: httpx.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    kinds = {each["object"] for each in data}
    assert kinds == {"embedding"}
    found = [each["embedding"] for each in data]
    return np.array([array("f", b64decode(one)) if isinstance(one, str) else one for one in found], np.float32)


def test_embeddings_are_those_of_the_library(client: httpx.Client, vectors: np.ndarray) -> None:
    answer = client.post(EMBEDDINGS, json={"model": "demo", "input": TEXTS})
    np.testing.assert_allclose(rows(answer), vectors[:3], atol=1e-6)
    body = answer.json()
    assert body["object"] == "list" and body["model"] == "demo" and body["id"].startswith("embd-")
    lengths = [len(client.post("/tokenize", json={"prompt": text}).json()["tokens"]) for text in TEXTS]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(lengths)
    assert body["usage"]["completion_tokens"] == 0
    alone = rows(client.post(EMBEDDINGS, json={"input": TEXTS[1], "encoding_format": "base64"}))
    np.testing.assert_allclose(alone, vectors[1:2], atol=1e-6)


def test_forms_of_the_input_and_the_answer(client: httpx.Client, vectors: np.ndarray) -> None:
    ids = client.post("/tokenize", json={"prompt": "Rome"}).json()["tokens"]
    assert ids[-1] == END
    for given in (ids, [ids]):
        np.testing.assert_allclose(rows(client.post(EMBEDDINGS, json={"input": given})), vectors[:1], atol=1e-6)
    asked = {"input": "Rome", "prompt_name": "query"}
    np.testing.assert_allclose(rows(client.post(EMBEDDINGS, json=asked)), vectors[3:], atol=1e-6)
    for form in ("float", "base64"):
        few = rows(client.post(EMBEDDINGS, json={"input": TEXTS, "dimensions": 7, "encoding_format": form}))
        cut = vectors[:3, :7] / np.linalg.norm(vectors[:3, :7], axis=1, keepdims=True)
        np.testing.assert_allclose(few, cut, atol=1e-6)
    whole = {"input": "Rome " * 5000, "truncate_prompt_tokens": len(ids)}
    assert client.post(EMBEDDINGS, json=whole).json()["usage"]["prompt_tokens"] == len(ids)
    assert len(rows(client.post(EMBEDDINGS, json={"input": ["x"] * 300}))) == 300
    longest = {"input": [5, 6] * 1024}
    exact = rows(client.post(EMBEDDINGS, json=longest | {"truncate_prompt_tokens": -1}))
    np.testing.assert_allclose(exact, rows(client.post(EMBEDDINGS, json=longest)), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input: is required"),
        ({"input": ""}, "input", "length >= 1"),
        ({"input": ["a", 3]}, "input", "must be texts, or lists of token ids"),
        ({"input": [1030]}, "input", "input: token ids must be in 0..1029"),
        ({"input": "x " * 5000}, "input", "maximum context length is 2048 tokens"),
        ({"input": ["x"] * 2049}, "input", "2049 texts, must be at most 2048"),
        ({"input": "x", "dimensions": 193}, "dimensions", "dimensions=193: must be in 1..192"),
        ({"input": "x", "dimensions": 0}, "dimensions", "must be int >= 1"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1 or >= 1"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "one of 'float', 'base64'"),
        ({"input": "x", "prompt_name": "title"}, "prompt_name", "prompts: 'query', 'document'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_named(client: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    answer = client.post(EMBEDDINGS, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and message in error["message"], error


def test_embeddings_need_a_key_and_are_counted(embedder: Server, client: httpx.Client) -> None:
    with embedder.client() as stranger:
        assert stranger.post(EMBEDDINGS, json={"input": "x"}).status_code == 401
    before = embedder.metric("vllm:prompt_tokens_total")
    tokens = client.post(EMBEDDINGS, json={"input": TEXTS}).json()["usage"]["prompt_tokens"]
    assert embedder.metric("vllm:prompt_tokens_total") == before + tokens


def test_endpoints_of_another_runner_say_so(client: httpx.Client, reranker: httpx.Client) -> None:
    for (method, path), operation in ROUTES.items():
        if operation.runner:
            other = client if operation.runner == "generate" else reranker
            answer = other.request(method, path, json={})
            assert answer.status_code == 400 and "--runner pooling" in answer.json()["error"]["message"], path


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    with LLM(str(make_reranker(tmp_path_factory.mktemp("scores"))), device="cpu", num_kvcache_blocks=64) as llm:
        return llm.score(ASKED, TEXTS, use_tqdm=False)


def test_scores_are_those_of_the_library(reranker: httpx.Client, scores: list[float]) -> None:
    body = reranker.post(SCORE, json={"text_1": ASKED, "text_2": TEXTS}).json()
    assert [each["index"] for each in body["data"]] == [0, 1, 2] and body["data"][0]["object"] == "score"
    assert [each["score"] for each in body["data"]] == pytest.approx(scores, rel=1e-4)
    pair = reranker.post(SCORE, json={"text_1": [ASKED, ASKED], "text_2": TEXTS[:2]}).json()
    assert [each["score"] for each in pair["data"]] == pytest.approx(scores[:2], rel=1e-4)
    assert body["usage"]["completion_tokens"] == 3
    for query, document in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):  # vLLM's other names
        more = {"user": "a", "request_id": "b", "priority": 0}
        other = reranker.post(SCORE, json={query: ASKED, document: TEXTS[0], **more})
        assert other.status_code == 200 and "x-ignored-fields" not in other.headers, other.text
        assert other.json()["data"][0]["score"] == pytest.approx(scores[0], rel=1e-4)


@pytest.mark.parametrize("path", RERANKS)
def test_documents_are_ranked(reranker: httpx.Client, scores: list[float], path: str) -> None:
    order = sorted(range(3), key=lambda index: -scores[index])
    asked = {"model": "demo", "query": ASKED, "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    results = reranker.post(path, json=asked).json()["results"]
    assert [each["index"] for each in results] == order
    assert [each["relevance_score"] for each in results] == pytest.approx([scores[i] for i in order], rel=1e-4)
    assert [each["document"] for each in results] == [{"text": TEXTS[i]} for i in order]
    short = reranker.post(path, json=asked | {"top_n": 1, "return_documents": False}).json()["results"]
    assert [each["index"] for each in short] == order[:1] and "document" not in short[0]


def test_long_documents_are_cut(reranker: httpx.Client) -> None:
    """To the first tokens of each, or so that the whole prompt has so many; what is said of a document is whole."""
    long, asked = "The capital of Italy is Rome. " * 1000, {"query": ASKED, "documents": ["Rome", "a\U0001f600b"]}

    def ranked(path: str = RERANKS[0], **more: Any) -> Any:
        answer = reranker.post(path, json=asked | more)
        assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers, answer.text
        return answer.json()

    def tokens(*documents: str, **more: Any) -> int:
        return int(ranked(documents=documents, **more)["usage"]["prompt_tokens"])

    loose: dict[str, Any] = {"max_tokens_per_doc": 50, "truncate_prompt_tokens": -1}
    for more in (loose, {"max_tokens_per_doc": 0, "max_tokens_per_query": 0}):
        assert ranked(**more)["results"] == ranked()["results"]
    cut = ranked(documents=[long], max_tokens_per_doc=7)
    assert cut["results"][0]["document"]["text"] == long
    assert tokens(long, max_tokens_per_doc=9) == cut["usage"]["prompt_tokens"] + 2
    assert tokens("Rome", query=ASKED * 500, max_tokens_per_query=5) < tokens("Rome") + 5
    least = tokens("")
    for most in (least, least + 1, least + 40):
        assert tokens(long, truncate_prompt_tokens=most) == most
        assert least <= tokens("\U0001f600" * 99, truncate_prompt_tokens=most) <= most
    assert tokens(long, truncate_prompt_tokens=-1) == 2047
    body = {"text_1": ASKED, "text_2": [long], "max_tokens_per_doc": 7}
    assert reranker.post(SCORE, json=body).json()["data"][0]["score"] == cut["results"][0]["relevance_score"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"queries": [5], "documents": "a"}, "queries"),
        (SCORE, {"data_1": ["a", "b"], "data_2": ["a", "b", "c"]}, "data_2"),
        (SCORE, {"text_1": "a", "text_2": ["x"] * 1025}, "text_2"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": ["x " * 5000]}, "documents"),
        ("/rerank", {"query": "a" * 10000, "documents": ["x"] * 1000}, "documents"),
        ("/rerank", {"query": "a", "documents": ["x"] * 1000, "instruction": "b" * 10000}, "documents"),
        ("/rerank", {"query": "a", "documents": ["x"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["x"], "max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["x" * 50], "truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ("/rerank", {"query": "a", "documents": ["x" * (1 << 20)], "max_tokens_per_doc": 9}, "documents"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_in_pairs_is_named(reranker: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = reranker.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(param) or answer.json()["error"]["param"] == param
