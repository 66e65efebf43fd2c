"""4-bit weights: every packing gives the tokens of the checkpoint that it stands for, widened, alone or in a crowd, in
chunks, preempted, from the cache and on two ranks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import FILE, change_tensors, make_model, read_json, save, spoil, write_json
from comparing import Expected
from hypothesis import given, settings
from hypothesis import strategies as st
from int4_checkpoints import Quantized, config_of, is_quantized, quantize_folder, quantized, save_packed, tensors_of
from safetensors.torch import load_file
from workload import BLOCK, LONGEST, ROOMY, assert_outputs, make_requests, run, tokens_alone

from nanovllm import LLM
from nanovllm.cli.main import main
from nanovllm.kernels.gemm import packed
from nanovllm.layers.weights import CheckpointWeight, Shard
from nanovllm.model_config import Quantization
from nanovllm.models.int4_tensors import Int4Reader
from nanovllm.models.registry import parse_config

SHAPE: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
"""A hidden size and a width that 128 does not divide."""
LAYOUTS = ("compressed-tensors", "awq", "gptq", "gptq_v2")
GROUP = 64
REQUESTS = make_requests(most_tokens=10)
CHUNKS = {"num_kvcache_blocks": LONGEST // BLOCK, "disable": ("lookahead",), "max_num_batched_tokens": BLOCK}
SETTINGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"tensor_parallel_size": 2, "max_num_batched_tokens": 64}, "awq": CHUNKS, "gptq": {},
    "gptq_v2": {},
}  # fmt: skip
"""Settings of one packing each."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Quantized]]:
    folder = save(make_model(seed=3, **SHAPE), tmp_path_factory.mktemp("int4") / "wide")
    return folder, quantize_folder(folder, GROUP)


@pytest.fixture(scope="module")
def expected(wide: tuple[Path, dict[str, Quantized]]) -> list[Expected]:
    return tokens_alone(wide[0], REQUESTS)


@pytest.fixture(scope="module")
def folder_of(wide: tuple[Path, dict[str, Quantized]]) -> Callable[[str], Path]:
    folder, matrices = wide

    def make(layout: str) -> Path:
        target = folder.parent / layout
        return target if target.is_dir() else save_packed(folder, target, matrices, layout)

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_packing_gives_the_widened_checkpoints_tokens(
    folder_of: Callable[[str], Path], expected: list[Expected], layout: str
) -> None:
    chosen = slice(4) if layout.startswith("gptq") else slice(None)
    with LLM(str(folder_of(layout)), **{**ROOMY, **SETTINGS[layout]}) as llm:
        assert_outputs(run(llm, REQUESTS[chosen]), REQUESTS[chosen], expected[chosen], layout)
        if layout == "compressed-tensors":
            assert_outputs(run(llm, REQUESTS[::-1]), REQUESTS[::-1], expected[::-1], (layout, "later, from the cache"))


def test_new_weights_packed_or_wide(
    wide: tuple[Path, dict[str, Quantized]], folder_of: Callable[[str], Path], expected: list[Expected]
) -> None:
    """A wide matrix is rounded as compressed-tensors rounds symmetrically."""
    folder, matrices = wide
    others = {name: value for name, value in load_file(folder / FILE).items() if not is_quantized(name)}
    folder_packed, packed = folder_of("compressed-tensors"), {}
    for path, matrix in matrices.items():
        symmetric = quantized(matrix.widened(), GROUP, symmetric=True, scale_type=np.float32)
        packed |= tensors_of(path, symmetric, "compressed-tensors")
    with LLM(str(folder_packed), **ROOMY) as llm:
        before = llm.checksum()
        llm.load_weights({**others, **packed}.items())
        changed = llm.checksum()
        llm.load_weights(load_file(folder_packed / FILE).items())
        assert llm.checksum() == before != changed
        assert_outputs(run(llm, REQUESTS[:4]), REQUESTS[:4], expected[:4], "loaded anew")
        llm.load_weights(load_file(folder / FILE).items())
        assert llm.checksum() == changed
        with pytest.raises(ValueError, match=r"weight 'model.layers.0.mlp.down_proj.weight' has shape"):
            llm.load_weights([("model.layers.0.mlp.down_proj.weight", torch.zeros(192, 10))])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plan_reads_the_headers_of_every_packing(folder_of: Callable[[str], Path], layout: str) -> None:
    assert main(["plan", str(folder_of(layout)), "-tp", "1"]) == 0


