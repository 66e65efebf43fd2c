"""What the user chose (EngineConfig) and what the checkpoint says (ModelConfig). Frozen, validated, no torch."""

import difflib
import json
import math
import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

MAX_TENSOR_PARALLEL_SIZE = 8
DTYPES = ("bfloat16", "float16", "float32")
_CHECKPOINT_DTYPES = (*DTYPES, "float64")


def _require(condition: bool, option: str, value: Any, bound: str) -> None:
    if not condition:
        raise ValueError(f"{option}={value!r}: must be {bound}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def _require_int(option: str, value: Any, low: int, high: int | None = None) -> None:
    bound = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int and value >= low and (high is None or value <= high), option, value, bound)


def _require_positive(option: str, value: Any) -> None:
    _require(_is_number(value) and value > 0, option, value, "a finite number > 0")


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine. `None` means: chosen from the model, the device and the memory that is there."""

    model: str
    """A folder with config.json and *.safetensors, or a hub id."""
    tokenizer: str | None = None
    """A folder or hub id; default: the model's."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no tokenizer is loaded and `text` stays empty."""
    tensor_parallel_size: int = 1
    """Ranks that share every layer, 1..8; one GPU (or one CPU process) each."""
    share_gpus: bool = False
    """True: where there are fewer GPUs than ranks, ranks take turns on a GPU; to try more ranks, not to be fast. Needs
    num_kvcache_blocks."""
    device: str = "auto"
    """"cuda", "cpu" or "auto": cuda where torch sees one."""
    dtype: str = "auto"
    """"bfloat16", "float16", "float32" or "auto": the checkpoint's on a GPU, float32 on a CPU."""
    seed: int = 0
    """Seeds the draws of requests that bring no seed of their own, and dummy weights."""
    load_format: str = "auto"
    """"auto": safetensors; "dummy": random weights from the configuration alone, the same at every rank count."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Replaces entries of config.json, for example {"rope_scaling": {...}}."""

    max_model_len: int | None = None
    """Longest prompt + output of a request in tokens; default: the model's max_position_embeddings."""
    max_num_seqs: int = 256
    """Most requests that run at once (slots on the device)."""
    max_num_batched_tokens: int = 16384
    """Most tokens computed in one step: running rows and prompt chunks share this budget."""
    max_num_prefill_tokens_with_decodes: int | None = None
    """Most prompt tokens in a step that also decodes, so that long prompts do not stall running requests. Default:
    512, and more with a deep queue, where everybody waits anyway: an eighth of the prompt tokens that wait, at most
    4096, rounded down to a power of two."""
    max_num_partial_prefills: int = 4
    """Most prompts that may be half computed after a step."""
    max_long_partial_prefills: int = 1
    """Most long prompts in progress while a short one waits."""
    long_prefill_token_threshold: int | None = None
    """A prompt with more tokens to compute than this is long, and while short ones wait it gets at most this many
    tokens a step, and at most half of those left for prompts. Default: a quarter of max_num_batched_tokens; 0 switches
    the distinction off."""
    longest_first: bool = True
    """generate() queues its requests by max_tokens, most first: the batch ends sooner. False: in the order of the
    prompts (for comparison)."""

    gpu_memory_utilization: float = 0.9
    """Share of each GPU's memory for weights, activations, graphs and KV cache together."""
    num_kvcache_blocks: int | None = None
    """KV blocks that requests can use; default: what fits (the minimum over ranks)."""
    kvcache_block_size: int | None = None
    """Tokens of a KV block; a multiple of 16. Default 128 on a GPU, 16 on a CPU."""
    cpu_kvcache_gib: float = 0.5
    """KV cache of each rank on a CPU, in GiB, where num_kvcache_blocks is not given."""
    admission_lookahead: bool = True
    """Requests start when their KV cache is expected to fit until they end, so that preemptions are rare. False: as
    soon as their tokens of now fit (for comparison)."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt prefixes, also with finished requests while their blocks last."""

    attention_backend: str = "auto"
    """"flash", "triton", "torch" or "auto": the best that is installed and that the device can run."""
    enforce_eager: bool = False
    """True: no CUDA graphs."""
    fused_kernels: bool = True
    """False: plain PyTorch in place of the Triton kernels around attention, and no CUDA graphs (for comparison)."""
    small_batch_kernels: bool = True
    """False: plain library matrix products everywhere, in prompts too (for comparison)."""
    dependent_launch: bool = True
    """False: no kernel starts before the one before it has ended (for comparison)."""
    step_mailbox: bool = True
    """False: decode steps are copied to the device and their tokens back, between graphs that otherwise fetch and leave
    them in memory of the host (for comparison)."""
    kernel_choices: str | None = None
    """A file of which kernels and algorithms multiply: read where it exists, else timed on this device and written. By
    default a fixed rule decides."""
    peer_all_reduce: bool = True
    """False: NCCL for every all-reduce (for comparison). Peer memory never uses NVLink multicast."""
    push_products: bool = True
    """False: products are stored locally, and the sums over the ranks send them (for comparison)."""
    overlap_all_reduce: bool = True
    """True: large steps with prompts run in two halves, and while the ranks sum one, the other is computed."""
    parallel_compile: bool = True
    """False: at the first start kernels are compiled one by one, by the engine itself (for comparison)."""
    async_scheduling: bool = True
    """False: wait for each step's tokens before the next step is scheduled (for comparison)."""
    step_timeout: float = 60.0
    """Seconds after which a step (or a worker) without progress is an error; compiling does not count."""

    def __post_init__(self) -> None:
        for option in ("model", "tokenizer", "kernel_choices"):
            value = getattr(self, option)
            if value is not None or option == "model":
                is_path = isinstance(value, (str, os.PathLike)) and bool(str(value))
                _require(is_path, option, value, "a path" if option == "kernel_choices" else "a path or hub id")
                object.__setattr__(self, option, str(value))
        for option in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
        ):
            _require_int(option, getattr(self, option), 1)
        for option in ("max_model_len", "num_kvcache_blocks", "max_num_prefill_tokens_with_decodes"):
            if getattr(self, option) is not None:
                _require_int(option, getattr(self, option), 1)
        _require_int("tensor_parallel_size", self.tensor_parallel_size, 1, MAX_TENSOR_PARALLEL_SIZE)
        _require_int("seed", self.seed, 0, 2**63 - 1)
        if self.long_prefill_token_threshold is not None:
            _require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        if self.kvcache_block_size is not None:
            _require_int("kvcache_block_size", self.kvcache_block_size, 16)
            _require(
                self.kvcache_block_size % 16 == 0, "kvcache_block_size", self.kvcache_block_size, "a multiple of 16"
            )
        share = self.gpu_memory_utilization
        _require(_is_number(share) and 0 < share <= 1, "gpu_memory_utilization", share, "a number in (0, 1]")
        for option in ("cpu_kvcache_gib", "step_timeout"):
            _require_positive(option, getattr(self, option))
        _require(
            isinstance(self.hf_overrides, dict), "hf_overrides", self.hf_overrides, "a dict of config.json entries"
        )
        for option in (f.name for f in fields(self) if f.type is bool):
            _require(isinstance(getattr(self, option), bool), option, getattr(self, option), "True or False")
        self._require_choice("device", "auto", "cuda", "cpu")
        self._require_choice("dtype", "auto", *DTYPES)
        self._require_choice("load_format", "auto", "dummy")
        self._require_choice("attention_backend", "auto", "flash", "triton", "torch")

    def _require_choice(self, option: str, *choices: str) -> None:
        value = getattr(self, option)
        _require(value in choices, option, value, "one of " + ", ".join(map(repr, choices)))

    @classmethod
    def from_options(cls, model: str, **options: Any) -> "EngineConfig":
        """EngineConfig(model, **options), naming an unknown option and its nearest known one."""
        known = {f.name for f in fields(cls)}
        for option in options:
            if option not in known:
                near = difflib.get_close_matches(option, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"unknown option {option!r}{hint}")
        return cls(model, **options)

    @property
    def long_prefill_threshold(self) -> int:
        """The resolved long_prefill_token_threshold, in tokens; 0: no prompt is long."""
        if self.long_prefill_token_threshold is None:
            return max(1, self.max_num_batched_tokens // 4)
        return self.long_prefill_token_threshold


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, whichever of its two spellings the checkpoint uses."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    KINDS = ("default", "linear", "yarn")

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (before)."""
        scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        _require(isinstance(scaling, dict), "rope_scaling", scaling, "a dict")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        _require(kind in cls.KINDS, "rope_type", kind, "one of " + ", ".join(map(repr, cls.KINDS)))
        _require(
            "factor" in scaling or kind == "default",
            "rope_scaling",
            scaling,
            f"given a 'factor' for rope type {kind!r}",
        )
        names = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate")
        given = {name: scaling[name] for name in names if scaling.get(name) is not None}
        theta = scaling.get("rope_theta", raw.get("rope_theta", 10000.0))
        for name, value in {"rope_theta": theta, **given}.items():
            if name == "truncate":
                _require(isinstance(value, bool), name, value, "True or False")
            else:
                _require_positive(f"rope {name}" if name == "factor" else name, value)
        return cls(float(theta), kind, **given)


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, as config.json describes it. Counts are of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, raw: dict[str, Any], generation: dict[str, Any] | None = None) -> "ModelConfig":
        """`raw`: config.json; `generation`: generation_config.json, whose end-of-text ids win."""
        architectures = raw.get("architectures") or []
        _require(len(architectures) == 1, "architectures", architectures, "exactly one architecture in config.json")
        for name in _REQUIRED_SIZES:
            if name not in raw:
                raise ValueError(f"config.json: {name!r} is missing")
            _require_int(name, raw[name], 1)
        for name, supported in _ONLY_SUPPORTED.items():
            _require(
                raw.get(name, supported) == supported, name, raw.get(name), f"{supported!r} (others are not supported)"
            )
        heads = raw["num_attention_heads"]
        kv_heads = raw.get("num_key_value_heads") or heads
        _require_int("num_key_value_heads", kv_heads, 1)
        _require(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of num_attention_heads={heads}")
        if raw.get("head_dim") is not None:
            _require_int("head_dim", raw["head_dim"], 1)
        eos = (generation or {}).get("eos_token_id")
        eos = raw.get("eos_token_id") if eos is None else eos
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        for token_id in eos_ids:
            _require_int("eos_token_id", token_id, 0, raw["vocab_size"] - 1)
        rms_norm_eps = raw.get("rms_norm_eps", 1e-6)
        _require_positive("rms_norm_eps", rms_norm_eps)
        tied = raw.get("tie_word_embeddings", False)
        _require(isinstance(tied, bool), "tie_word_embeddings", tied, "True or False")
        torch_dtype = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        known = ", ".join(map(repr, _CHECKPOINT_DTYPES))
        _require(torch_dtype in _CHECKPOINT_DTYPES, "config.json: dtype", torch_dtype, f"one of {known}")
        return cls(
            architecture=architectures[0],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_position_embeddings=raw["max_position_embeddings"],
            rms_norm_eps=rms_norm_eps,
            rope=RopeConfig.from_dict(raw),
            tie_word_embeddings=tied,
            torch_dtype=torch_dtype,
            eos_token_ids=eos_ids,
        )

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ValueError where `size` ranks cannot share this model."""
        heads = self.num_attention_heads
        _require(heads % size == 0, "tensor_parallel_size", size, f"a divisor of num_attention_heads={heads}")


_REQUIRED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_ONLY_SUPPORTED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }


