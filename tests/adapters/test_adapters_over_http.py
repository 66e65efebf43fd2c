"""Adapters of a server: requests name them as their model, administrators load and unload them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapters.peft_files import CONFIG, random_tensors, save
from safetensors.torch import load_file
from serve.serving import ANSWER, ASK, CHAT, COMPLETIONS, DEMO, Server, ready_server, wait_for
from system import free_port
from torch import nn
from transformers import AutoModelForCausalLM

from nanovllm.transfer.buckets import Entry, described
from nanovllm.transfer.receiver import WeightSender
from nanovllm.transfer.shared import SharedBucket

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY = {"authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the demo model."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    modules = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != "lm_head"]
    made = [random_tensors(model, modules, CONFIG, seed) for seed in range(2)]
    top = tmp_path_factory.mktemp("adapters")
    return [save(top / str(number), tensors, target_modules="all-linear") for number, tensors in enumerate(made)]


def test_models_by_adapter(folders: list[Path], tmp_path: Path) -> None:
    options = ("--enable-lora", "--max-loras", "1", "--lora-modules", f"first={folders[0]}", "--admin-api-key", "admin")
    with ready_server(tmp_path, *options) as server, server.client("admin") as client:
        assert client.get("/v1/models").json()["data"][1].items() >= {
            "id": "first", "parent": "demo", "root": str(folders[0])}.items()  # fmt: skip
        with server.client("user") as user:
            assert user.post(LOAD, json={"lora_name": "x", "lora_path": str(folders[1])}).status_code == 401

        def text(model: str) -> Any:
            answer = client.post(CHAT, json=ASK | {"model": model, "max_tokens": 12})
            assert answer.status_code in (200, 404), answer.text
            found = answer.json()
            assert answer.status_code == 404 or found["model"] == model
            return found["choices"][0]["message"]["content"] if answer.status_code == 200 else None

        body = ASK | {"model": "first", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        labels = {"max_lora": "1", "running_lora_adapters": "first", "waiting_lora_adapters": ""}
        with client.stream("POST", CHAT, json=body):
            wait_for(lambda: server.metric("vllm:lora_requests_info", **labels), "the adapter's name")
        first = text("first")
        assert text("demo") == ANSWER != first and text("second") is None
        assert client.post(LOAD, json={"lora_name": "second", "lora_path": str(folders[1])}).status_code == 200
        second = text("second")
        assert second not in (first, ANSWER, None)
        assert text("first") == first and text("demo") == ANSWER
        taken = client.post(LOAD, json={"lora_name": "first", "lora_path": str(folders[1])})
        assert taken.status_code == 400 and "already loaded" in taken.json()["error"]["message"]  # as clients look for
        body = {"lora_name": "first", "lora_path": str(folders[1]), "load_inplace": True}
        assert client.post(LOAD, json=body).status_code == 200
        assert text("first") == second
        found = client.post(COMPLETIONS, json={"model": "first", "prompt": ["a", "b"], "max_tokens": 2}).json()
        assert found["model"] == "first" and len(found["choices"]) == 2
        bad = client.post(LOAD, json={"lora_name": "bad", "lora_path": str(tmp_path)})
        assert bad.status_code == 400 and "adapter_config.json" in bad.json()["error"]["message"]
        assert client.post(UNLOAD, json={"lora_name": "second"}).status_code == 200
        assert text("second") is None and client.post(UNLOAD, json={"lora_name": "second"}).status_code == 404
        names = [one["id"] for one in client.get("/v1/models").json()["data"]]
        assert names == ["demo", "first"]
        assert httpx.get(f"{server.url}/v1/models/first", headers=KEY).json()["root"] == str(folders[1])


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_trainer_sends_adapters(folders: list[Path], replicas: str, tmp_path: Path) -> None:
    """Through shared memory and over a group, under a stream, to all replicas; texts are those of the same from a
    folder."""
    options = ("--enable-lora", "--max-loras", "1", "--admin-api-key", "admin", "--data-parallel-size", replicas)
    made = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    config = json.loads((folders[0] / "adapter_config.json").read_text())
    bucket, address = SharedBucket(1 << 21, "cpu"), {"master_address": "127.0.0.1", "master_port": free_port()}
    info = {**address, "rank_offset": 1, "world_size": 2}
    with ready_server(tmp_path, *options) as server, server.client("admin") as client, ThreadPoolExecutor() as pool:

        def post(path: str, status: int = 200, **body: Any) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        def texts(model: str) -> set[str]:
            """Answers of requests that run side by side, so that each replica has some."""
            asked = [pool.submit(post, CHAT, **ASK, model=model, max_tokens=8) for _ in range(6)]
            return {one.result(60)["choices"][0]["message"]["content"] for one in asked}

        expected = []
        for number, folder in enumerate(folders):
            post(LOAD, lora_name=str(number), lora_path=str(folder))
            expected.append(texts(str(number)))
        message = bucket.fill([*made[0].items()])
        with server.client("user") as user:
            given = {"lora_name": "policy", "lora_config": config, "update_info": message}
            assert user.post(LOAD, json=given).status_code == 401
        body = ASK | {"model": "demo", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with client.stream("POST", CHAT, json=body) as stream:
            post(LOAD, lora_name="policy", lora_config=config, update_info=message, lora_id="a")
            assert texts("policy") == expected[0]
            stream.close()
        joined = pool.submit(post, "/init_weight_transfer_engine", init_info=info)
        sender = WeightSender(info, "cpu", timeout=60)
        joined.result(60)
        sent = pool.submit(sender.send, made[1].items())
        named = described([Entry.of(*pair) for pair in made[1].items()])
        post(LOAD, lora_name="policy", lora_config=config, update_info=named, load_inplace=True, lora_id="a")
        sent.result(60)
        sender.close()
        assert texts("policy") == expected[1] != expected[0]
        wrong = [({"lora_path": str(folders[0]), "lora_config": config, "update_info": message}, "lora_path"),
                 ({"lora_config": config}, "lora_path"), ({"lora_path": "x", "lora_config": config}, "lora_path"),
                 ({"update_info": message}, "lora_path"), ({}, "lora_path"),
                 ({"lora_config": config | {"use_dora": True}, "update_info": message}, "use_dora"),
                 ({"lora_config": config, "update_info": {**message, "nbytes": 1 << 40}}, "nbytes"),
                 ({"lora_config": config, "update_info": message, "lora_id": "a"}, "lora_name")]  # fmt: skip
        for body, name in wrong:
            assert name in post(LOAD, 400, lora_name="policy", **body)["error"]["message"]
        bucket.close()
        assert texts("policy") == expected[1]
        post(UNLOAD, lora_name="policy")
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["demo", "0", "1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--lora-modules", "a=b"), "lora_modules: needs enable_lora"),
        (("--enable-lora", "--lora-modules", "a"), "lora_modules='a': must be name=folder"),
        (("--enable-lora", "--lora-modules", "a=/nowhere"), "lora_modules: lora_path='/nowhere': must be a folder"),
    ],
)
def test_a_server_that_cannot_have_them_ends(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    with Server(tmp_path, *options) as server:
        assert server.process.wait(120) != 0 and said in server.log and "Traceback" not in server.log