@given(
    st.sampled_from([*LAYOUTS, "symmetric"]), st.integers(1, 4), st.integers(1, 50), st.sampled_from([0, 32, 128, 256]),
    st.integers(0, 1), st.data(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_any_range_of_a_packed_matrix(
    layout: str, rows_over_8: int, columns_over_8: int, group: int, dim: int, data: st.DataObject
) -> None:
    rows, columns = 8 * rows_over_8, 8 * columns_over_8
    group = group if columns % max(1, group) == 0 else 0
    made = np.random.default_rng(rows * columns).normal(size=(rows, columns)).astype(np.float32)
    matrix, symmetric = quantized(made, group, layout == "symmetric"), layout == "symmetric"
    layout = "compressed-tensors" if symmetric else layout
    how = Quantization("int4", layout=layout, group=group, has_zeros=not symmetric)
    held = torch.empty(rows, -(-columns // 128), 32, dtype=torch.int16)
    weights = [CheckpointWeight("a.weight", tuple(held.shape), (Shard(held, 0, 0),))]
    reader = Int4Reader(weights, how, torch.float32, torch.device("cpu"))
    found = dict(reader.read(tensors_of("a", matrix, layout, symmetric).items(), wide=False))
    assert set(found) == {"a.weight", "a.weight_scale"} | (set() if symmetric else {"a.weight_zero_point"})
    assert tuple(found["a.weight"].shape) == tuple(held.shape)

    start = data.draw(st.integers(0, held.shape[dim] - 1))
    words = found["a.weight"].narrow(dim, start, data.draw(st.integers(1, held.shape[dim] - start)))
    codes = packed.unpack(words.transpose(0, 1), words.shape[1] * 128).numpy()
    whole = np.pad(matrix.codes, [(0, 0), (0, -columns % 128)])
    first = 128 * start if dim else 0
    assert (codes == (whole[start:] if dim == 0 else whole)[: len(codes), first : first + codes.shape[1]]).all()

    each = min(group, 128) or columns
    of_column = np.arange(columns) // (group or columns)
    for name, values in (("a.weight_scale", matrix.scales), ("a.weight_zero_point", matrix.zeros)):
        if name in found:
            got = found[name].narrow(0, 0, rows)
            assert got.shape == found[name].shape
            assert (got.float().numpy()[:, np.arange(columns) // each] == values[:, of_column]).all(), name


def test_made_while_loading(wide: tuple[Path, dict[str, Quantized]], tmp_path: Path) -> None:
    """As if compressed-tensors had rounded the checkpoint symmetrically, in groups of 128."""
    folder, matrices = wide
    rounded = {path: quantized(matrix.widened(), 128, symmetric=True) for path, matrix in matrices.items()}
    packed = save_packed(folder, tmp_path / "packed", rounded, "compressed-tensors", symmetric=True)
    change_tensors(packed, lambda tensors: tensors.update(
        {name: value.half().float() for name, value in tensors.items() if name.endswith("_scale")}))  # fmt: skip
    with LLM(str(folder), quantization="int4", **{**ROOMY, "dtype": "float16"}) as llm:
        made = llm.checksum()
    with LLM(str(packed), **{**ROOMY, "dtype": "float16"}) as llm:
        assert llm.checksum() == made


OF_ALL = config_of("compressed-tensors", GROUP)["config_groups"]["group_0"]
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "bits": ("awq", {"bits": 8}, r"quantization_config: bits=8: must be 4"),
    "version": ("awq", {"version": "gemv"}, r"quantization_config: version='gemv': must be 'gemm'"),
    "desc_act": ("gptq", {"desc_act": True}, r"quantization_config: desc_act=True: must be False"),
    "group": ("gptq", {"group_size": 48}, r"quantization_config: group_size=48: must be -1, 32, 64 or a multiple"),
    "AutoRound's bits": (
        "gptq", {"quant_method": "auto-round", "extra_config": {"a.b": {"bits": 8}}}, r"a.b: bits=8: must be 16"),
    "dynamic": ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, r"dynamic=.*: must be an object of patterns that begin"),
    "targets": (
        "compressed-tensors", {"config_groups": {"of": {**OF_ALL, "targets": "Linear"}}}, "targets='Linear': must be"),
    "form": ("compressed-tensors", {"format": "marlin-24"}, r"format='marlin-24': must be 'pack-quantized'"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(BAD))
def test_what_is_not_served_is_refused_by_name(folder_of: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    layout, change, message = BAD[case]
    config = read_json(folder_of(layout) / "config.json")
    quantization = {**config["quantization_config"], **change}
    write_json(tmp_path / "config.json", {**config, "quantization_config": quantization})
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), load_format="dummy", **ROOMY)


@pytest.mark.parametrize(
    ("layout", "packing"), [("gptq_v2", "auto_round"), ("gptq", "auto_round:auto_gptq"), ("awq", "auto_round:auto_awq")]
)
def test_autoround_writes_the_layouts_of_others(
    folder_of: Callable[[str], Path], tmp_path: Path, layout: str, packing: str
) -> None:
    """And what its extra_config names in 16 bits stays wide."""
    folder = Path(shutil.copytree(folder_of(layout), tmp_path / "copy"))
    quantization: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int"}
    quantization |= {"packing_format": packing, "sym": False, "extra_config": {"lm_head": {"bits": 16}}}
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "quantization_config": quantization})
    sums = []
    for one in (folder, folder_of(layout)):
        with LLM(str(one), **ROOMY) as llm:
            sums.append(llm.checksum())
    assert sums[0] == sums[1]
    quantization["extra_config"] = {"model.layers.1.mlp.down_proj": {"bits": 16}}
    write_json(folder / "config.json", {**config, "quantization_config": quantization})
    with pytest.raises(ValueError, match=r"missing weight: model.layers.1.mlp.down_proj.weight"):
        LLM(str(folder), **ROOMY)


@pytest.mark.parametrize(
    "entry",
    [
        {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]},
        {"modules_in_block_to_quantize": ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]},
        {"dynamic": {r"-:.*\.self_attn\.": {}}},
    ],
)
def test_gptq_of_some_modules_of_a_layer(
    wide: tuple[Path, dict[str, Quantized]], tmp_path: Path, entry: dict[str, Any]
) -> None:
    folder, matrices = wide
    chosen = {path: matrix for path, matrix in matrices.items() if ".mlp." in path}
    packed = save_packed(folder, tmp_path / "packed", chosen, "gptq")
    others = {name: value for name, value in load_file(folder / FILE).items() if ".self_attn." in name}
    change_tensors(packed, lambda tensors: tensors.update(others))
    config = read_json(packed / "config.json")
    config["quantization_config"] |= entry
    write_json(packed / "config.json", config)
    with LLM(str(packed), **ROOMY) as llm:
        held = [layer.precision(part) for layer in llm.engine.model_config.layers for part in ("qkv", "o", "down")]
    assert [one is None for one in held] == [True, True, False] * 2


