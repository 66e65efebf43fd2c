"""Requests with adapters that come and go at random."""

import random
from pathlib import Path

from adapters.peft_files import CONFIG, random_tensors
from adapters.test_adapters import LORA, PROMPTS, generate, linears
from exactness import family_cases
from exactness.family_cases import CASES, make_model

from nanovllm import LLM, LoRARequest, SamplingParams


def test_nobody_runs_with_anothers(tmp_path: Path) -> None:
    """Each adapter writes its own tokens, while requests come at random, adapters go and come back, and names get other
    adapters: each request has what its name meant when it came, and shares prefixes with no other adapter."""
    model = make_model(CASES["qwen3"])
    folder = family_cases.save(model, CASES["qwen3"], tmp_path)
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
