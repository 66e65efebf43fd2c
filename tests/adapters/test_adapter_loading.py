"""Adapters that come while an engine runs: steps go on, and what is no adapter changes nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_files import save
from adapters.test_adapters import LORA, OPTIONS, PROMPTS, check_values, generate, make_adapters, scores
from exactness import family_cases
from exactness.family_cases import CASES, make_model
from system import wait_for

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.runner.adapters import RankAdapters


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Any]:
    folder = tmp_path_factory.mktemp("qwen")
    model = make_model(CASES["qwen3"])
    return model, family_cases.save(model, CASES["qwen3"], folder / "model"), make_adapters(model, folder)


class Gate:
    """Holds up each adapter that a rank has read, until `may_end` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        read = RankAdapters.halves_of

        def slowly(*args: Any) -> Any:
            found = read(*args)
            self.began.set()
            assert self.may_end.wait(60)
            return found

        monkeypatch.setattr(RankAdapters, "halves_of", slowly)


def test_steps_go_on_while_an_adapter_is_read(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that come meanwhile wait for it; one that is dropped meanwhile is there if it is the one."""
    model, folder, made = qwen
    with LLM(str(folder), **LORA) as llm, ThreadPoolExecutor(3) as pool:
        llm.load_adapter("before", made[0][0])
        gate = Gate(monkeypatch)
        loading = [pool.submit(llm.load_adapter, "a", made[0][0])]
        assert gate.began.wait(60)
        loading.append(pool.submit(llm.load_adapter, "b", made[1][0]))
        check_values(model, made, generate(llm, PROMPTS, LoRARequest("before")), [1] * 3)
        llm.remove_adapter("before")
        check_values(model, made, generate(llm, PROMPTS), [0] * 3)
        assert not any(one.done() for one in loading)
        gate.may_end.set()
        a, b, c = *(one.result(60) for one in loading), llm.load_adapter("c", made[2][0])
        for given, numbers in (([b, c, None], [2, 3, 0]), ([b, a, None], [2, 1, 0])):  # a has to come into a slot again
            check_values(model, made, generate(llm, PROMPTS, given), numbers)


def test_a_load_takes_no_more_steps_than_it_waits_for(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is read within a step has ended behind it, before another thread's; what that step has gained is handed
    out at once."""
    _, folder, made = qwen
    with LLM(str(folder), **LORA) as llm:
        llm.add_request(PROMPTS[0], SamplingParams(max_tokens=9, ignore_eos=True))
        llm.step()
        gate, step, steps = Gate(monkeypatch), llm.engine.step, []

        def read_meanwhile() -> Any:
            steps.append(gained := step())
            gate.may_end.set()
            wait_for(lambda: not llm.engine.executor.runner.adapters.is_reading(), "the adapter")  # type: ignore[attr-defined]
            return gained

        monkeypatch.setattr(llm.engine, "step", read_meanwhile)
        turns, turn = [], llm._turns.turn
        monkeypatch.setattr(llm._turns, "turn", lambda: [turns.append(1), turn()][1])
        llm.load_adapter("a", made[0][0])
        assert len(turns) == len(steps) == 1 and steps[0].tokens and len(llm._turns.foreign) == 1


def test_modules_may_share_tensors(qwen: Any) -> None:
    model, folder, made = qwen
    path, tensors, config = made[0]
    tied = {name: tensors[name.replace("layers.1.", "layers.0.")] for name in tensors}
    with LLM(str(folder), **LORA) as llm:
        request = llm.load_adapter("a", tensors=tied, config=config)
        check_values(model, [(path, tied, config)], generate(llm, PROMPTS, request), [1] * 3)


def test_a_load_that_is_interrupted_leaves_nothing(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, made = qwen
    with LLM(str(folder), **LORA) as llm:
        with monkeypatch.context() as patch:
            gate = Gate(patch)
            steps = llm.engine.call("load_adapter", lora_name="a", lora_path=str(made[0][0]))
            next(steps)
            steps.close()  # as Ctrl-C does
            with pytest.raises(ValueError, match="no adapter of this name"):
                generate(llm, PROMPTS, LoRARequest("a"))
            gate.may_end.set()
        request = llm.load_adapter("a", made[1][0])
        check_values(model, made, generate(llm, PROMPTS, request), [2] * 3)
        assert len(llm.engine.executor.runner.adapters._held) == 1  # type: ignore[attr-defined]


def test_a_bad_adapter_changes_nothing(qwen: Any, tmp_path: Path) -> None:
    _, folder, made = qwen
    _, tensors, _ = made[0]
    name = next(iter(tensors))
    module = name.removesuffix(".lora_A.weight")
    spoilt: list[tuple[dict[str, torch.Tensor], str]] = [
        (tensors | {name: torch.ones(4, 7)}, "lora_A is"),
        (tensors | {f"{module}.lora_B.weight": torch.ones(7, 4)}, "lora_B is"),
        (tensors | {name: torch.full_like(tensors[name], torch.nan)}, "NaN"),
        ({key: value for key, value in tensors.items() if module not in key}, "target_modules"),
        (tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48),
                    "base_model.model.lm_head.lora_B.weight": torch.ones(211, 4)}, "lm_head"),
        ({key: value[None] for key, value in tensors.items()}, "lora_A is"),
        ({key: value.to(torch.float8_e4m3fn) for key, value in tensors.items()}, "must be a matrix .* in F64"),
    ]  # fmt: skip
    unread = ({"layers_to_transform": [0], "layers_pattern": "("}, {"rank_pattern": {"(?i)q_proj": 4}},
              {"lora_alpha": 10**400})  # fmt: skip
    with LLM(str(folder), **LORA) as llm:
        good = llm.load_adapter("a", made[0][0])
        before = [scores(output) for output in generate(llm, PROMPTS, good)]
        for number, (given, said) in enumerate(spoilt):
            with pytest.raises(ValueError, match=said):
                llm.load_adapter("a", save(tmp_path / str(number), given, target_modules="all-linear"))
        for changed in unread:
            with pytest.raises(ValueError, match=r"lora_path=.*as PEFT writes it"):
                llm.load_adapter("a", save(tmp_path / "unread", tensors, target_modules="all-linear", **changed))
        with pytest.raises(ValueError, match="must be a folder"):
            llm.load_adapter("a", tmp_path)
        with pytest.raises(ValueError, match="a path, or tensors and config"):
            llm.load_adapter("a")
        llm.reset_prefix_cache()
        assert [scores(output) for output in generate(llm, PROMPTS, good)] == before
        assert llm.engine.state.adapters.keys() == {"a"}
    with LLM(str(folder), **OPTIONS) as llm:
        with pytest.raises(ValueError, match="enable_lora=True"):
            llm.generate(PROMPTS[0], use_tqdm=False, lora_request=LoRARequest("a", 1, str(made[0][0])))
        with pytest.raises(ValueError, match="2 given"):
            llm.generate(PROMPTS, use_tqdm=False, lora_request=[None, None])