NO_ATTENTION = [True, True, False] * 2
NO_FIRST = [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("layout", "entry", "wide_parts"),
    [
        ("awq", {"modules_to_not_convert": ["self_attn", "mlp.gate"]}, NO_ATTENTION),
        ("awq", {"modules_to_not_convert": ["lm_head", "model.layers.0."]}, NO_FIRST),
        ("auto-round", {"extra_config": {".*self_attn.*": {"bits": 16}, "lm_head": {"bits": 16}}}, NO_ATTENTION),
        ("auto-round", {"extra_config": {"self_attn\\.[qkvo]_proj$": {"bits": 16}}}, NO_ATTENTION),
        ("auto-round", {"extra_config": {r"^model\.layers\.0": {"bits": 16}}}, NO_FIRST),
        ("gptq", {"dynamic": {"lm_head": {}, "+:.*mlp.*": {"bits": 4}, "-:.*layers.0.": {}}}, NO_FIRST),
        ("compressed-tensors", {"ignore": ["lm_head", "re:.*self_attn.*"]}, NO_ATTENTION),
        ("compressed-tensors", {"config_groups": {"of": {**OF_ALL, "targets": [r"re:.*\.mlp\."]}}}, NO_ATTENTION),
        ("compressed-tensors", {"config_groups": {"of": {**OF_ALL, "targets": [r"re:.*layers\.1\.", "a"]}}}, NO_FIRST),
    ],
)
def test_what_the_tools_lists_name_stays_wide(
    folder_of: Callable[[str], Path], layout: str, entry: dict[str, Any], wide_parts: list[bool]
) -> None:
    """Of two layers queries with keys and values, outputs, and down projections; also nested in another model."""
    text = read_json(folder_of("gptq") / "config.json")
    del text["quantization_config"]
    found = {**config_of(layout.replace("auto-round", "gptq"), GROUP), **entry, "quant_method": layout}
    inner = {**text, "model_type": "qwen3_vl_text"}
    wrapped = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": inner}
    nested = json.loads(json.dumps(found).replace(r"layers\\.", r"language_model\\.layers\\."))
    for raw in ({**text, "quantization_config": found}, {**wrapped, "quantization_config": nested}):
        layers = parse_config(raw).layers
        assert [layer.precision(part) is None for layer in layers for part in ("qkv", "o", "down")] == wide_parts


