"""Options of the command that change answers, all of them at one server."""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from front import InProcess, ready_front
from serving import ASK, CHAT, COMPLETIONS, DEMO, GENERATE, events, ready_server, user
from system import wait_for

from nanovllm.engine.engine_state import LoadedAdapter
from nanovllm.serve.api import completions, generate
from nanovllm.serve.errors import ApiError
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.served_model import ServedModel

ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def configured() -> Iterator[InProcess]:
    names = ("--served-model-name", "a", "owner/b", "c%41")
    key, origin = ("--api-key", "k"), ("--allowed-origins", ORIGIN)
    templates = ("--trust-request-chat-template", "--log-prompts", "--strict-fields")
    defaults = ("--override-generation-config", json.dumps({"temperature": 0, "max_new_tokens": 3}))
    options = (*names, *key, *origin, *templates, *defaults, "--root-path", "/llm/")
    with ready_front(*options) as server:
        yield server


@pytest.fixture
def client(configured: InProcess) -> Iterator[httpx.Client]:
    with configured.client("k") as opened:
        yield opened


def test_several_names(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["a", "owner/b", "c%41"]
    assert listed[0]["max_model_len"] == 2048
    assert client.get("/v1/models/owner/b").json()["id"] == "owner/b"
    assert client.get("/v1/models/owner%2Fb").status_code == 200
    assert client.get("/v1/models/c%2541").json()["id"] == "c%41"
    assert client.get("/v1/models/c%41").status_code == 404
    assert client.post(CHAT, json=ASK | {"model": "owner/b"}).json()["model"] == "owner/b"
    assert client.post(CHAT, json=ASK | {"model": "demo"}).status_code == 404


def test_a_name_that_stands_for_all() -> None:
    for names, known, first in ((("a", "*"), True, "a"), (("*",), True, "folder"), (("a",), False, "a")):
        model = ServedModel("folder", ServeOptions(served_model_name=names))
        assert model.names == (first,)
        with nullcontext() if known else pytest.raises(ApiError, match="does not exist"):
            model.check_name("claude-haiku-4-5-20251001")


def test_an_adapter_that_goes_while_a_request_is_read_leaves_it_no_other_model() -> None:
    loaded = {"mine": LoadedAdapter("digest", "/mine")}
    model = ServedModel("folder", ServeOptions(served_model_name=("a",)), lambda: loaded)
    model.check_name("mine")
    assert [model.adapter_of(name) for name in ("mine", "a", None)] == ["digest", None, None]
    loaded.clear()
    with pytest.raises(ApiError, match="does not exist"):
        model.adapter_of("mine")


def test_paths_below_a_prefix(configured: InProcess, client: httpx.Client) -> None:
    """--root-path: as a proxy sends them that strips its prefix, and as one that does not."""
    for path in ("/v1/models", "/v1/models/owner/b", "/"):
        assert client.get("/llm" + path).content == client.get(path).content
    assert client.post("/llm" + CHAT, json=ASK).status_code == 200
    assert client.get("/llmx/v1/models").status_code == client.get("/llm/llm/v1/models").status_code == 404
    assert httpx.get(configured.url + "/llm/health").status_code == 200
    assert httpx.get(configured.url + "/llm/v1/models").status_code == 401


def test_allowed_origin(configured: InProcess, client: httpx.Client) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    answer = httpx.options(configured.url + CHAT, headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
    other = httpx.options(configured.url + CHAT, headers=asked | {"origin": "https://elsewhere.example"})
    assert "access-control-allow-origin" not in other.headers
    with client.stream("POST", CHAT, json=ASK | {"stream": True}, headers={"origin": ORIGIN}) as stream:
        assert stream.headers["access-control-allow-origin"] == ORIGIN
        assert list(events(stream))


def test_template_of_a_request(configured: InProcess, client: httpx.Client) -> None:
    body = {"messages": user("hello"), "chat_template": "{{ messages[0].content }}, world"}
    ids = client.post("/tokenize", json=body).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "hello, world"}
    assert client.post(CHAT, json=body | {"max_tokens": 1}).status_code == 200
    wait_for(lambda: "'hello, world'" in configured.log, "the prompt's line in the log")
    broken = client.post(CHAT, json=body | {"chat_template": "{% if %}"})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "chat_template")


