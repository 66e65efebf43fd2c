"""Model configuration: what a checkpoint's config.json says, in one form for all families. Frozen, no torch.

`models/` fills it in: each family reads its own config.json (models/families/), so a switch has one name here whatever
its names there.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from nanovllm.errors import refuse

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as `layer_types` in config.json names them; also the names of their rope tables."""


@dataclass(frozen=True)
class RopeConfig:
    """A rotary embedding table (layers/rotary.py), whichever of its spellings the checkpoint uses."""

    theta: float
    kind: str = "default"
    """"default", "linear", "yarn", "llama3", "longrope" or "proportional"."""
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    """Tokens of the context before it was extended; None where nothing extends it."""
    attention_factor: float | None = None
    """Factor on cos and sin; None: computed from the kind."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0
    """Share of a head's dimensions that are rotated, from its first on."""

    def rotary_dim(self, head_dim: int) -> int:
        """Dimensions of a head that are rotated."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial_rotary_factor)


@dataclass(frozen=True)
class Quantization:
    """Format of quantised linear weights (layers/quantized.py)."""

    method: str = "fp8"
    scales: str = "channel"
    """Granularity of the checkpoint's weight scales: one a "tensor", one a "channel" (row), or one a "block" of 128 x
    128."""
    static_inputs: bool = False
    """The checkpoint has a scale of activations for each tensor."""
    while_loading: bool = False
    """The checkpoint's weights are not quantised; ours are made from them."""
    layout: str = ""
    """Layout of packed weights in the checkpoint. int4: "compressed-tensors", "awq", "gptq" or "gptq_v2"; nvfp4:
    "compressed-tensors" or "modelopt"; mxfp4: "compressed-tensors", or "" of gpt-oss's stacks; int8: "pack-quantized"
    or "int-quantized"."""
    group: int = 0
    """Columns that share a scale of packed weights; 0: all."""
    has_zeros: bool = False
    """Groups of int4 weights have zeros of their own."""


FP8_WHILE_LOADING = Quantization("fp8", "block", while_loading=True)
"""Format of what an option rounds to e4m3 by itself, beside weights of any."""


class LatentSizes(NamedTuple):
    """Options of layers with latent attention (layers/latent.py), whose LayerSpec.head_dim is the width of the rotated
    part of queries and keys."""

    query_rank: int
    """Width of the projection that queries are made of; 0: they are made of the rows."""
    width: int
    """Width of the latent that keys and values are made of."""
    nope: int
    """Width of the part of queries and keys that is not rotated."""
    value: int
    """Width of a head's value."""
    interleaved: bool
    """Elements 2i and 2i + 1 are rotated as a pair; False: i and i + half."""