PUBLISHED_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(28, 1024, 3072, 16, True),
    "Qwen3-1.7B": _qwen3(28, 2048, 6144, 16, True),
    "Qwen3-4B": _qwen3(36, 2560, 9728, 32, True),
    "Qwen3-8B": _qwen3(36, 4096, 12288, 32, False),
    "Qwen3-14B": _qwen3(40, 5120, 17408, 40, False),
    "Qwen3-32B": _qwen3(64, 5120, 25600, 64, False),
}
"""config.json of the published dense Qwen3 sizes: with load_format="dummy" their names need no file."""


def read_model_config(config: EngineConfig) -> ModelConfig:
    """The model's configuration from its folder (or, for dummy weights, from its published name), with hf_overrides."""
    folder = Path(config.model)
    generation: dict[str, Any] = {}
    if config.load_format == "dummy" and config.model in PUBLISHED_SHAPES and not folder.is_dir():
        raw = PUBLISHED_SHAPES[config.model]
    else:
        raw = _read_json(folder / "config.json")
        if (folder / "generation_config.json").is_file():
            generation = _read_json(folder / "generation_config.json")
    return ModelConfig.from_dict(*_override(raw, generation, config.hf_overrides))


def _override(
    raw: dict[str, Any], generation: dict[str, Any], overrides: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json with `overrides` in force, whichever spelling the files use."""
    rope = raw.get("rope_parameters")
    if rope and "rope_parameters" not in overrides:  # it would win over the older spelling, and so over the override
        theta = overrides.get("rope_theta", rope.get("rope_theta", 10000.0))
        rope = dict(overrides["rope_scaling"] or {}) if "rope_scaling" in overrides else rope
        overrides = {**overrides, "rope_parameters": {**rope, "rope_theta": theta}}
    generation = {name: value for name, value in generation.items() if name not in overrides}
    return {**raw, **overrides}, generation


def resolve_model_folder(config: EngineConfig) -> EngineConfig:
    """Replaces a hub id by the local folder of its files (downloaded where they are not there yet)."""
    if Path(config.model).is_dir() or (config.load_format == "dummy" and config.model in PUBLISHED_SHAPES):
        return config
    if config.model.count("/") != 1 or config.model.startswith((".", "/", "~")):
        raise FileNotFoundError(f"model={config.model!r}: no such folder, and not a hub id of the form 'owner/name'")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.jinja"] + (["*.safetensors"] if config.load_format == "auto" else [])
    folder = snapshot_download(config.model, allow_patterns=patterns)
    return replace(config, model=folder, tokenizer=config.tokenizer or folder)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"model={str(path.parent)!r}: {path.name} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content
