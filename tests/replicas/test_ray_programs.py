"""Ray Data's and Ray Serve's ways to the engine."""

import json
import socket
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replica_workload import DEMO, OPTIONS

from nanovllm import LLM, SamplingParams
from nanovllm.ray import Predictor, app
from nanovllm.ray.server_loads import ServerLoads, prefix_of
from nanovllm.ray.serving import Engine
from nanovllm.serve.link import EngineChild

SAMPLED = SamplingParams(max_tokens=12)
TEXTS = ["1 2 3", "The capital of France is", "Once upon a time", "3 + 4 ="]


def rows(batch: dict[str, Any]) -> dict[str, str]:
    return dict(zip(batch["prompt"], batch["generated_text"], strict=True))


def test_what_a_row_gains_does_not_depend_on_its_batch() -> None:
    predict = Predictor(DEMO, SAMPLED, **OPTIONS)
    together = predict({"prompt": np.array(TEXTS, dtype=object), "number": np.arange(4)})
    assert list(together["number"]) == [0, 1, 2, 3] and set(together["generated_finish_reason"]) <= {"stop", "length"}
    alone = [rows(predict({"prompt": np.array([text], dtype=object)})) for text in reversed(TEXTS)]
    assert rows(together) == {name: text for found in alone for name, text in found.items()}
    chats = np.empty(1, dtype=object)
    chats[0] = np.array([{"role": "user", "content": "What is the capital of Italy?"}], dtype=object)
    assert predict({"prompt": chats})["generated_text"][0]
    with pytest.raises(ValueError, match="column='prompt': must be one of 'text'"):
        predict({"text": np.array(TEXTS)})


def test_a_server_that_ray_serve_lets_go_ends_its_engine() -> None:
    server = object.__new__(Engine)
    server._folder = tempfile.TemporaryDirectory()
    child = server._child = EngineChild(DEMO, OPTIONS)
    folder = Path(server._folder.name)
    del server
    with child.socket:
        assert child.process.poll() is not None and not folder.exists()


def body(text: str, more: str) -> bytes:
    messages = [{"role": "system", "content": text * 4000}, {"role": "user", "content": more}]
    return json.dumps({"messages": messages}).encode()


def test_requests_that_begin_alike_meet_until_their_server_is_loaded() -> None:
    loads, servers = ServerLoads(), ["a", "b"]
    chosen = []
    for n in range(40):
        prefix = prefix_of(body("xy"[n % 2] + "some rules ", str(n)))
        server = loads.order(servers, prefix)[0]
        loads.begin(server, str(n), prefix)
        chosen.append(server)
        if n >= 2:
            loads.end(str(n - 2))
    assert len(set(chosen[0::2])) == len(set(chosen[1::2])) == 1 and set(chosen) == {"a", "b"}
    crowd = []
    for n in range(40, 120):
        prefix = prefix_of(body("z", str(n)))
        crowd.append(loads.order(servers, prefix)[0])
        loads.begin(crowd[-1], str(n), prefix)
    assert min(crowd.count(each) for each in servers) > 30
    loads.keep({"a"})
    assert loads.order(["a", "c"], prefix_of(b"not json")) == ["c", "a"]
    for n in range(120):
        loads.end(str(n))
    assert loads.order(servers, prefix_of(b"not json")) == servers  # what ends of one that was gone counts for nothing


@pytest.mark.slow
def test_map_batches_over_two_actors() -> None:
    ray = pytest.importorskip("ray")
    data = pytest.importorskip("ray.data")
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20)
    try:
        found = data.from_items([{"prompt": text} for text in TEXTS * 3]).map_batches(
            Predictor,
            fn_constructor_kwargs={"model": DEMO, "sampling_params": SAMPLED, **OPTIONS},
            compute=data.ActorPoolStrategy(size=2),
            batch_size=2,
        )
        texts = {row["prompt"]: row["generated_text"] for row in found.take_all()}
    finally:
        ray.shutdown()
    assert texts == rows(Predictor(DEMO, SAMPLED, **OPTIONS)({"prompt": np.array(TEXTS, dtype=object)}))


@pytest.mark.slow
def test_the_server_in_ray_serve() -> None:
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init("local", num_cpus=6, include_dashboard=False, object_store_memory=100 << 20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        scaling = {"min_replicas": 2, "max_replicas": 2}
        serve.run(app(DEMO, scaling, {"served_model_name": ("demo",)}, **OPTIONS))
        url = f"http://127.0.0.1:{port}/v1/completions"

        def post(**changes: Any) -> tuple[int, bytes]:
            request = {"model": "demo", "prompt": TEXTS[1], "max_tokens": 8, "temperature": 0, **changes}
            answer = urllib.request.urlopen(urllib.request.Request(url, json.dumps(request).encode()), timeout=60)
            return answer.status, answer.read()

        with LLM(DEMO, **OPTIONS) as llm:
            [expected] = llm.generate(TEXTS[1], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        for _ in range(4):
            assert json.loads(post()[1])["choices"][0]["text"] == expected.text
        streamed = post(stream=True)[1]
        assert streamed.count(b"data: ") > 4 and streamed.rstrip().endswith(b"[DONE]")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post(model="another")
    finally:
        serve.shutdown()
        ray.shutdown()
