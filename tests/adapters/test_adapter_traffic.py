"""Requests with adapters that come and go at random."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from adapters.peft_files import CONFIG, random_tensors, save
from adapters.test_adapters import LORA, PROMPTS, SCORED, generate, linears
from exactness import family_cases
from exactness.family_cases import CASES, make_model, with_layers
from safetensors.torch import load_file
from system import wait_for

from nanovllm import LLM, LoRARequest, SamplingParams

SMALL = with_layers(CASES["qwen3"], 2)


def test_nobody_runs_with_anothers(tmp_path: Path) -> None:
    """Each adapter writes its own tokens, while requests come at random, adapters go and come back, and names get other
    adapters: each request has what its name meant when it came, and shares prefixes with no other adapter."""
    model = make_model(SMALL)
    folder = family_cases.save(model, SMALL, tmp_path)
    draw = random.Random(3)
    given = [(random_tensors(model, linears(model), CONFIG, seed), {**CONFIG, "target_modules": "all-linear"})
             for seed in range(6)]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), **LORA, exact_bits="batch", max_num_seqs=5) as llm:

        def load(name: str, number: int) -> None:
            llm.load_adapter(name, tensors=given[number][0], config=given[number][1])

        for number in range(6):
            load(str(number), number)
        names = [None, *map(str, range(6))]
        own = [generate(llm, [PROMPTS[2]], LoRARequest(name) if name else None, params)[0] for name in names]
        expected = [output.outputs[0].token_ids for output in own]
        assert len({*map(tuple, expected)}) == 7
        llm.reset_prefix_cache()
        meant: dict[str | None, int] = {name: number for number, name in enumerate(names)}
        asked: dict[int, int] = {}
        gained: dict[int, list[int]] = {}
        for step in range(150):
            if step < 100 and draw.random() < 0.6:
                name = draw.choice([None, *(name for name in meant if name)])
                request_id = llm.add_request(PROMPTS[2], params, lora_request=LoRARequest(name) if name else None)
                asked[request_id], gained[request_id] = meant[name], []
            if step % 7 == 0 and len(meant) > 2:
                llm.remove_adapter(name := draw.choice([name for name in meant if name]))
                del meant[name]
            if step % 5 == 0:
                name, number = draw.choice(names[1:]), draw.randrange(6)
                assert name is not None
                load(name, number)
                meant[name] = number + 1
            for output in llm.step():
                gained[output.request_id] += output.new_token_ids
        assert not llm.has_unfinished_requests() and len(asked) > 40
        assert llm.stats().prefix_cache_hits > 20 * 16
    assert all(gained[request_id] == expected[number] for request_id, number in asked.items())


def test_rows_of_a_replica_that_is_lost_end_under_theirs(tmp_path: Path) -> None:
    """Though their names have other adapters by then, or none, which the replica that comes back has not loaded."""
    model = make_model(SMALL)
    folder = family_cases.save(model, SMALL, tmp_path)
    given = [random_tensors(model, linears(model), CONFIG, seed) for seed in range(3)]
    config = {**CONFIG, "target_modules": "all-linear"}
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {**LORA, "exact_bits": "batch"}
    with LLM(str(folder), **options) as llm:
        loaded = [None, *(llm.load_adapter(str(n), tensors=tensors, config=config) for n, tensors in enumerate(given))]
        own = [generate(llm, [PROMPTS[2]], request, params)[0] for request in loaded]
    expected = [output.outputs[0].token_ids for output in own]
    with LLM(str(folder), **options, max_num_seqs=4, data_parallel_size=2) as llm:
        for number, tensors in enumerate(given):
            llm.load_adapter(str(number), tensors=tensors, config=config)
        asked = {llm.add_request(PROMPTS[2], params, lora_request=loaded[n % 4]): n % 4 for n in range(12)}
        llm.load_adapter("1", tensors=given[0], config=config)
        llm.remove_adapter("2")
        gained: dict[int, list[int]] = {request_id: [] for request_id in asked}
        while llm.has_unfinished_requests():
            before = sum(map(len, gained.values()))
            for output in llm.step():
                gained[output.request_id] += output.new_token_ids
            if before < 100 <= sum(map(len, gained.values())):
                os.kill(llm.engine.engines.all[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert all(gained[request_id] == expected[number] for request_id, number in asked.items())
        assert llm.engine_info()["num_restarts"] == 1
        again = generate(llm, [PROMPTS[2]] * 4, [None, *map(LoRARequest, "010")], params)
        assert [output.outputs[0].token_ids for output in again] == [expected[n] for n in (0, 1, 1, 1)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_adapter_whose_folder_has_gone_ends_no_replica(
    replicas: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is started again goes on without the adapters that it cannot read, or that came from memory, and so do
    the others."""
    model = make_model(SMALL)
    folder = family_cases.save(model, SMALL, tmp_path / "model")
    changed = {"target_modules": "all-linear"}
    paths = [save(tmp_path / str(n), random_tensors(model, linears(model), CONFIG, n), **changed) for n in range(3)]
    options = {**LORA, "data_parallel_size": replicas, "data_parallel_backend": "local"}
    with LLM(str(folder), **options) as llm:
        requests = [llm.load_adapter(path.name, path) for path in paths]
        sent = {"weights": load_file(paths[0] / "adapter_model.safetensors").items(), "lora_config": CONFIG | changed}
        llm._turns.call("load_adapter", lora_name="3", lora_id="of a trainer", **sent)
        requests.insert(0, LoRARequest("3"))
        expected = generate(llm, PROMPTS, requests[-1], SCORED)
        generate(llm, PROMPTS, requests[0])
        shutil.rmtree(paths[0])
        (paths[1] / "adapter_config.json").write_text(json.dumps({**CONFIG, **changed, "lora_alpha": 1}))
        os.kill(llm.engine.engines.all[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        for _ in range(2):
            found = generate(llm, PROMPTS, requests[-1], SCORED)
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            generate(llm, PROMPTS * 4)
        # It is this program's steps that hear of the one that is started again.
        wait_for(lambda: generate(llm, PROMPTS[:1]) and [*llm.engine.state.adapters] == ["2"], "names to go")
        for request in requests[:-1]:
            with pytest.raises(ValueError, match="no adapter of this name"):
                generate(llm, PROMPTS, request)
        assert llm.engine_info()["num_restarts"] == 1
    assert all(f"adapter '{name}' is unloaded" in caplog.text for name in "013")
    assert "continue without it" not in caplog.text