def test_defaults_of_the_server(client: httpx.Client) -> None:
    body = {"messages": ASK["messages"]}
    texts = {client.post(CHAT, json=body).json()["choices"][0]["message"]["content"] for _ in range(3)}
    assert texts == {"The capital of"}


def test_the_models_defaults_are_not_a_trainers() -> None:
    """Who trains counts on the distribution that was asked for."""
    model, call = ServedModel("folder", ServeOptions()), Mock(notes=[])
    model.tokenizer = Mock(longest_token=9)
    model.info, model.defaults = {"max_model_len": 64, "vocab_size": 1024}, {"top_k": 20, "repetition_penalty": 1.1}
    params = {"temperature": 0.7, "max_tokens": 2}
    chosen = completions.prepare(model, call, params | {"prompt": [5, 6]}).params
    assert chosen == {"top_k": 20, "repetition_penalty": 1.1, **params}
    assert generate.prepare(model, call, {"token_ids": [5, 6], "sampling_params": params}).params == params


def test_token_ids_alone_without_a_tokenizer(tmp_path: Path) -> None:
    """--skip-tokenizer-init: a folder without a tokenizer is served."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    with ready_server(tmp_path, "--skip-tokenizer-init", "--log-prompts", model=folder) as server:
        params = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answer = client.post(GENERATE, json={"token_ids": [5, 6], "sampling_params": params}).json()
            body = params | {"prompt": [5, 6], "return_token_ids": True}
            choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
            assert choice["token_ids"] == answer["choices"][0]["token_ids"] and choice["text"] == ""
            for path, wrong in (
                (COMPLETIONS, {"prompt": "text"}), (CHAT, ASK), ("/tokenize", {"prompt": "text"}),
                ("/detokenize", {"tokens": [5]}), (COMPLETIONS, {"prompt": [5], "stop": "a"}),
            ):  # fmt: skip
                refused = client.post(path, json=wrong)
                assert refused.status_code == 400 and "tokenizer" in refused.text, path
        assert "Traceback" not in server.log


def test_unknown_fields_are_refused_where_the_server_is_told_to(client: httpx.Client) -> None:
    """--strict-fields."""
    refused = client.post(CHAT, json=ASK | {"no_such": 1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "no_such")
    assert "unknown field" in refused.text and "x-ignored-fields" not in refused.headers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"api_keys": ("a", "b"), "admin_api_keys": ("b",)}, "admin_api_keys: must be other keys"),
        ({"served_model_name": ("a", "")}, "served_model_name=.*: must be names that are not empty"),
        ({"weight_update_timeout": math.nan}, "weight_update_timeout=nan: must be a number >= 0, or inf"),
        ({"allowed_origins": ("your.page",)}, "allowed_origins='your.page': must be an origin such as https://your"),
        ({"override_generation_config": {"topp": 1}}, "override_generation_config: unknown entry 'topp'; did you mean"),
        ({"root_path": "llm"}, "root_path='llm': must begin with /"),
        ({"api_keys": ("a", "")}, "must hold no empty key"), ({"port": 65536}, "port=65536: must be in"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout=-1.0: must be a number >= 0"),
        ({"max_num_queued_reqs": 0}, "max_num_queued_reqs=0: must be >= 1"),
        ({"log_format": "xml"}, "log_format='xml': must"),
        ({"max_waiting_per_key": 3}, "max_waiting_per_key: needs api_keys"),
        ({"ssl_keyfile": __file__}, "ssl_keyfile and ssl_certfile: must be given together"),
        ({"otlp_traces_endpoint": "localhost:4317"}, "otlp_traces_endpoint='localhost:4317': must be the http URL"),
    ],
)  # fmt: skip
def test_options_out_of_bounds_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServeOptions(**options)
