"""Any causal model of transformers whose attention goes through its attention interface, over the paged KV cache.

The module is transformers' own and is not modified. Its attention function is ours, registered under a name of this
model alone: it stores a step's keys and values in the cache and attends there. All rows of a step are packed into one,
[1, T]; what tells them apart are the positions and our function. One rank, no CUDA graphs.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import transformers  # noqa: F401 (waits for another thread's import, whose end replaces the module)
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm.attention.base import AttentionSpec
from nanovllm.errors import refuse, short
from nanovllm.kernels import Kernels
from nanovllm.kernels.attention.reference import attend_reference
from nanovllm.kernels.pointwise.rope import QKNormRope
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.step import ForwardStep
from nanovllm.layers.weights import CheckpointWeight, WeightedModule, whole
from nanovllm.model_config import ModelConfig
from nanovllm.models.config_reader import check_overrides, end_of_text
from nanovllm.models.unserved import refuse_unserved, unserved_parts

_PROBE = 6  # tokens of the texts by which a module is tried
_LONG = 160  # of one that is long enough for keys of many tokens; DeepSeek V4 adds one after 128
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Tolerance of a logit, as a share of the logits' standard deviation."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec, torch.Tensor | None], torch.Tensor]
"""(queries, keys, values, each [T, heads, D]; spec, sinks) -> [T, Hq, D]"""


def load_module(
    config: ModelConfig, folder: str, *, dummy: bool, seed: int, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The module with its weights from `folder`, or random ones. Raises ValueError or OSError as transformers does."""
    raw = config.transformers_config
    assert raw is not None
    settings = _settings(raw)
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if dummy:
                module = AutoModelForCausalLM.from_config(settings, dtype=dtype)
            else:
                module = AutoModelForCausalLM.from_pretrained(folder, config=settings, dtype=dtype)
        except ImportError as error:
            _refuse(f"it needs packages that are not installed: {short(error)}")
        return module.to(device).eval().requires_grad_(False)