@dataclass(frozen=True)
class LayerSpec:
    """Properties that may differ between the layers of one model."""

    head_dim: int
    num_kv_heads: int
    """KV heads of the whole model, not of one rank."""
    window: int | None = None
    """A query at position p sees keys p - window + 1 .. p; None: all keys up to p."""
    rope: str | None = FULL
    """Name in ModelConfig.ropes; None: no rotary embedding (NoPE)."""
    mixer: str = "attention"
    """Mixer of tokens: "attention", "none", or a name of the family's own (models/family.py)."""
    mlp: str = "dense"
    """Kind of MLP: "dense", "moe", "dense and moe" side by side, "none", or a name of the family's own."""
    options: Hashable = None
    """Options for a family's own mixer or MLP, passed on as they are."""
    has_sinks: bool = False
    num_heads: int | None = None
    """Query heads, of the whole model; None: ModelConfig.num_attention_heads."""
    shares_keys: bool = False
    """Keys and values are those of the last layer before it that has its own, and the same window."""
    intermediate_size: int | None = None
    """Width of a dense MLP; None: ModelConfig.intermediate_size."""
    values_are_keys: bool = False
    """Values are what the projection of keys gives, before the keys' norm and rotation."""
    norm_placement: str | None = None
    """Places of the norms in this layer; None: ModelConfig.norm_placement."""
    quantization: Quantization | None = None
    others: frozenset[tuple[str, Quantization | None]] = frozenset()
    """Parts that are held otherwise, None: unquantised. Parts are "qkv", "o", "gate_up", "down", "experts",
    "shared_gate_up", "shared_down" and "latent"."""

    @property
    def has_dense_mlp(self) -> bool:
        return self.mlp in ("dense", "dense and moe")

    @property
    def has_experts(self) -> bool:
        return self.mlp in ("moe", "dense and moe")

    @property
    def signature(self) -> Hashable:
        """Equal for layers that run the same kernels: tables of one size differ in values alone."""
        keys = (self.values_are_keys, self.shares_keys, self.has_sinks)
        kinds = (self.mixer, self.mlp, self.intermediate_size, self.options, self.quantization, self.others, *keys)
        heads = (self.head_dim, self.num_kv_heads, self.num_heads)
        return (*heads, self.window, self.rope is None, self.norm_placement, *kinds)

    def precision(self, part: str) -> Quantization | None:
        """Quantisation of a part; None: it is in the model's dtype."""
        return dict(self.others).get(part, self.quantization)

    @property
    def formats(self) -> set[Quantization]:
        """Formats of all parts."""
        return {held for held in (self.quantization, *dict(self.others).values()) if held is not None}


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts in place of the dense MLP or beside it (layers whose LayerSpec.mlp has "moe")."""

    num_experts: int
    top_k: int
    """Experts of each token."""
    intermediate_size: int
    """Width of one expert."""
    scoring: str = "softmax"
    """"softmax", or "sigmoid" or "corrected_softmax", which choose by score + a correction of each expert."""
    renormalise: bool = True
    """The chosen scores are divided by their sum."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen from the best groups alone; for sigmoid."""
    scale: float = 1.0
    """Factor on the weights of the chosen experts."""
    shared_size: int = 0
    """Intermediate size of the expert that every token goes to; 0: none."""
    shared_name: str = "shared_experts"
    """Name of the shared expert in the checkpoint."""
    latent_size: int = 0
    """Width of what experts see of a token: a projection, from whose width another one projects their sum back; 0: they
    see all of it."""
    gated: bool = True
    """An expert is down(activation(gate(x)) * up(x)); False: down(relu(up(x)) ** 2)."""
    activation: str = "silu"
    """"silu" or "gelu_tanh", of experts with gates."""
    logits_scale: float = 1.0
    """Factor on the router's logits."""
    expert_scales: bool = False
    """Each expert has a factor on its weight, after all else."""
    shared_gate: bool = False
    """A sigmoid of the token weighs what that expert computes."""
    bias: bool = False
    """Whether the router and all projections have a bias."""
    activation_limit: float | None = None
    activation_alpha: float = 1.0
    """Clamped SwiGLU where there is a limit; see ExpertActivation."""
    layout: str = "experts"
    """Layout of the experts' weights in the checkpoint (layers/moe.py): "experts", "linears", "parameters", "turned" or
    "transposed"."""


@dataclass(frozen=True)
class Pooling:
    """Making of one vector from a text: the final hidden state of its last token."""

    normalizes: bool = True
    """Whether vectors have length 1."""
    prompts: dict[str, str] = field(default_factory=dict)
    """Texts by name that a caller may put before a text."""
    default_prompt: str | None = None
    """Name of the one that stands there unless the caller names another."""

    def prompt(self, name: str | None) -> str:
        """The text to put before a text. Raises ValueError for a name that is not there."""
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            refuse("prompt_name", name, f"one of the model's prompts: {', '.join(map(repr, self.prompts)) or 'none'}")
        return "" if name is None else self.prompts[name]


