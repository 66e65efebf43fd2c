"""A model's files, from a folder or the hub: config.json is judged before any weight is fetched or read."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import filter_repo_objects
from programs import run
from test_config import SMALL

from nanovllm.config import EngineConfig
from nanovllm.models.files import read_json, weight_files
from nanovllm.models.registry import read_model_config, resolve_model_folder

UNSERVED = {
    "LongcatFlashForCausalLM": ({"kv_lora_rank": 512}, "has latent attention"),
    "DeepseekV32ForCausalLM": (
        {"kv_lora_rank": 512, "index_topk": 2048},
        "has latent attention and sparse attention",
    ),
    "KimiLinearForCausalLM": (
        {"kv_lora_rank": 512, "linear_attn_config": {"kda_layers": [1]}},
        "has latent attention and recurrent layers",
    ),
    "RWKV7ForCausalLM": ({"model_type": "rwkv7"}, "has recurrent layers"),
    "MiMoV2FlashForCausalLM": ({"head_dim": 192, "v_head_dim": 128}, "has values of another size than keys"),
    "Qwen3OmniMoeForConditionalGeneration": ({"thinker_config": {"audio_config": {}}}, "takes images or sound"),
    "MiniCPMForCausalLM": ({"sparse_config": {"topk": 64}}, "has sparse attention"),
    "FalconH1ForCausalLM": ({"mamba_d_state": 256}, "has recurrent layers"),
    "Llama4ForCausalLM": ({"layer_types": ["chunked_attention"]}, "has attention in chunks"),
    "T5ForConditionalGeneration": ({"is_encoder_decoder": True}, "has an encoder"),
    "NobodysHybridForConditionalGeneration": (
        {"vision_config": {"depth": 2}, "text_config": {"layer_types": ["linear_attention"]}},
        "has recurrent layers",
    ),
    "NobodysForConditionalGeneration": ({"vision_config": {"depth": 2}}, "takes images or sound"),
}


class Hub:
    """Files that a repository has, of which patterns choose."""

    def __init__(self, folder: Path, files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.files = folder, files
        self.fetched: list[str] = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.fetch)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_: list(files))

    def fetch(self, _: str, revision: str | None = None, cache_dir: str | None = None, **patterns: Any) -> str:
        self.asked = revision, cache_dir
        for name in filter_repo_objects(self.files, **patterns):
            self.fetched.append(name)
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(json.dumps(self.files[name]), encoding="utf-8")
        return str(self.folder)


@pytest.mark.parametrize("architecture", UNSERVED)
def test_what_the_engine_lacks_is_said_before_weights_are_fetched(
    architecture: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entries, why = UNSERVED[architecture]
    config = {**SMALL, "model_type": "none", **entries, "architectures": [architecture]}
    hub = Hub(tmp_path, {"config.json": config, "tokenizer.json": {}, "model.safetensors": 1}, monkeypatch)
    with pytest.raises(ValueError, match=rf"^{architecture} {why}.*: not served\. docs/models\.md") as error:
        resolve_model_folder(EngineConfig("owner/name"))
    assert hub.fetched == ["config.json"] and "\n" not in str(error.value)


def test_files_are_those_of_the_revision_and_in_the_folder_that_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, {"config.json": SMALL, "tokenizer.json": {}, "model.safetensors": 1}, monkeypatch)
    resolve_model_folder(EngineConfig("owner/name", revision="v1", download_dir=tmp_path))  # type: ignore[arg-type]
    assert hub.asked == ("v1", str(tmp_path)) and "model.safetensors" in hub.fetched


def test_a_mistake_in_an_option_or_in_the_configuration_is_found_there_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, {"config.json": SMALL, "model.safetensors": 1}, monkeypatch)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size=4: must be a divisor of num_attention_heads=6$"):
        resolve_model_folder(EngineConfig("owner/name", tensor_parallel_size=4))
    assert hub.fetched == ["config.json"]


def test_a_pooling_is_judged_there_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules = [{"path": "", "type": "models.Transformer"}, {"path": "1_Pooling", "type": "models.Pooling"}]
    files = {"config.json": SMALL, "modules.json": modules, "1_Pooling/config.json": {"pooling_mode": "mean"}}
    hub = Hub(tmp_path, {**files, "model.safetensors": 1}, monkeypatch)
    with pytest.raises(ValueError, match=r"1_Pooling/config.json: pooling_mode=.*mean"):
        resolve_model_folder(EngineConfig("owner/name"))
    assert sorted(hub.fetched) == sorted(files)


def test_a_refusal_takes_no_torch(tmp_path: Path) -> None:
    config = {**SMALL, "kv_lora_rank": 512, "architectures": ["LongcatFlashForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    code = (
        "import sys; from nanovllm.models.registry import *; from nanovllm.config import EngineConfig\n"
        "try: read_model_config(EngineConfig(sys.argv[1]))\n"
        "except ValueError as error: print(error, 'torch' in sys.modules)"
    )
    said = run("-c", code, tmp_path)
    assert said.startswith("LongcatFlashForCausalLM has latent attention") and said.endswith("False\n")


def test_weights_that_a_repository_has_twice_are_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["model-1.safetensors", "original/model.safetensors", "consolidated.safetensors", "a.bin",
             "additional_chat_templates/tools.jinja", "tokenizer.model"]  # fmt: skip
    hub = Hub(tmp_path, {"config.json": SMALL, **dict.fromkeys(names)}, monkeypatch)
    assert resolve_model_folder(EngineConfig("owner/name")).model == str(tmp_path)
    assert sorted(set(hub.fetched)) == sorted(["config.json", names[0], *names[4:]])


def test_weights_that_a_folder_has_twice_are_read_once(tmp_path: Path) -> None:
    for name in ("model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"):
        (tmp_path / name).touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"a-Q4.gguf": 1}, ValueError, "GGUF files, which are not read: name the safetensors"),
        (
            {"adapter_config.json": {"base_model_name_or_path": "a/b"}, "adapter_model.safetensors": 1},
            ValueError,
            r"an adapter \(LoRA\) of 'a/b', not a model: merge it",
        ),
        ({"config.json": SMALL, "tokenizer.json": {}, "pytorch_model.bin": 1}, FileNotFoundError,
         r"its weights are pickles \(pytorch_model.bin\), which are not read"),
        ({"config.json": SMALL, "tokenizer.json": {}}, FileNotFoundError, r"no \*\.safetensors file"),
        ({"config.json": SMALL, "model.safetensors": 1}, ValueError, "no tokenizer there: give tokenizer="),
        ({"README.md": 1}, FileNotFoundError, "config.json is missing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("on_hub", [False, True])
def test_files_of_another_kind_are_named(
    files: dict[str, Any], kind: type[Exception], message: str, on_hub: bool, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    hub = Hub(tmp_path, files, monkeypatch)
    if not on_hub:
        hub.fetch("", allow_patterns=["*"])
    with pytest.raises(kind, match=message):
        resolve_model_folder(EngineConfig("owner/name" if on_hub else str(tmp_path)))


def test_a_file_of_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"a\.gguf': must be a folder.*GGUF is not read"):
        resolve_model_folder(EngineConfig(str(tmp_path / "a.gguf")))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no connection\nfurther lines\nTraceback ..."), "the hub: no connection further lines$"),
        (ImportError("Using SOCKS proxy, but ..."), "the hub: Using SOCKS proxy, but"),
        (RuntimeError("Data processing error"), "the hub: Data processing error"),
        (Exception("closed by its peer"), "the hub: closed by its peer"),
        (GatedRepoError, "accepted its terms there: do so, and set HF_TOKEN$"),
        (RepositoryNotFoundError, "the hub has no such model, or a private one"),
        (RevisionNotFoundError, "its repository has no revision=None"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_named(
    error: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = SimpleNamespace(headers={}, request=None, status_code=404)

    def fail(*_: object, **__: object) -> None:
        raise error if isinstance(error, Exception) else error("see its page", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(FileNotFoundError, match=rf"^model='owner/name': .*{message}"):
        resolve_model_folder(EngineConfig("owner/name"))


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    entries = {"a": {"__float__": "Infinity"}, "b": [{"__float__": "-Infinity"}], "c": {"__float__": "x"}}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **entries}), encoding="utf-8")
    found = read_json(tmp_path / "config.json")
    assert (found["a"], found["b"], found["c"]) == (math.inf, [-math.inf], {"__float__": "x"})
    assert read_model_config(EngineConfig(str(tmp_path))).hidden_size == 64
