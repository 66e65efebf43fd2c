"""Checkpoints on disk: each rank's shards put together are the file's tensors; what is wrong with a file is named."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import FILE, change_tensors, make_model, read_json, save, spoil, write_json
from safetensors.torch import load_file, save_file
from workload import assert_outputs, make_requests, run, run_alone

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.kernels import select_kernels
from nanovllm.layers import linear
from nanovllm.layers.context import ModelContext
from nanovllm.layers.heads import HeadSplit
from nanovllm.layers.step import OUTSIDE
from nanovllm.layers.weights import CheckpointWeight, Shard
from nanovllm.model_config import ModelConfig
from nanovllm.models.checkpoint import load_checkpoint, load_dummy, open_checkpoint, read_safetensors
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import parse_config, read_model_config

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "device": "cpu", "num_kvcache_blocks": 32}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(seed=2), tmp_path_factory.mktemp("intact"))


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(intact, tmp_path / "copy"))


def expect_refusal(folder: Path, error: type[Exception], *said: str, **options: Any) -> None:
    """The engine does not start, and says why."""
    with pytest.raises(error) as caught:
        LLM(str(folder), **OPTIONS, **options).close()
    for part in said:
        assert part in str(caught.value), caught.value


def change_header(folder: Path, change: Callable[[dict[str, Any]], None], padding: int = 0) -> None:
    """Rewrites a file's header, `padding` bytes longer than it need be, and leaves the data alone."""
    raw = (folder / FILE).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


# -- shards ---------------------------------------------------------------------------------------------------------


def model_of_rank(config: ModelConfig, rank: int, size: int) -> DecoderForCausalLM:
    """Model that a rank builds, with no other ranks and no attention."""
    group: Any = SimpleNamespace(rank=rank, size=size, overlap=None, width_multiple=1, exact_bits=None)
    context = ModelContext(group, select_kernels(CPU), torch.float32, CPU, config, 64)
    return DecoderForCausalLM(context)


def weights_of_rank(config: ModelConfig, rank: int, size: int) -> list[CheckpointWeight]:
    """A rank's parameters, filled with NaN, in a model that nobody runs."""
    weights = list(model_of_rank(config, rank, size).checkpoint_weights())
    for weight in weights:
        for shard in weight.shards:
            shard.target.fill_(torch.nan)
    return weights


