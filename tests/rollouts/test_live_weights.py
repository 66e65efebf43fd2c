"""Weights that change under a live engine: in pieces, from a folder, under running requests; versions and checksums."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stepping import drain, ends_of, finish, replace_one
from tiny_policy import GREEDY, OPTIONS, PROMPTS, Policy, expect_texts_of, greedy, texts

from nanovllm import LLM


@pytest.fixture
def started(llm: LLM) -> Iterator[tuple[LLM, list[int]]]:
    """Three requests with five tokens each."""
    ids = [llm.add_request(prompt, GREEDY) for prompt in PROMPTS]
    while min(seq.num_tokens - seq.num_prompt_tokens for i in ids for seq in llm.engine.book.rows[i]) < 5:
        llm.step()
    yield llm, ids
    llm.abort_all()
    drain(llm)


def test_in_pieces(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """And nothing that the other weights computed is found in the prefix cache."""
    expect_texts_of(policies[0], llm)
    version = llm.weight_version
    llm.begin_update()
    for pair in policies[1].weights.items():
        with pytest.raises(RuntimeError, match="begin_update"):
            llm.generate([[1]], GREEDY, use_tqdm=False)
        llm.update([pair])
    llm.finish_update(version=version + 10)
    assert llm.weight_version == version + 10
    expect_texts_of(policies[1], llm)


def test_from_a_folder(
    llm: LLM, policies: tuple[Policy, Policy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a path from the present working folder, which is not that of the engine's processes."""
    before, folder = llm.checksum(), Path(policies[1].folder)
    monkeypatch.chdir(folder.parent)
    llm.load_weights(folder.name)
    expect_texts_of(policies[1], llm)
    with pytest.raises(FileNotFoundError, match=rf"^weights='{tmp_path}': must be a folder with \*.safetensors"):
        llm.load_weights(tmp_path)
    llm.load_weights(Path(policies[0].folder))
    assert llm.checksum() == before


def test_checksums_tell_every_weight(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    """They are those of another number of ranks, and change with one bit of one tensor."""
    with LLM(policies[0].folder, **OPTIONS) as other:
        before = other.checksum()
    assert before.keys() == policies[0].weights.keys()
    assert llm.checksum() == before
    for name, value in list(policies[0].weights.items())[::5]:
        changed = value.clone()
        changed.view(torch.int32).flatten()[-1] ^= 1
        replace_one(llm, name, changed)
        after = llm.checksum()
        assert [other for other in before if after[other] != before[other]] == [name]
        replace_one(llm, name, value)
    assert llm.checksum() == before


def test_recompute_is_exact(started: tuple[LLM, list[int]], policies: tuple[Policy, Policy]) -> None:
    llm, ids = started
    version = llm.weight_version
    llm.load_weights(policies[1].weights.items())
    for prompt, output in zip(PROMPTS, finish(llm, ids), strict=True):
        [(first, start, cut), (second, also_cut, end)] = output.weight_versions
        assert (first, second, start, also_cut, end) == (version, version + 1, 0, cut, 12)
        assert output.token_ids[:cut] == greedy(policies[0], prompt, cut)
        assert output.token_ids[cut:] == greedy(policies[1], prompt + output.token_ids[:cut], 12 - cut)


def test_keep_goes_on_with_the_old_keys(started: tuple[LLM, list[int]], policies: tuple[Policy, Policy]) -> None:
    """Nothing is computed again, and what is there is never shared with a later request."""
    llm, ids = started
    computed = llm.engine.computed[0]
    llm.load_weights(policies[1].weights.items(), in_flight="keep")
    outputs = finish(llm, ids)
    assert llm.engine.computed[0] == computed
    differs = False
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        cut, longer = output.weight_versions[0][2], prompt + output.token_ids
        differs |= output.token_ids[cut:] != greedy(policies[1], prompt + output.token_ids[:cut], 12 - cut)
        assert texts(llm, [longer]) == [greedy(policies[1], longer)]
    assert differs, "the old keys matter"
    if not llm.config.has_front:
        llm.engine.scheduler.check_integrity()


def test_wait_lets_them_end(started: tuple[LLM, list[int]], policies: tuple[Policy, Policy]) -> None:
    """Those that have begun end under the old weights; one that came later begins under the new ones."""
    llm, ids = started
    rows = [llm.engine.book.rows[i][0] for i in [*ids, llm.add_request([9, 9], GREEDY)]]
    version = llm.weight_version
    llm.load_weights(policies[1].weights.items(), in_flight="wait")
    drain(llm)
    *others, late = [(one.token_ids, one.weight_versions) for one in map(llm.engine.book.completion, rows)]
    assert others == [(greedy(policies[0], prompt), [(version, 0, 12)]) for prompt in PROMPTS]
    assert late == (greedy(policies[1], [9, 9]), [(version + 1, 0, 12)])


def test_abort_hands_out_what_is_there(started: tuple[LLM, list[int]], policies: tuple[Policy, Policy]) -> None:
    llm, ids = started
    rows = {i: llm.engine.book.rows[i] for i in ids}
    llm.load_weights(policies[1].weights.items(), in_flight="abort")
    assert ends_of(drain(llm)) == dict.fromkeys(ids, "abort")
    assert all(len(seq.output_token_ids) >= 5 for [seq] in rows.values())


def test_mistakes(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    weights = list(policies[1].weights.items())
    with pytest.raises(RuntimeError, match="begin_update was not called"):
        llm.update(weights)
    with pytest.raises(RuntimeError, match="begin_update was not called"):
        llm.finish_update()
    with pytest.raises(ValueError, match="in_flight='sometimes'"):
        llm.load_weights(weights, in_flight="sometimes")
    with pytest.raises(ValueError, match=f"version={llm.weight_version}: must be None or an integer >= "):
        llm.load_weights(weights, version=llm.weight_version)
    expect_texts_of(policies[0], llm)  # nothing has begun
    llm.begin_update()
    llm.update(weights[:3])
    with pytest.raises(ValueError, match=f"surplus weight '{weights[0][0]}'"):
        llm.update(weights[:1])
    name, value = weights[3]
    for wrong, said in (
        (("no.such", torch.zeros(1)), r"no\.such"), (name, "pairs, such as a dict's items"),
        (("no", "tensor"), "'no' must"), ((name, value.to("meta")), "on the meta device"),
        ((name, value.to_sparse()), "must be a dense tensor"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            llm.update([wrong])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=f"{len(weights) - 3} missing: {min(name for name, _ in weights[3:])}"):
        llm.finish_update()
    llm.update(weights[3:])
    with pytest.raises(ValueError, match="version"):
        llm.finish_update(version=-1)
    llm.finish_update()
    expect_texts_of(policies[1], llm)


def test_a_tensor_in_shards_is_gathered(llm: LLM, policies: tuple[Policy, Policy]) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        shards = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in policies[1].weights.items()}
        llm.load_weights(shards.items())
    finally:
        dist.destroy_process_group()
    expect_texts_of(policies[1], llm)