@dataclass(frozen=True)
class DrafterConfig:
    """A model that drafts for another one (models/drafters/)."""

    model: "ModelConfig"
    """Configuration of its layers and sizes, as far as they are those of a decoder."""
    folder: str
    taps: tuple[int, ...]
    """Layers of the other model before which it takes the residual stream, ascending; the number of layers: its final
    hidden states."""
    vocab_size: int
    """Number of ids that it can draft."""
    tensors: frozenset[str] = frozenset()
    """Tensors that its checkpoint may lack, and has."""
    switches: frozenset[str] = frozenset()
    """Switches of its method that are on."""
    mask_token_id: int = 0
    """Token that stands for those that are drafted in one pass."""
    markov_rank: int = 0
    """Width of what a drafted token adds to the logits of the next; 0: it adds nothing."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture, as config.json describes it. Counts are of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    """Longest context in tokens: config.json's, or what YaRN or linear scaling extends it to."""
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: dict[str, RopeConfig]
    """Tables by name; layers name theirs."""
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    """Tokens that end a text: the configuration's, and in an engine the tokenizer's as well."""
    state_dtype: str = "float32"
    """Dtype of recurrent layers' states (EngineConfig.state_dtype)."""
    head_precision: Quantization | None = None
    """Quantisation of an output head that is not tied to the embedding; None: the model's dtype."""

    norm_kind: str = "rms"
    """"rms": the normalised row is rounded, then times weight; "rms_float32": times weight in float32, then rounded;
    "layer": LayerNorm, in float32."""
    norm_adds_one: bool = False
    """The checkpoint holds weight - 1."""
    norm_bias: bool = False
    out_norm_eps: float | None = None
    """Epsilon of norms after a block; None: norm_eps."""
    last_norm_is_whole: bool = False
    """True: the checkpoint holds the whole weight of the norm before the head, even with norm_adds_one."""
    norm_placement: str = "pre"
    """"pre": before each block; "post": after it, before the addition; "sandwich": both; "parallel": one norm, both
    blocks, one addition."""

    activation: str = "silu"
    """"silu", "gelu_tanh", "relu2"."""
    gated_mlp: bool = True
    """down(activation(gate(x)) * up(x)); False: down(activation(up(x)))."""
    mlp_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False

    qk_norm: str | None = None
    """"head": over each head; "width": over all heads together; None: no norm of queries and keys."""
    qk_norm_after_rope: bool = False
    qk_norm_scale: float | None = None
    """The norm over each head has no weights: queries are multiplied by this, keys by 1."""
    value_norm: bool = False
    """Values are normalised over each head, without a weight."""
    attention_gate: str | None = None
    """Activation of the gate "g_proj", another projection of the rows that multiplies attention's output: "sigmoid" or
    "softplus". None: no gate."""
    gate_in_queries: bool = False
    """The checkpoint has gates in the projection of queries, those of a head behind its query."""
    gate_per_head: bool = False
    """One gate for a head; False: one for each of its elements."""
    interleaved_rope: bool = False
    """The checkpoint pairs dimension 2i with 2i + 1 (not i with i + half)."""
    float_rope: bool = False
    """Rotation in float32, rounded once."""
    attention_scale: float | None = None
    """Factor on attention scores; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    query_scaling: tuple[float, int] | None = None
    """(beta, length): queries times 1 + beta * ln(1 + position // length), after rope."""

    embedding_norm: bool = False
    """Embeddings are normalised, without a weight."""
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False
    """The multiplier is rounded to the model's dtype first."""
    residual_multiplier: float = 1.0
    """Factor on each block's output before it is added to the residual stream."""
    layer_inputs: tuple[int, int, int] | None = None
    """Each layer adds a part of its own of an embedding (layers/layer_inputs.py): layers, width of a part, tokens."""
    layer_scalars: bool = False
    """The residual stream is multiplied, behind each layer, by a number of the layer's own."""
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None
    """cap * tanh(logits / cap), after the multiplier."""

    moe: MoEConfig | None = None

    pooling: Pooling | None = None
    """Pooling of a model of embeddings, whose output head is left out; None: it generates text."""

    drafter: DrafterConfig | None = None
    """A model that drafts for this one (EngineConfig.speculative_config)."""

    wrapper: str | None = None
    """The architecture of the checkpoint where this one is its language model (models/wrappers.py)."""
    transformers_config: dict[str, Any] | None = None
    """config.json as it is, where transformers' own module computes the model (models/transformers_model.py)."""

    @property
    def implementation(self) -> str:
        """"native", or "transformers" where its module computes the model."""
        return "native" if self.transformers_config is None else "transformers"

    @property
    def most_sums(self) -> int:
        """Maximum sums over ranks that go side by side, as one of as many times the rows: of an MLP and experts."""
        return max(1, *(layer.has_dense_mlp + layer.has_experts for layer in self.layers))

    @property
    def usual_context(self) -> int:
        """Tokens of a context that nobody asks to be longer. Under LongRoPE those of the original one: a longer one has
        other frequencies, which change short texts too."""
        originals = (rope.original_max_position_embeddings for rope in self.ropes.values() if rope.kind == "longrope")
        return min([self.max_position_embeddings, *(length for length in originals if length is not None)])

    def with_end(self, token_id: int | None) -> "ModelConfig":
        """Returns this configuration where `token_id`, which the tokenizer names (None: nothing), ends a text too."""
        if token_id is None or token_id >= self.vocab_size or token_id in self.eos_token_ids:
            return self
        return replace(self, eos_token_ids=(*self.eos_token_ids, token_id))

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ValueError where `size` ranks cannot share this model."""
        if size > 1 and self.transformers_config is not None:
            raise ValueError(f"tensor_parallel_size={size}: must be 1 where transformers computes it (model_impl)")
        if self.drafter is not None:
            self.drafter.model.check_tensor_parallel(size)
        of_layers = {layer.num_heads or self.num_attention_heads for layer in self.layers}
        for heads in (heads for heads in sorted(of_layers | {self.num_attention_heads}) if heads % size):
            raise ValueError(f"tensor_parallel_size={size}: must be a divisor of num_attention_heads={heads}")