def gather(ranks: list[list[CheckpointWeight]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' shards, which must agree where they overlap."""
    whole: dict[str, torch.Tensor] = {}
    for weights in ranks:
        for weight in weights:
            target = whole.setdefault(weight.name, torch.full(weight.shape, torch.nan))
            for shard in weight.shards:
                part = target.narrow(shard.dim, shard.start, shard.target.shape[shard.dim])
                assert torch.equal(torch.where(part.isnan(), shard.target, part), shard.target), weight.name
                part.copy_(shard.target)
    return whole


HEADS = [(8, 8), (8, 4), (8, 2), (8, 1), (4, 4), (12, 4), (12, 2), (20, 4), (24, 3), (40, 8)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_cover_the_checkpoint(tmp_path: Path, size: int, tied: bool) -> None:
    """For many head counts: every element of every tensor is on some rank, in its place, from files and dummies."""
    for heads, kv_heads in HEADS:
        shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4, "num_hidden_layers": 1}
        model = make_model(**shape, hidden_size=12, intermediate_size=20, vocab_size=37, tie_word_embeddings=tied)
        save(model, tmp_path, max_shard_size="4KB" if heads == 8 else "1GB")
        config = read_model_config(EngineConfig(str(tmp_path)))
        ranks = [weights_of_rank(config, rank, size) for rank in range(size)]
        tensors = open_checkpoint(tmp_path)
        for weights in ranks:
            load_checkpoint(weights, tensors, CPU)
        state = {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
        gathered = gather(ranks)
        assert gathered.keys() == state.keys()
        for name, value in gathered.items():
            assert torch.equal(value, state[name]), (name, heads, kv_heads)
        dummies = [weights_of_rank(config, rank, n) for n in {1, size} for rank in range(n)]
        for weights in dummies:
            load_dummy(weights, torch.float32, CPU, seed=3)
        assert not any(value.isnan().any() for value in gather(dummies).values())
        for path in tmp_path.iterdir():
            path.unlink()


@pytest.mark.parametrize("width", [1, 20, 97, 131])
@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_width_that_ranks_do_not_divide_is_padded_with_zeros(
    size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks' partial sums add up to the whole MLP, whatever memory held before, and dummy weights are those of one
    rank."""
    fresh = linear.parameter
    monkeypatch.setattr(linear, "parameter", lambda *shape, **options: fresh(*shape, **options).fill_(torch.nan))
    shape = {"num_attention_heads": 120, "num_key_value_heads": 120, "head_dim": 4, "num_hidden_layers": 1}
    model = make_model(**shape, hidden_size=12, intermediate_size=width, vocab_size=37)
    config = parse_config(model.config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]})
    ranks = [weights_of_rank(config, rank, size) for rank in range(size)]
    state = dict(model.state_dict())
    for weights in ranks:
        load_checkpoint(weights, state, CPU)
    for name, value in gather(ranks).items():
        assert torch.equal(value, state[name]), name
    for weights in (*ranks, whole := weights_of_rank(config, 0, 1)):
        load_dummy(weights, torch.float32, CPU, seed=3)
    alone = gather([whole])
    for name, value in gather(ranks).items():
        assert torch.equal(value, alone[name]), name

    x = torch.randn(5, 12)
    mlps = [model_of_rank(config, rank, size).layers[0].mlp for rank in range(size)]
    for mlp in mlps:
        load_checkpoint(list(mlp.checkpoint_weights("model.layers.0.mlp")), state, CPU)
    widths = {mlp.down_proj.weight.shape[1] for mlp in mlps}
    assert len(widths) == 1 and (width % size == 0 or widths.pop() % 8 == 0)
    torch.testing.assert_close(sum(mlp(x, OUTSIDE) for mlp in mlps), model.model.layers[0].mlp(x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_eight_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """More ranks than key/value heads, and a width that they do not divide."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 100}
    folder = str(save(make_model(seed=5, num_hidden_layers=2, **shape), tmp_path))
    requests = make_requests()[:3]
    with LLM(folder, **OPTIONS, disable=("async_scheduling",), enable_prefix_caching=False) as llm:
        expected = run_alone(llm, requests)
    with LLM(folder, **OPTIONS, tensor_parallel_size=8, max_num_batched_tokens=64) as llm:
        assert_outputs(run(llm, requests), requests, expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_loading_shows_progress_by_bytes(dim: int) -> None:
    """On slow storage a large weight takes longer than a rank may go without progress."""
    source = torch.randn(6000, 2000)
    target = torch.empty_like(source.narrow(dim, 500, 1400))
    weight = CheckpointWeight("w", tuple(source.shape), (Shard(target, dim, 500),))
    reports: list[None] = []
    in_a_file: Any = SimpleNamespace(shape=source.shape, dtype=source.dtype, narrow=source.narrow)
    load_checkpoint([weight], {"w": in_a_file}, CPU, lambda: reports.append(None))
    assert torch.equal(target, source.narrow(dim, 500, 1400))
    assert len(reports) >= target.nbytes / (8 << 20)


def test_each_key_head_is_held_first_in_one_place() -> None:
    """However often the ranks hold it: sums over key heads count it once."""
    for heads, kv_heads in HEADS:
        for size in (n for n in range(1, 9) if heads % n == 0):
            splits = [HeadSplit(heads, kv_heads, rank, size) for rank in range(size)]
            first = [
                split.kv_head(local)
                for split in splits
                for local, is_first in enumerate(split.kv_heads_held_first)
                if is_first
            ]
            assert all(len(split.kv_heads_held_first) == split.local_kv_heads for split in splits)
            assert first == list(range(kv_heads)), (heads, kv_heads, size)


def test_another_seed_gives_another_dummy_model(intact: Path) -> None:
    found = []
    for seed in (0, 1):
        with LLM(str(intact), load_format="dummy", seed=seed, **OPTIONS) as llm:
            found.append(llm.checksum())
    assert found[0].keys() == found[1].keys() and found[0]["lm_head.weight"] != found[1]["lm_head.weight"]


# -- files that are not as they should be ---------------------------------------------------------------------------


K_NORM, DOWN, NORM, HEAD = (
    "model.layers.1.self_attn.k_norm.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight",
    "lm_head.weight",
)  # fmt: skip
BAD_TENSORS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], tuple[str, ...], int]] = {
    "missing": (K_NORM, lambda _: None, ("missing",), 1),
    "an untied head is missing": (HEAD, lambda _: None, ("missing", "{'tie_word_embeddings': True}"), 1),
    "misshapen": (DOWN, lambda tensor: tensor.t(), ("(128, 96)", "(96, 128)"), 1),
    "misshapen, on two ranks": (DOWN, lambda tensor: tensor.t(), ("(128, 96)", "(96, 128)"), 2),
    "of another type": (NORM, lambda tensor: tensor.long(), ("torch.int64",), 1),
}
"""Tensors, what becomes of them, what is said beside their names, and numbers of ranks."""


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_bad_tensor_is_named(folder: Path, case: str) -> None:
    name, change, said, ranks = BAD_TENSORS[case]
    spoil(folder, name, change)
    expect_refusal(folder, ValueError, name, *said, tensor_parallel_size=ranks)


def test_nothing_is_cast_to_e4m3_without_scales() -> None:
    target = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)
    weight = CheckpointWeight("w", (4, 8), (Shard(target, 0, 0),))
    with pytest.raises(ValueError, match=r"^weight 'w' has type torch\.bfloat16: must be torch\.float8_e4m3fn"):
        weight.load(torch.ones(4, 8, dtype=torch.bfloat16))
    weight.load(torch.ones(4, 8).to(torch.float8_e4m3fn))
    assert target.float().sum() == 32


def test_layers_that_the_configuration_does_not_have(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "num_hidden_layers": 1})
    expect_refusal(folder, ValueError, "11 surplus", "model.layers.1.")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_tied_head_that_is_another(tmp_path: Path, ranks: int) -> None:
    """transformers unties such a model; without a word we would serve another."""
    folder = save(make_model(seed=5, tie_word_embeddings=True), tmp_path)
    embedding = "model.embed_tokens.weight"

    def tokens(**more: Any) -> list[int]:
        with LLM(str(folder), tensor_parallel_size=ranks, **OPTIONS, **more) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            return llm.generate([5, 6, 7], params, use_tqdm=False)[0].token_ids

    expected = tokens()
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    assert tokens() == expected
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].flip(0)}))
    expect_refusal(folder, ValueError, "lm_head.weight", "tie_word_embeddings=True", tensor_parallel_size=ranks)
    assert tokens(hf_overrides={"tie_word_embeddings": False}) != expected


