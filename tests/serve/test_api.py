"""Answers of the endpoints, to the byte where clients look."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front import InProcess
from prometheus_client.parser import text_string_to_metric_families
from serving import ANSWER, ASK, CHAT, COMPLETIONS, DEMO, GENERATE, MESSAGES, RESPONSES, Server, events, streamed, user
from system import wait_for
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams, StructuredOutput
from nanovllm.serve.api.routes import ROUTES


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(DEMO), device="cpu", num_kvcache_blocks=64) as opened:
        yield opened


def test_chat_to_the_byte(client: httpx.Client) -> None:
    answer = client.post(CHAT, json=ASK)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", body["id"])
    message = {"role": "assistant", "content": ANSWER, "reasoning": None, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    usage = {"prompt_tokens": 15, "completion_tokens": 9, "total_tokens": 24}
    changing = {name: body[name] for name in ("id", "created", "system_fingerprint")}
    changing["usage"] = usage | {"prompt_tokens_details": body["usage"]["prompt_tokens_details"]}
    nothing = dict.fromkeys(("service_tier", "kv_transfer_params", "prompt_token_ids", "prompt_logprobs"))
    choices = [choice | {"stop_reason": None, "token_ids": None}]
    assert body == {"object": "chat.completion", "model": "demo", "choices": choices} | changing | nothing


def test_stream_to_the_byte(client: httpx.Client) -> None:
    with client.stream("POST", CHAT, json=ASK | {"stream": True, "n": 2}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
        chunks = list(events(response))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    for index in (0, 1):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert "".join(choice["delta"].get("content", "") for choice in own) == ANSWER


def test_usage_of_a_stream(client: httpx.Client) -> None:
    chunks = streamed(client, CHAT, ASK | {"stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["completion_tokens"] == 9 and chunks[-1]["choices"] == []
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_usage_so_far_in_each_chunk(client: httpx.Client) -> None:
    options = {"continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in streamed(client, CHAT, ASK | {"stream_options": options}))
    for _ in range(10):  # on a busy machine all tokens may come in one chunk
        chunks = streamed(client, CHAT, ASK | {"stream_options": options | {"include_usage": True}})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-2:] == [9, 9] and chunks[-1]["choices"] == []
        if counts[0] < counts[-1]:
            return
    raise AssertionError(counts)


def test_refused_streams_have_a_status(served: httpx.Client) -> None:
    """Also where only the engine finds out what is wrong."""
    for name, value in (
        ("top_logprobs", 21), ("top_p", 2), ("structured_outputs", {"regex": "("}), ("logit_bias", {"5000": 1}),
    ):  # fmt: skip
        answer = served.post(CHAT, json=ASK | {"logprobs": True, "stream": True, name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_prompt_cache_is_seen_and_salted(served: httpx.Client) -> None:
    body = {"prompt": "the cat and the dog " * 20, "max_tokens": 1, "cache_salt": "one"}
    cached = []
    for salt in ("one", "one", "two"):
        usage = served.post(COMPLETIONS, json=body | {"cache_salt": salt}).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_paths_and_methods(client: httpx.Client) -> None:
    for path in ("/nothing", "/v1", "/v1/images", "/v1/chat", "/v1/load_lora_adapter", "/sleep"):
        for answer in (client.get(path), client.post(path, json={})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), path
    refused = client.get(CHAT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    head = client.head("/health")
    assert (head.status_code, head.content) == (200, b"")


def test_tokenize(client: httpx.Client) -> None:
    hf = AutoTokenizer.from_pretrained(DEMO)
    text = "Hello, é 漢 🙂 world"
    body = client.post("/tokenize", json={"model": "demo", "prompt": text, "return_token_strs": True}).json()
    assert body["tokens"] == hf.encode(text)
    assert body["token_strs"] == hf.convert_ids_to_tokens(body["tokens"])
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 2048
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": text}
    chat = client.post("/tokenize", json={"messages": ASK["messages"]}).json()["tokens"]
    wanted = hf.apply_chat_template(ASK["messages"], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert chat == wanted
    error = client.post("/tokenize", json={"messages": ASK["messages"], "tools": [{"5": 1}]}).json()["error"]
    assert (error["param"], error["message"][:9]) == ("tools", "tools[0]:")


def test_tokens_as_ids(served: httpx.Client) -> None:
    body = {"prompt": "3 + 4 =", "max_tokens": 2, "logprobs": 1, "temperature": 0, "return_token_ids": True}
    choice = served.post(COMPLETIONS, json=body | {"return_tokens_as_token_ids": True}).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["stop_reason"] is choice["prompt_logprobs"] is None


def test_ids_of_prompts_in_streams(client: httpx.Client) -> None:
    """In the first chunk of each choice: a chat's beside the choices, a completion's within."""
    for path, body in ((CHAT, ASK), (COMPLETIONS, {"prompt": ["a b", "c"], "max_tokens": 3, "ignore_eos": True})):
        body = body | {"return_token_ids": True, "n": 2}
        whole = client.post(path, json=body).json()
        chunks = streamed(client, path, body)
        for choice in whole["choices"]:
            own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
            holders = [chunk if path == CHAT else chunk["choices"][0] for chunk in own]
            wanted = (whole if path == CHAT else choice)["prompt_token_ids"]
            assert wanted and holders[0]["prompt_token_ids"] == wanted
            assert not any("prompt_token_ids" in holder for holder in holders[1:])
            ids = [token for chunk in own for token in chunk["choices"][0]["token_ids"]]
            assert len(ids) == len(choice["token_ids"])


def test_prompt_logprobs(served: httpx.Client, llm: LLM) -> None:
    """As the library has them."""
    body = {"prompt": "3 + 4 = 7", "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    choice = served.post(COMPLETIONS, json=body).json()["choices"][0]
    [output] = llm.generate([body["prompt"]], SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    assert choice["prompt_token_ids"] == output.prompt_token_ids
    ids = served.post("/tokenize", json={"messages": ASK["messages"]}).json()["tokens"]
    chat = served.post(CHAT, json=ASK | {"prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 1}).json()
    assert chat["prompt_token_ids"] == ids and len(chat["prompt_logprobs"]) == len(ids)
    assert all(str(token) in line for token, line in zip(ids[1:], chat["prompt_logprobs"][1:], strict=True))
    assert output.prompt_logprobs is not None
    for found, wanted in zip(choice["prompt_logprobs"], output.prompt_logprobs, strict=True):
        assert (found is None) == (wanted is None)
        for token, one in (wanted or {}).items():
            shown = found[str(token)]
            assert (shown["rank"], shown["decoded_token"]) == (one.rank, one.decoded_token)
            assert shown["logprob"] == pytest.approx(one.logprob, abs=1e-4)


def joined(chunks: list[dict[str, Any]], index: int) -> tuple[str, dict[str, list[Any]]]:
    """Text and log-probabilities of one choice of a stream."""
    text, logprobs = "", {name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        text += choice["text"]
        for name, found in logprobs.items():
            found.extend((choice["logprobs"] or {}).get(name, []))
    return text, logprobs


@pytest.mark.parametrize(
    ("more", "unstreamed"),
    [
        ({"max_tokens": 6}, {}), ({"max_tokens": 0}, {}), ({"max_tokens": 5}, {"prompt_logprobs": 0}),
        ({"max_tokens": 9, "stop": ["9"]}, {}), ({"max_tokens": 3, "truncate_prompt_tokens": 4}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_echo_with_logprobs_streamed_as_unstreamed(
    served: httpx.Client, more: dict[str, Any], unstreamed: dict[str, Any]
) -> None:
    prompts = ["1 2 3 4 5", "\U0001f600 é: the capital of France is"]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 3, "temperature": 0} | more
    whole = served.post(COMPLETIONS, json=body | unstreamed)
    assert whole.status_code == 200, whole.text
    chunks = streamed(served, COMPLETIONS, body)
    for index, choice in enumerate(whole.json()["choices"]):
        text, logprobs = joined(chunks, index)
        assert (text, logprobs["tokens"]) == (choice["text"], choice["logprobs"]["tokens"])
        assert logprobs["text_offset"] == choice["logprobs"]["text_offset"] and logprobs["token_logprobs"][0] is None
        for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert token.startswith("bytes:") or token.startswith(text[offset : offset + len(token)])
        for one, other in zip(logprobs["top_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
            assert one == (None if other is None else pytest.approx(other, abs=1e-4))
        if "truncate_prompt_tokens" not in more:
            assert text.startswith(prompts[index // 2])
        if more["max_tokens"] == 0:
            assert text == prompts[index // 2] and whole.json()["usage"]["completion_tokens"] == 0


def test_a_prompt_as_long_as_the_context_can_be_scored(served: httpx.Client) -> None:
    body = {"prompt": [5, 6] * 1024, "echo": True, "logprobs": 0}
    assert served.post(COMPLETIONS, json=body | {"max_tokens": 1}).status_code == 400
    choice = served.post(COMPLETIONS, json=body | {"max_tokens": 0}).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 2048


@pytest.mark.parametrize("num_likeliest", [0, 2])
def test_tokens_in_tokens_out(served: httpx.Client, num_likeliest: int) -> None:
    """As completions have them, streamed or not, and under the id that was asked for."""
    prompt = served.post("/tokenize", json={"prompt": "1 2 3 4 5"}).json()["tokens"]
    params = {"n": 2, "temperature": 1.2, "seed": 4, "max_tokens": 12, "logprobs_mode": "processed"}
    params["logprobs"] = num_likeliest
    body = {"token_ids": prompt, "sampling_params": params, "request_id": "my-id", "return_token_ids": True}
    whole = served.post(GENERATE, json=body).json()
    wanted = served.post(COMPLETIONS, json={"prompt": prompt, "return_token_ids": True} | params).json()
    assert whole["request_id"] == "my-id" and whole["prompt_token_ids"] == prompt
    chunks = [choice for chunk in streamed(served, GENERATE, body) for choice in chunk["choices"]]
    for index, (choice, other) in enumerate(zip(whole["choices"], wanted["choices"], strict=True)):
        assert choice["token_ids"] == other["token_ids"] and choice["finish_reason"] == other["finish_reason"]
        own = [chunk for chunk in chunks if chunk["index"] == index]
        assert [token for chunk in own for token in chunk["token_ids"]] == choice["token_ids"]
        entries = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert [entry["logprob"] for entry in entries] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
        assert [one["rank"] for chunk in own for one in chunk["logprobs"]["content"]] == [e["rank"] for e in entries]
        for entry in entries:
            first, *others = entry["top_logprobs"]
            assert first == {name: entry[name] for name in ("token_id", "logprob", "rank")}
            assert len(others) == num_likeliest - (entry["rank"] <= num_likeliest)
        spans = [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]
        assert choice["weight_versions"] == own[-1]["weight_versions"] == spans


def test_sampling_masks(served: httpx.Client, llm: LLM) -> None:
    """The ids that each token was sampled from, as the library has them."""
    constraint = {"regex": "[a-z ]{9,}"}
    fields: dict[str, Any] = {"n": 2, "seed": 1, "top_k": 3, "max_tokens": 5, "temperature": 1.5, "sampling_mask": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": fields | {"structured_outputs": constraint}}
    choices = served.post(GENERATE, json=body).json()["choices"]
    params = SamplingParams(**fields, structured_outputs=StructuredOutput(**constraint))
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    for choice, wanted in zip(choices, output.outputs, strict=True):
        assert wanted.sampling_mask is not None and choice["token_ids"] == wanted.token_ids
        assert choice["sampling_mask"] == [None if ids is None else ids.tolist() for ids in wanted.sampling_mask]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"sampling_params": {"sampling_mask": True}}, "sampling_mask"),
        ({"sampling_params": {"sampling_mask": 1, "top_k": 3}}, "sampling_mask"),
        ({"sampling_params": {"sampling_mask": True, "top_k": 3}, "stream": True}, "sampling_mask"),
        *(({"token_ids": wrong}, "token_ids") for wrong in ([], [10**6], [5] * 3000)),
        ({"sampling_params": {"top_p": 7}}, "top_p"), ({"request_id": "a\n"}, "request_id"),
        ({"sampling_params": {"logprobs_mode": "odd"}}, "logprobs_mode"), ({"output_mode": "text"}, "output_mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_broken_token_requests(client: httpx.Client, wrong: dict[str, Any], param: str) -> None:
    answer = client.post(GENERATE, json={"token_ids": [5], "sampling_params": {}} | wrong)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASK | {"user": "me"}), (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
        (RESPONSES, {"input": "a", "max_output_tokens": 1}), (MESSAGES, {"messages": user("a"), "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": user("a")}), ("/tokenize", {"prompt": "a"}),
        (GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 1}}),
    ],
)  # fmt: skip
def test_unknown_fields_are_named(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body | {"no_such": 1, "evil\r\nname": 2})
    assert (answer.status_code, answer.headers["x-ignored-fields"]) == (200, "evil??name, no_such"), answer.text
    assert "x-ignored-fields" not in client.post(path, json=body | {"no_such": None}).headers


def test_a_response_says_how_its_text_was_sampled(served: httpx.Client) -> None:
    """Its sampling fields are those of a chat, and log-probabilities come where they are included."""
    more = {"seed": 5, "temperature": 1.5, "top_p": 0.9, "stop": ["is"], "ignore_eos": True}
    chat = served.post(CHAT, json=ASK | more | {"logprobs": True, "top_logprobs": 2, "max_tokens": 12}).json()
    asked = {"input": ASK["messages"], "max_output_tokens": 12, "top_logprobs": 2}
    body = asked | more | {"include": ["message.output_text.logprobs"]}
    answer = served.post(RESPONSES, json=body).json()
    [part] = answer["output"][0]["content"]
    [choice] = chat["choices"]
    assert part["text"] == choice["message"]["content"]
    assert [one["token"] for one in part["logprobs"]] == [one["token"] for one in choice["logprobs"]["content"]]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert (answer["temperature"], answer["top_p"], answer["top_logprobs"]) == (1.5, 0.9, 2)
    with served.stream("POST", RESPONSES, json=body | {"stream": True}) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    told = [entry for event in lines if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    [done] = [event for event in lines if event["type"] == "response.output_text.done"]
    assert [one["token"] for one in done["logprobs"]] == [one["token"] for one in part["logprobs"]]
    assert told == done["logprobs"][: len(told)] and told


def test_the_form_of_a_message_and_of_a_response(served: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "f", "schema": schema}
    body: dict[str, Any] = {"messages": user("a"), "max_tokens": 40, "output_config": {"format": form}}
    message = served.post(MESSAGES, json=body).json()
    assert json.loads(message["content"][0]["text"]) == {"a": "x"}
    for wanted, text in (
        ({"text": {"format": form}}, '{"a":"x"}'), ({"structured_outputs": {"choice": ["yes"]}}, "yes"),
    ):  # fmt: skip
        answer = served.post(RESPONSES, json={"input": "a", "max_output_tokens": 40} | wanted).json()
        assert re.sub(r"\s", "", answer["output"][0]["content"][0]["text"]) == text


def test_request_ids(client: httpx.Client) -> None:
    for given, is_taken in (("abc-1", True), ("no blanks!", False)):
        answer = client.get("/health", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) == is_taken


def test_continued_message(served: httpx.Client) -> None:
    messages = [*ASK["messages"], {"role": "assistant", "content": "The capital of"}]
    answer = served.post(CHAT, json=ASK | {"messages": messages, "continue_final_message": True})
    assert answer.json()["choices"][0]["message"]["content"] == " Italy is Rome."
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert served.post(CHAT, json=ASK | {"messages": messages} | both).status_code == 400


def test_tokens_are_counted_as_they_come(server: Server, served: httpx.Client) -> None:
    """Not only when a request has ended: rates of a long one would be nothing, and then a peak."""
    wait_for(lambda: server.num_running() == 0, "rest")
    before = server.metric("vllm:generation_tokens_total")
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with served.stream("POST", COMPLETIONS, json=body) as stream:
        for _ in stream.iter_lines():
            running = server.num_running()
            if server.metric("vllm:generation_tokens_total") > before + 2:
                break
        assert running == 1
    wait_for(lambda: server.num_running() == 0, "abort")
    assert server.metric("vllm:generation_tokens_total") > before + 2, "a counter never goes back"


def test_metrics(front: InProcess, client: httpx.Client) -> None:
    assert client.post(CHAT, json=ASK).status_code == 200
    found = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    series = [(sample.name, *sorted(sample.labels.items())) for family in found.values() for sample in family.samples]
    assert len(series) == len(set(series)), "a series is there twice"
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries"),
        *("prefix_cache_hits", "prefix_cache_state_misses", "num_preemptions"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("iteration_tokens_total", "cache_config_info", "engine_sleep_state", "admission_rejections"),
    ):
        assert f"vllm:{name}" in found, name
    handlers = {sample.labels["handler"] for sample in found["http_requests"].samples}
    assert CHAT in handlers and handlers <= {"none"} | {path for _, path in ROUTES}


@pytest.mark.parametrize(
    ("path", "body", "gains"),
    [
        (CHAT, ASK, {"prompt_tokens_total": 15, "generation_tokens_total": 9, "request_success_total": 1}),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 5, "ignore_eos": True}, {
            "request_params_n_count": 3, "request_params_n_sum": 6, "request_params_max_tokens_count": 3,
            "request_params_max_tokens_sum": 15, "generation_tokens_total": 30, "request_success_total": 6,
        }),
    ],
    ids=["chat", "several prompts"],
)  # fmt: skip
def test_what_is_counted_of_a_request(
    server: Server, served: httpx.Client, path: str, body: dict[str, Any], gains: dict[str, int]
) -> None:
    wait_for(lambda: server.num_running() == 0, "rest")
    before = {name: server.metric(f"vllm:{name}") for name in gains}
    served.post(path, json=body)
    assert {name: server.metric(f"vllm:{name}") - before[name] for name in gains} == gains


def test_log(front: InProcess, client: httpx.Client) -> None:
    """A line a request, and none of what it said."""
    secret = "a very secret word"
    identity = client.post(CHAT, json={"messages": user(secret), "max_tokens": 2}).json()["id"]
    [line] = wait_for(lambda: [line for line in front.log.splitlines() if identity in line], "the request's line")
    assert "2 out" in line and "length" in line
    assert secret not in front.log
