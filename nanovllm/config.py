"""Engine options: frozen, validated, no torch. The checkpoint's own configuration is in model_config.py."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from nanovllm.errors import FLAG, SHARE, Bound, integer, is_number, one_of, option, refuse, require_known
from nanovllm.speculative import METHODS, Speculation, most_places, parse_speculation
from nanovllm.vllm_options import translated

DEMO_MODEL = "demo"
"""Name of the checkpoint that ships with the package; a folder of that name comes first."""
MAX_TENSOR_PARALLEL_SIZE = 8
MAX_DATA_PARALLEL_SIZE = 1024
DTYPES = ("bfloat16", "float16", "float32")
OPTIMISATIONS = {
    "fused_kernels": "plain PyTorch replaces the Triton kernels around attention, so there are no CUDA graphs",
    "gemm_kernels": "the library computes every GEMM",
    "pdl": "no kernel starts before the previous one has ended",
    "peer_all_reduce": "NCCL for every all-reduce",
    "window_groups": "layers with a window keep all tokens, like those without",
    "two_batch_overlap": "no step is split into two halves, of which one computes while the ranks sum the other",
    "parallel_compile": "at the first start the engine compiles kernels one by one",
    "async_scheduling": "the tokens of a step are read before the next step is scheduled",
    "late_scheduling": "the server schedules a step as soon as the previous one runs, not shortly before it ends",
    "lookahead": "a request starts as soon as its current tokens fit, whether or not all fit until they end",
    "longest_first": "generate() queues requests in the order of the prompts, not by max_tokens",
}
"""Names that EngineConfig.disable takes, and what happens without each. Tokens stay the same, up to rounding."""


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(str(value))


def _dict(what: str) -> Bound:
    return lambda value: isinstance(value, dict), f"a dict {what}"


_POSITIVE: Bound = (lambda value: is_number(value) and value > 0, "a finite number > 0")
_PATH: Bound = (_is_path, "a path")
_MODEL_PATH: Bound = (_is_path, "a path or hub id")
_NAMED: Bound = (lambda value: isinstance(value, str) and bool(value), "a branch, a tag or a commit")
_FUNCTION: Bound = (callable, "a function")


def _require(condition: bool, name: str, value: Any, bound: str) -> None:
    if not condition:
        refuse(name, value, bound)


def _disabled(names: Any) -> tuple[str, ...]:
    """EngineConfig.disable in one order, each name once."""
    given = [names] if isinstance(names, str) else names
    is_list = isinstance(given, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in given)
    _require(is_list, "disable", names, "names of optimisations")
    found = sorted({name.strip() for text in given for name in text.split(",") if name.strip()})
    for name in found:
        _require(name in OPTIMISATIONS, "disable", name, "one of " + ", ".join(map(repr, OPTIMISATIONS)))
    return tuple(found)


def _files(paths: Any) -> tuple[str, ...]:
    """EngineConfig.plugins as absolute paths: another process may have another working directory."""
    if isinstance(paths, str):
        paths = [path.strip() for path in paths.split(",") if path.strip()]
    is_list = isinstance(paths, (list, tuple)) and all(_is_path(path) for path in paths)
    _require(is_list, "plugins", paths, "paths of Python files")
    return tuple(os.path.abspath(path) for path in paths)


@dataclass(frozen=True)
class EngineConfig:
    """Options of the engine. `None` means: chosen from the model, the device and the memory that is there."""

    model: str = option(bound=_MODEL_PATH)
    """A folder with config.json and *.safetensors, a hub id, or "demo": a small model in the package."""
    tokenizer: str | None = option(None, _MODEL_PATH)
    """A folder or hub id; default: the model's."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no tokenizer is loaded and `text` stays empty."""
    revision: str | None = option(None, _NAMED)
    """Branch, tag or commit of the model's repository on the hub; default: its main branch."""
    download_dir: str | None = option(None, _PATH)
    """Folder for files from the hub; default: the hub's own cache, in HF_HOME."""
    tensor_parallel_size: int = option(1, integer(1, MAX_TENSOR_PARALLEL_SIZE))
    """Number of ranks that share every layer, 1..8. Each has one GPU, or one CPU process."""
    data_parallel_size: int = option(1, integer(1, MAX_DATA_PARALLEL_SIZE))
    """Number of replicas of the model, 1..1024. Each has tensor_parallel_size ranks; replica i has the GPUs from i *
    tensor_parallel_size on."""
    data_parallel_backend: str | None = option(None, one_of("local", "ray"))
    """"local": replicas are processes of this host; "ray": actors of a Ray cluster. None: "local" where
    data_parallel_size > 1, else an engine in the caller's process."""
    ray_address: str | None = option(None, (lambda value: isinstance(value, str), "a text such as 'auto'"))
    """Address of the Ray cluster for data_parallel_backend="ray": host:port or "auto". "auto": the cluster that this
    host belongs to. None: the program's own connection, else RAY_ADDRESS, else a Ray of this host that lives as long
    as the engine."""
    share_gpus: bool = False
    """Let ranks take turns on a GPU where there are fewer GPUs than ranks. For tests: correct, but slow. Needs
    num_kvcache_blocks."""
    device: str = option("auto", one_of("auto", "cuda", "cpu"))
    """"cuda", "cpu" or "auto": cuda where torch sees one."""
    dtype: str = option("auto", one_of("auto", *DTYPES))
    """"bfloat16", "float16" or "float32". "auto": on a GPU the checkpoint's, on a CPU float32."""
    seed: int = option(0, integer(0, 2**63 - 1))
    """Seed of dummy weights, and of the sampling of requests without a seed."""
    load_format: str = option("auto", one_of("auto", "dummy"))
    """"auto": safetensors; "dummy": random weights, from the configuration alone. Dummy weights are the same at every
    rank count."""
    model_impl: str = option("auto", one_of("auto", "native", "transformers"))
    """"native": our layers; "transformers": its own module, slower, on one rank. Without CUDA graphs, over our KV
    cache. "auto": native where there is one."""
    runner: str = option("auto", one_of("auto", "generate", "pooling"))
    """"generate": text; "pooling": embeddings (LLM.embed), without a head. "auto": "pooling" where modules.json
    of sentence-transformers in the model's folder names a Pooling."""
    quantization: str | None = option(None, one_of("fp8", "int4", "mxfp4"))
    """"fp8": round linear weights to e4m3 while they load; "int4": to 4 bits; "mxfp4": experts
    alone. None: as the checkpoint has them."""
    lm_head_dtype: str = option("auto", one_of("auto", "fp8"))
    """"fp8": round an untied output head to e4m3 while it loads. "auto": the model's dtype."""
    exact_bits: str | None = option(None, one_of("batch", "tp"))
    """"batch": same bits whatever runs beside a request; "tp": also on 1, 2, 4 and 8 ranks. This is about
    log-probabilities and tokens, however steps are cut. None: equal up to the order of sums."""
    hf_overrides: dict[str, Any] = option(bound=_dict("of config.json entries"), default_factory=dict)
    """Entries that replace those of config.json: {"rope_scaling": {...}}."""

    max_model_len: int | None = option(None, integer(1))
    """Maximum tokens of a request, prompt and output together. Default: the model's max_position_embeddings; under
    LongRoPE its original context."""
    max_num_seqs: int = option(256, integer(1))
    """Maximum number of requests that run at once."""
    max_num_batched_tokens: int = option(16384, integer(1))
    """Maximum tokens computed in one step; running requests and prompt chunks share this budget."""
    max_num_prefill_tokens_with_decodes: int | None = option(None, integer(1))
    """Maximum prompt tokens in a step that also decodes. Lower: smoother decoding; higher: faster first tokens.
    Default: chosen for each step between 128 and 4096."""
    max_num_partial_prefills: int = option(4, integer(1))
    """Maximum number of prompts that are partly computed after a step."""
    max_long_partial_prefills: int = option(1, integer(1))
    """Maximum number of long prompts in progress while a short one waits."""
    long_prefill_token_threshold: int | None = option(None, integer(0))
    """Prompts with more uncached tokens than this are "long"; while short prompts wait, a long one gets at most this
    many tokens (and half of the prompt budget) in a step. Default: a quarter of max_num_batched_tokens; 0: no prompt is
    long."""

    speculative_config: dict[str, Any] | None = option(None, _dict("such as {'method': 'ngram', ...}"))
    """Draft tokens and verify several in a step; texts stay the same. {"method": "ngram", "num_speculative_tokens": 3}:
    what followed the text's last tokens earlier in it; {"method": "eagle3", "model": ..., ...}: an EAGLE-3 head;
    "dspark" and "dflash" alike; "mtp": a layer of the model's own checkpoint (docs/speculation.md)."""

    enable_lora: bool = False
    """Let requests have LoRA adapters of linear layers (docs/adapters.md)."""
    max_loras: int = option(8, integer(1))
    """Adapters that running requests have at once, on the device. Requests with others wait. With enable_lora."""
    max_lora_rank: int = option(32, integer(1, 256))
    """Maximum rank of an adapter."""

    gpu_memory_utilization: float = option(0.9, SHARE)
    """Share of each GPU's memory for this engine, KV cache included. Weights, activations, graphs and KV cache
    together."""
    num_state_lines: int | None = option(None, integer(1))
    """States of recurrent layers: of running rows, and kept for later ones. Default: three for two of
    max_num_seqs, as far as 60 % of the memory is left to KV blocks. No more rows run at once."""
    state_dtype: str = option("float32", one_of("float32", "bfloat16"))
    """Dtype of the states of recurrent layers between steps: "float32", or "bfloat16", half as large."""
    num_kvcache_blocks: int | None = option(None, integer(1))
    """Number of KV blocks. Default: as many as fit, the minimum over ranks."""
    kvcache_block_size: int | None = option(None, integer(16))
    """Tokens in a KV block, a multiple of 16. Default: 128 on a GPU, 16 on a CPU."""
    cpu_kvcache_gib: float = option(0.5, _POSITIVE)
    """GiB of KV cache for each rank on a CPU. Not used with num_kvcache_blocks."""
    kv_cache_dtype: str = option("auto", one_of("auto", "fp8"))
    """"auto": the model's dtype; "fp8": e4m3, half the size, a scale for each token and head."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prompt prefixes. Blocks of finished requests stay usable until they are overwritten."""

    attention_backend: str = option("auto", one_of("auto", "flash", "triton", "torch", "flex"))
    """"flash", "triton", "torch"; "flex" for functions of your own. "auto": the best of the first three that is
    installed and that the device can run."""
    score_mod: Callable[..., Any] | None = option(None, _FUNCTION)
    """Function of tensors (score, slot, head, query position, key position) -> score; needs
    attention_backend="flex"."""
    mask_mod: Callable[..., Any] | None = option(None, _FUNCTION)
    """Function of tensors (slot, head, query position, key position) -> bool: whether that key is seen, among those
    that the model sees; needs attention_backend="flex"."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    kernel_choices: str | None = option(None, _PATH)
    """A table of GEMM kernels written by scripts/tune_steps.py; replaces the package's table for this GPU."""
    enable_sleep: bool = False
    """Let `sleep` return the memory of weights and KV cache to the device."""
    logprobs_mode: str = option("raw", one_of("raw", "processed"))
    """Default of the requests' own logprobs_mode: "raw" or "processed"."""
    max_logprobs: int = option(20, integer(-1))
    """Maximum likeliest tokens that a request's logprobs may ask for. -1: no bound."""
    max_queued_requests: int | None = option(None, integer(1))
    """Maximum number of waiting requests: beyond it `add_request` raises QueueFull. Those of `generate` do not count.
    None: unbounded."""
    plugins: tuple[str, ...] = ()
    """Python files that each process runs first; they call nanovllm.register_model (docs/models.md)."""
    disable: tuple[str, ...] = ()
    """Names of optimisations to switch off, for comparison; a list or one string with commas (docs/options.md)."""
    trace: str | None = option(None, _PATH)
    """Folder for a timeline of this run, for Perfetto and as an HTML page. It has steps, requests and KV cache."""
    step_timeout: float = option(60.0, _POSITIVE)
    """Seconds without progress after which a step or worker has failed. Compilation does not count."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "disable", _disabled(self.disable))
        object.__setattr__(self, "plugins", _files(self.plugins))
        for entry in fields(self):
            name, value = entry.name, getattr(self, entry.name)
            if name in ("disable", "plugins") or (value is None and entry.default is None):
                continue
            holds, bound = entry.metadata.get("bound", FLAG)
            _require(holds(value), name, value, bound)
            if holds is _is_path:
                path = str(value)
                _require(path == path.encode(errors="ignore").decode(), name, path, "in UTF-8")
                object.__setattr__(self, name, path)
        if self.model == DEMO_MODEL and not os.path.isdir(DEMO_MODEL):
            object.__setattr__(self, "model", os.path.realpath(os.path.join(os.path.dirname(__file__), "demo_model")))
        if self.speculative_config is not None:
            parse_speculation(self.speculative_config)
        size = self.kvcache_block_size
        _require(size is None or size % 16 == 0, "kvcache_block_size", size, "a multiple of 16")
        if self.ray_address is not None and self.data_parallel_backend != "ray":
            refuse("ray_address", self.ray_address, "None, or go with data_parallel_backend='ray'")
        for name in ("score_mod", "mask_mod"):
            if (value := getattr(self, name)) is not None:
                bound = "None, or go with attention_backend='flex' and tensor_parallel_size=1"
                _require(self.attention_backend == "flex" and self.tensor_parallel_size == 1, name, value, bound)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> "EngineConfig":
        """EngineConfig(model, **options), vLLM's names among them; None, as wrappers pass what is left open, is the
        default. Raises TypeError naming an unknown option and its nearest known one."""
        options = {name: value for name, value in translated(options).items() if value is not None}
        require_known("LLM", "option", options, cls.__dataclass_fields__)
        return cls(model, **options)

    @property
    def has_front(self) -> bool:
        """Whether requests go through a front of replicas."""
        return self.data_parallel_size > 1 or self.data_parallel_backend is not None

    @cached_property
    def speculation(self) -> Speculation | None:
        """The resolved speculative_config."""
        return None if self.speculative_config is None else parse_speculation(self.speculative_config)

    @property
    def model_drafts(self) -> bool:
        """Whether a model drafts."""
        return self.speculation is not None and not METHODS[self.speculation.method].looks_up

    @property
    def reads_pairs(self) -> bool:
        """Whether what a model keeps of a token, to draft, goes by the token behind it, too."""
        return self.speculation is not None and METHODS[self.speculation.method].reads_pairs

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in the text."""
        return self.speculation is not None and METHODS[self.speculation.method].looks_up

    @property
    def overlaps(self) -> bool:
        """Whether large steps of several ranks may be cut into halves. A model that drafts reads whole rows."""
        return self.uses("two_batch_overlap") and self.exact_bits is None and not self.model_drafts

    @property
    def tokens_per_step(self) -> int:
        """Maximum tokens that a request gains in a step."""
        return 1 if self.speculation is None else 1 + self.speculation.num_tokens

    @property
    def most_places(self) -> int:
        """Maximum rows of one token of a step on the device."""
        return most_places(self.max_num_seqs, self.tokens_per_step)

    @property
    def most_drafting(self) -> int:
        """Maximum requests for which a model drafts in a step: a step could verify drafts of so many."""
        return self.most_places // self.tokens_per_step

    def uses(self, optimisation: str) -> bool:
        """Whether one of OPTIMISATIONS is in force."""
        assert optimisation in OPTIMISATIONS
        return optimisation not in self.disable

    @property
    def long_prefill_threshold(self) -> int:
        """The resolved long_prefill_token_threshold, in tokens; 0: no prompt is long."""
        if self.long_prefill_token_threshold is None:
            return max(1, self.max_num_batched_tokens // 4)
        return self.long_prefill_token_threshold