@pytest.mark.parametrize("keep", [0, 200, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    """Wherever it is cut: in the length, in the header, one byte before its end."""
    raw = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(raw[:keep])
    expect_refusal(folder, ValueError, str(folder / FILE))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_that_cannot_be_read(folder: Path, ranks: int) -> None:
    """A folder, since a test that runs as root may read all files."""
    (folder / FILE).unlink()
    (folder / FILE).mkdir()
    expect_refusal(folder, ValueError, f"{folder / FILE}: cannot be read:", tensor_parallel_size=ranks)


@pytest.mark.parametrize("entry", [{"data_offsets": [0, 1 << 40]}, {"shape": "wide"}, {"dtype": "F8_E4M3"}], ids=str)
def test_corrupt_description(folder: Path, entry: dict[str, Any]) -> None:
    change_header(folder, lambda header: header["model.norm.weight"].update(entry))
    expect_refusal(folder, ValueError, str(folder / FILE), "corrupt")


def test_data_that_is_not_aligned(folder: Path) -> None:
    """Older writers did not pad the header; such a file is as good as any."""
    before = {name: tensor.narrow(0, 0, 1).clone() for name, tensor in read_safetensors(folder / FILE).items()}
    change_header(folder, lambda header: None, padding=3)
    after = read_safetensors(folder / FILE)
    assert all(torch.equal(after[name].narrow(0, 0, 1), value) for name, value in before.items())


def test_no_files(folder: Path) -> None:
    (folder / FILE).unlink()
    expect_refusal(folder, FileNotFoundError, str(folder), "safetensors")


def test_file_of_the_index_is_missing(tmp_path: Path) -> None:
    save(make_model(), tmp_path, max_shard_size="100KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    expect_refusal(tmp_path, FileNotFoundError, "model.safetensors.index.json", gone.name)
    (tmp_path / "model.safetensors.index.json").unlink()  # then every file counts that is there
    expect_refusal(tmp_path, ValueError, "missing")


NO_MAPS = ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": [']


@pytest.mark.parametrize("text", [*NO_MAPS, "[" * 100_000])
def test_index_that_is_none(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    expect_refusal(folder, ValueError, "model.safetensors.index.json")


def test_of_a_weight_in_two_files_of_an_index_the_one_that_it_names_counts(tmp_path: Path) -> None:
    """Shards that were changed later leave the older tensors in theirs."""
    save(make_model(), tmp_path, max_shard_size="100KB")
    found = read_json(tmp_path / "model.safetensors.index.json")["weight_map"]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        sums = llm.checksum()
    names = sorted(found, key=found.__getitem__)
    first, last = (load_file(tmp_path / found[name]) for name in (names[0], names[-1]))
    save_file({**first, names[-1]: last[names[-1]] + 1}, tmp_path / found[names[0]])
    save_file({**last, names[0]: first[names[0]] + 1}, tmp_path / found[names[-1]])
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.checksum() == sums
    for name, tensors in ((names[0], first), (names[-1], last)):
        save_file({**tensors, "new": torch.zeros(1)}, tmp_path / found[name])
    expect_refusal(tmp_path, ValueError, "'new' is in another file of the checkpoint too")


def test_weight_in_two_files(folder: Path) -> None:
    name = "model.norm.weight"
    save_file({name: load_file(folder / FILE)[name]}, folder / "more.safetensors")
    expect_refusal(folder, ValueError, name, "more.safetensors")