class AttentionCall(PagedAttention):
    """One call of the attention function in a forward pass."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec


class TransformersModel(WeightedModule):
    """Model computed by transformers' own module, with the interface of DecoderForCausalLM but for what several ranks
    and graphs need."""

    def __init__(self, module: PreTrainedModel, kernels: Kernels) -> None:
        """Tries the module: raises ValueError where it computes something that packed rows over a cache of keys and
        values cannot give."""
        super().__init__()
        self.module, self.kernels = module, kernels
        self._rounds_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._attend: Attend | None = None
        self._found: list[AttentionSpec] = []
        self._windows: set[int] = set()
        """Windows of the masks that the module has asked for."""
        self._register()
        self._try()
        self._layers = [*map(AttentionCall, self._found)]

    def mixers(self) -> Sequence[AttentionCall]:
        """Attention layers, which keep memory of rows."""
        return self._layers

    def attention_layers(self) -> list[AttentionCall]:
        return self._layers

    def forward(self, input_ids: torch.Tensor, step: ForwardStep, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids int32 [T] -> logits [T, vocab], of the tokens `wanted`, int [N], alone [N, vocab]."""
        calls = iter(self._layers)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            layer = next(calls)
            assert layer.spec == spec
            qkv = torch.cat((q, k, v), dim=1).flatten(1)
            how = QKNormRope(spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary_dim=0)
            cache, out = layer.cache, torch.empty_like(q)
            q = self.kernels.qk_norm_rope_store(
                qkv, how, step.positions, step.slot_mappings[cache.table], cache.k, cache.v, kv_scales=cache.scales
            )
            step.backend.forward(q, cache, step.attention, out, spec, sinks)
            return out

        rows = {} if wanted is None or not self._rounds_rows else {"logits_to_keep": wanted}
        with self._attending(attend):
            logits = self._logits(input_ids, step.positions, **rows)
        return logits if wanted is None or rows else logits.index_select(0, wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns its argument: the results of `forward` are logits already."""
        return hidden

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        """The module's parameters by its own names."""
        for name, parameter in self.module.named_parameters():
            yield whole(name, parameter)

    # -- transformers' attention interface ---------------------------------------------------------------------

    def _register(self) -> None:
        """Makes `_attention` the module's attention function, under a name that no other module has."""
        name, me = f"nanovllm_{id(self)}", weakref.ref(self)

        def attention(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
            model = me()
            assert model is not None
            return model._attention(*args, **options), None

        def mask(local_size: int | None = None, **_: Any) -> None:
            model = me()
            assert model is not None
            model._windows |= set() if local_size is None else {local_size}

        self._name = name
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, mask)
        for registry in (AttentionInterface, AttentionMaskInterface):
            weakref.finalize(self, registry._global_mapping.pop, name, None)

    def _attention(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None = None, scaling: float | None = None, sliding_window: int | None = None,
        softcap: float | None = None, s_aux: torch.Tensor | None = None, is_causal: bool | None = None, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
        what = type(module).__name__
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            _refuse(f"{what} is not causal")
        if attention_mask is not None:
            _refuse(f"{what} has a mask of its own")
        if key.shape != value.shape:
            _refuse(f"{what} has values of {value.shape[-1]} dimensions and keys of {key.shape[-1]}")
        if key.shape[2] != query.shape[2]:
            _refuse(f"{what} has {key.shape[2]} keys for {query.shape[2]} tokens")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        sizes = (query.shape[1], key.shape[1], query.shape[3])
        spec = AttentionSpec(*sizes, scale, sliding_window or None, softcap or None, s_aux is not None)
        assert self._attend is not None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return self._attend(q, k, v, spec, s_aux).contiguous()[None]

    @contextmanager
    def _attending(self, attend: Attend) -> Iterator[None]:
        """Context in which the module's attention is `attend`."""
        self._attend = attend
        try:
            yield
        finally:
            self._attend = None

    def _logits(self, input_ids: torch.Tensor, positions: torch.Tensor | None, **options: Any) -> torch.Tensor:
        """positions: None for those that the module takes by itself."""
        places = None if positions is None else positions[None].long()
        return self.module(input_ids=input_ids[None].long(), position_ids=places, use_cache=False, **options).logits[0]

    # -- the trial ----------------------------------------------------------------------------------------------

    def _try(self) -> None:
        """Two copies of a text, packed, must both get the logits that transformers gives the text alone. So what is not
        attention (states that run on, positions by place) is found out here, and not by a wrong text."""
        module = self.module
        module.set_attn_implementation("eager")  # sdpa leaves soft-caps out, and is what 5.17 gives Gemma 2
        ids, positions = (torch.arange(begin, begin + _PROBE, device=module.device) for begin in (1, 0))
        try:
            alone = self._logits(ids, None).float()
        except (AttributeError, IndexError, TypeError) as error:
            _refuse(f"it does not compute a text by itself: {short(error)}")
        module.set_attn_implementation(self._name)
        text = module.config.get_text_config(decoder=True)
        places = torch.arange(min(_LONG, text.max_position_embeddings), device=module.device)
        try:
            with self._attending(self._try_attention):
                packed = self._logits(ids.repeat(2), positions.repeat(2)).float()
            with self._attending(lambda q, *_: q):
                self._logits(places % text.vocab_size, places)
        except (AttributeError, IndexError, TypeError) as error:
            _refuse(f"it asks for what packed rows do not have: {short(error)}")
        if not self._found:
            _refuse("its attention does not go through transformers' attention interface")
        if unknown := self._windows - {spec.window for spec in self._found}:
            _refuse(f"it masks pieces of {min(unknown)} tokens, which its attention is not told")
        largest = (packed.view(2, *alone.shape) - alone).abs().max() / alone.std()
        if not largest <= _TOLERANCE[module.dtype]:
            _refuse("two texts, packed, do not get the logits that each gets alone")

    def _try_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self._found.append(spec)
        visible = torch.ones(_PROBE, _PROBE, dtype=torch.bool, device=q.device).tril()
        if spec.window is not None:
            visible = visible.triu(1 - spec.window)
        by_query = None if sinks is None else sinks[:, None].expand(-1, _PROBE)
        halves = []
        for parts in zip(*(x.transpose(0, 1).split(_PROBE, dim=1) for x in (q, k, v)), strict=True):
            queries, keys, values = (part.repeat_interleave(spec.num_heads // len(part), dim=0) for part in parts)
            halves.append(attend_reference(queries, keys, values, spec.scale, visible, spec.softcap, by_query))
        return torch.cat(halves, dim=1).transpose(0, 1).to(q.dtype)


def _refuse(why: str) -> NoReturn:
    refuse("model_impl", "transformers", f"of another model: {why}")


def is_known(raw: dict[str, Any]) -> bool:
    """Whether transformers has a causal model for this config.json."""
    return [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(raw.get("model_type", ""))] == raw.get("architectures")


def _settings(raw: dict[str, Any]) -> PreTrainedConfig:
    """Raises ValueError where transformers raises errors of kinds of its own."""
    try:
        return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    except Exception as error:
        raise ValueError(f"config.json: transformers does not take it: {short(error)}") from error


def _integer(settings: PreTrainedConfig, name: str) -> int:
    value = getattr(settings, name, None)
    if not isinstance(value, int):
        refuse(name, value, "an integer (hf_overrides can set it)")
    return value


def _longest_context(text: PreTrainedConfig) -> int:
    """max_position_embeddings; under LongRoPE the original context, beyond which the module takes other frequencies for
    all rows of a step."""
    ropes = getattr(text, "rope_parameters", None) or {}
    tables = [one for one in (ropes, *ropes.values()) if isinstance(one, dict) and one.get("rope_type") == "longrope"]
    originals = (one.get("original_max_position_embeddings") for one in tables)
    return min([_integer(text, "max_position_embeddings"), *(length for length in originals if length)])


def read_transformers_config(raw: dict[str, Any], generation: dict[str, Any], overrides: dict[str, Any]) -> ModelConfig:
    """config.json of any model that transformers knows, as far as the engine itself needs it; `generation`: as
    parse_config. Raises ValueError where transformers does not know it."""
    there, raw = raw, {**raw, **overrides}
    if not is_known(raw):
        refuse("architectures", raw.get("architectures"), "a causal model that transformers has for its model_type")
    if raw.get("quantization_config") is not None:  # its loading needs other libraries, which say so late
        refuse("quantization_config", raw["quantization_config"], "absent where transformers computes the model")
    settings = _settings(raw)
    if parts := unserved_parts(settings.get_text_config(decoder=True).to_dict()):
        refuse_unserved(raw["architectures"][0], parts)
    if overrides:
        default = type(settings)()
        known = {*there, *default.to_dict(), *default.attribute_map}
        check_overrides(overrides, known | ({"rope_theta", "rope_scaling"} if "rope_parameters" in known else set()))
    text = settings.get_text_config(decoder=True)
    heads = _integer(text, "num_attention_heads")
    dtype = getattr(settings, "dtype", None) or torch.float32
    eos = end_of_text(generation.get("eos_token_id"), getattr(text, "eos_token_id", None), text.vocab_size)
    return ModelConfig(
        raw["architectures"][0], text.vocab_size, text.hidden_size, intermediate_size=0, num_attention_heads=heads,
        num_key_value_heads=text.to_dict().get("num_key_value_heads") or heads, head_dim=0,
        max_position_embeddings=_longest_context(text), norm_eps=0.0, layers=(), ropes={},
        tie_word_embeddings=bool(getattr(settings, "tie_word_embeddings", False)),
        torch_dtype=str(dtype).removeprefix("torch."), eos_token_ids=eos, transformers_config=raw,
    )  # fmt: skip