def test_zeros_as_biases_of_layers_that_have_none(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """As AutoGPTQ writes them."""
    folder = Path(shutil.copytree(folder_of("gptq"), tmp_path / "zeros"))
    ends = {name.removesuffix("scales"): tensor.shape[1] for name, tensor in load_file(folder / FILE).items()
            if name.endswith(".scales")}  # fmt: skip
    change_tensors(folder, lambda tensors: tensors.update({f"{e}bias": torch.zeros(n) for e, n in ends.items()}))
    assert main(["plan", str(folder), "-tp", "1"]) == 0
    with LLM(str(folder), **ROOMY) as llm, LLM(str(folder_of("gptq")), **ROOMY) as without:
        assert llm.checksum() == without.checksum()
    spoil(folder, "model.layers.1.mlp.down_proj.bias", lambda bias: bias + 1)
    with pytest.raises(ValueError, match=r"1 surplus weight: model.layers.1.mlp.down_proj.bias"):
        LLM(str(folder), **ROOMY)


def test_symmetric_zeros_of_gptq_are_8_whichever_way_they_are_written(
    wide: tuple[Path, dict[str, Quantized]], tmp_path: Path
) -> None:
    """GPTQModel has written them as gptq_v2 does into checkpoints that say gptq."""
    folder, matrices = wide
    made = {path: quantized(matrix.widened(), GROUP, symmetric=True) for path, matrix in matrices.items()}
    sums = []
    for layout in ("gptq", "gptq_v2"):
        packed = save_packed(folder, tmp_path / layout, made, layout, symmetric=True)
        config = read_json(packed / "config.json")
        config["quantization_config"]["checkpoint_format"] = "gptq"
        write_json(packed / "config.json", config)
        with LLM(str(packed), **ROOMY) as llm:
            sums.append(llm.checksum())
    assert sums[0] == sums[1]


@pytest.mark.parametrize("layout", ["compressed-tensors", "awq", "gptq", "gptq, in any order"])
def test_null_counts_as_absent_and_one_group_has_no_order(folder_of: Callable[[str], Path], layout: str) -> None:
    group = 0 if "order" in layout else GROUP
    layout = layout.partition(",")[0]
    raw, found = read_json(folder_of(layout) / "config.json"), config_of(layout, group)
    nulls: dict[str, Any] = dict.fromkeys(
        ("desc_act", "lm_head", "checkpoint_format", "dynamic", "version", "zero_point", "kv_cache_scheme")
    )
    if layout == "compressed-tensors":
        weights = {**found["config_groups"]["group_0"]["weights"], "dynamic": None}
        nulls["config_groups"] = {"group_0": {**found["config_groups"]["group_0"], "weights": weights}}
    if not group:
        nulls["desc_act"] = True
    read = [parse_config({**raw, "quantization_config": one}) for one in (found, {**found, **nulls})]
    assert read[0] == read[1]


SPOILT: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no zeros": ("qzeros", lambda t: None, r"missing weight: model.layers.0.mlp.up_proj.weight_zero_point"),
    "order": ("g_idx", lambda t: t.flip(0), r"up_proj.g_idx' puts column 0 into group 2: must be 0"),
    "scale": ("scales", lambda t: -t, r"up_proj.weight_scale' holds -.*: scales must be finite and > 0"),
    "shape": ("qweight", lambda t: t[:, :64], r"up_proj.weight' has shape \(64, 2, 32\), the configuration needs"),
    "type": ("qweight", lambda t: t.float(), r"up_proj.qweight' has type torch.float32 .*: must be a matrix of"),
}


@pytest.mark.parametrize("case", list(SPOILT))
def test_spoilt_checkpoints_are_refused_by_name(folder_of: Callable[[str], Path], tmp_path: Path, case: str) -> None:
    kind, change, message = SPOILT[case]
    spoil(folder_of("gptq"), f"model.layers.0.mlp.up_proj.{kind}", change, to=tmp_path)
    write_json(tmp_path / "config.json", read_json(folder_of("gptq") / "config.json"))
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **ROOMY)
