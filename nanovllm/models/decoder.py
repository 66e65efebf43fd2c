"""The decoder of all families, with their switches (ModelConfig): x + attention(norm(x)), then x + mlp(norm(x)), where
norms may come after a block too, or only there, or both blocks run side by side.

A norm and the addition before it are one step here, a ReduceAddNorm, since the ranks' partial sums meet
there. So each block starts by taking in the result of the block before it, a layer hands on (partial sum of its MLP,
residual stream), and a layer communicates exactly twice.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from nanovllm.errors import refuse
from nanovllm.kernels.plan.plan import NO_LAUNCH, Launch, LayerPlan
from nanovllm.kernels.plan.product import Around
from nanovllm.layers.attention import Attention, PagedAttention
from nanovllm.layers.context import ModelContext, Stream
from nanovllm.layers.layer_inputs import LayerInputGate, LayerInputs
from nanovllm.layers.memory import Mixer
from nanovllm.layers.mlp import dense_mlp
from nanovllm.layers.mlp_beside_experts import MLPBesideExperts
from nanovllm.layers.moe import MoE, is_experts_alone
from nanovllm.layers.norm import ReduceAddNorm, RowNorm, StreamScalar
from nanovllm.layers.rotary import PositionTables
from nanovllm.layers.step import Call, ForwardStep, wanted_rows
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import LayerSpec, ModelConfig
from nanovllm.models.family import Builder
from nanovllm.models.registry import family
from nanovllm.models.renaming import in_checkpoint
from nanovllm.parallel.two_batch import run_micro_batches


def make_norm(context: ModelContext, is_after: bool = False, is_last: bool = False) -> RowNorm:
    """A norm over the hidden size. is_after: it is of a block's result; is_last: it is the one before the head."""
    config = context.config
    eps = config.out_norm_eps if is_after and config.out_norm_eps is not None else config.norm_eps
    adds_one = config.norm_adds_one and not (is_last and config.last_norm_is_whole)
    return RowNorm(
        context, config.hidden_size, eps, kind=config.norm_kind, adds_one=adds_one, has_bias=config.norm_bias
    )


def placement_of(config: ModelConfig, spec: LayerSpec) -> str:
    """Places of the norms in a layer; see ModelConfig.norm_placement."""
    return spec.norm_placement or config.norm_placement


def has_plain_joints(config: ModelConfig) -> bool:
    """Whether an addition and an RMSNorm, and nothing else, stand between two blocks."""
    has_pre = all(placement_of(config, spec) == "pre" for spec in config.layers)
    return has_pre and config.norm_kind == "rms" and config.residual_multiplier == 1.0


def around_blocks(config: ModelConfig, spec: LayerSpec) -> Around:
    """Surroundings of a layer's mixer, and of its MLP."""
    placement = placement_of(config, spec)
    if placement == "parallel":
        return Around()  # one sum takes both
    if has_plain_joints(config) and can_fuse(config, spec):
        return Around("rms", "residual", adds_parts=True)
    return Around("norm" if placement != "post" else "", adds_parts=True)


def can_fuse(config: ModelConfig, spec: LayerSpec) -> bool:
    """Whether kernels for few rows can compute everything around and between this layer's products."""
    if spec.mixer != "attention" or spec.mlp not in OWN_MLPS or config.attention_gate is not None:
        return False
    if spec.mlp == "moe":
        assert config.moe is not None
        return is_experts_alone(config.moe)
    return config.gated_mlp and config.activation == "silu"


class Nothing(WeightedModule):
    """The part that a layer with one part lacks."""

    operations, memory, can_capture = (), (), True

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def bind(self, *memory: Any) -> None:
        pass

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from ()


OWN_MIXERS: dict[str, Callable[[ModelContext, LayerSpec, PositionTables, Around], Any]] = {
    "attention": Attention, "none": Nothing
}  # fmt: skip
"""Builders of a layer's mixer by LayerSpec.mixer, from what is around it. A mixer is a module with `operations`, (rows
[T, hidden], call) -> [wanted, hidden], a partial sum, that says what it remembers (layers/memory.py). A Family may have
more."""


OWN_MLPS: dict[str, Callable[[ModelContext, LayerSpec, Around], Any]] = {
    "dense": dense_mlp, "moe": MoE, "dense and moe": MLPBesideExperts, "none": Nothing
}  # fmt: skip
"""Builders of a layer's MLP by LayerSpec.mlp, from what is around it. An MLP is a module with `operations`, (rows [T,
hidden], call) -> [T, hidden], a partial sum; or one that `takes_residual`, rows before any norm, and has `out_norms`,
of so many partial sums [parts, T, hidden]. A Family may have more."""


def builder(kind: str, name: str, of_all: Mapping[str, Builder], of_family: Mapping[str, Builder]) -> Builder:
    """Returns the builder of that name, of the family or of all. Raises ValueError where neither has one."""
    known = {**of_all, **of_family}
    if name not in known:
        refuse(kind, name, "one of " + ", ".join(map(repr, known)))
    return known[name]


@dataclass(frozen=True)
class Block:
    """A ReduceAddNorm, and what takes its result: attention, an MLP, or both side by side."""

    reduce_norm: ReduceAddNorm
    compute: Callable[..., torch.Tensor]
    """(rows [T, hidden], call) -> partial [T or wanted, hidden]. Where the layer's plan has its operations compute what
    is around them the call has the `norm` of the rows, and the `residual`, which it adds to in place."""
    mixes: bool
    """Whether it takes the rows of all tokens and yields those of the wanted ones; else it has one number of both."""
    operations: range = range(0)
    """Places, among the layer's operations, from the one that takes the rows to the one that yields the result."""

    def ends(self, plan: LayerPlan) -> tuple[Launch, Launch]:
        """Launches of the first operation and of the last."""
        if not self.operations:
            return NO_LAUNCH, NO_LAUNCH
        return plan.launches[self.operations[0]], plan.launches[self.operations[-1]]


def side_by_side(attention: Any, mlp: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Function that computes the sum of attention and MLP of the same rows [T, hidden], for a Block."""

    def compute(x: torch.Tensor, call: Call) -> torch.Tensor:
        assert call.step is not None
        attended, wanted = attention(x, call), call.step.wanted
        chosen = wanted_rows(x, wanted)
        return attended + mlp(chosen, call._replace(rows=wanted)) if chosen.shape[0] else attended

    return compute


class DecoderLayer(WeightedModule):
    """Mixer and MLP, or one of the two, with a ReduceAddNorm before each: `blocks`, which every kind of step goes
    through."""

    def __init__(
        self, context: ModelContext, spec: LayerSpec, tables: PositionTables, before: "DecoderLayer | None"
    ) -> None:
        """before: the layer whose result this one takes in; None: there is none."""
        super().__init__()
        config = context.config
        placement, factor = placement_of(config, spec), config.residual_multiplier
        self.signature: Hashable = spec.signature
        self.norms: dict[str, RowNorm] = {}
        if placement != "post" and spec.mixer != "none":
            self.norms["attention_norm"] = make_norm(context)
        if placement in ("post", "sandwich"):
            for name in ("attention_out_norm", "mlp_out_norm"):
                self.norms[name] = make_norm(context, is_after=True)
        around, of_family = around_blocks(config, spec), family(config.architecture)
        self.self_attn: Any = builder("mixer", spec.mixer, OWN_MIXERS, of_family.mixers)(context, spec, tables, around)
        self.mlp: Any = builder("mlp", spec.mlp, OWN_MLPS, of_family.mlps)(context, spec, around)
        takes_residual = getattr(self.mlp, "takes_residual", False)
        if placement in ("pre", "sandwich") and spec.mlp != "none" and not takes_residual:
            self.norms["mlp_norm"] = make_norm(context)
        self.index: int = 0 if before is None else before.index + 1
        self.input_gate = None if config.layer_inputs is None else LayerInputGate(context, self.index)
        of_blocks = (*self.self_attn.operations, *self.mlp.operations)
        self.operations = of_blocks if self.input_gate is None else (*of_blocks, *self.input_gate.operations)
        self.plans = context.planner.layer(self.operations)
        self.adapted_plans = context.planner.layer(tuple(one.adapted for one in self.operations))
        """Plans of steps in which rows have adapters."""
        self.scalar = StreamScalar(context) if config.layer_scalars else None
        self.input_layernorm = taken_in(context, self.norms.get("attention_norm"), before)
        self.out_norm, self.out_norms = self.norms.get("mlp_out_norm"), getattr(self.mlp, "out_norms", ())
        """Norms of what it hands on; see ReduceAddNorm."""
        self.blocks: tuple[Block, ...]
        """Blocks in the order in which a step goes through them."""
        if placement == "parallel":
            self.blocks = (Block(self.input_layernorm, side_by_side(self.self_attn, self.mlp), mixes=True),)
            return
        norm, after = self.norms.get("mlp_norm"), self.norms.get("attention_out_norm")
        self.post_attention_layernorm = ReduceAddNorm(context, norm, after, factor)
        cut, end = len(self.self_attn.operations), len(of_blocks)
        mixer = Block(self.input_layernorm, self.self_attn, mixes=True, operations=range(cut))
        mlp = Block(self.post_attention_layernorm, self.mlp, mixes=False, operations=range(cut, end))
        self.blocks = (mixer,) * (spec.mixer != "none") + (mlp,) * (spec.mlp != "none")
        if self.input_gate is not None:
            joint = ReduceAddNorm(context, None, self.out_norm, factor, part_norms=self.out_norms)
            self.blocks += (Block(joint, self.input_gate, mixes=False, operations=range(end, end + 2)),)
            self.norms["post_per_layer_input_norm"] = self.out_norm = make_norm(context, is_after=True)
            self.out_norms = ()

    def forward(self, stream: Stream, step: ForwardStep, tap: torch.Tensor | None = None) -> Stream:
        """The stream after this layer; on one rank, in the last layer, of the tokens that the step wants alone. tap
        [T, hidden]: becomes the stream before it."""
        if not self.blocks[0].mixes:
            stream = stream.of(step.wanted)
        for block in self.blocks:
            if not stream.num_rows:
                break
            plan: LayerPlan = (self.plans if step.adapters is None else self.adapted_plans)[stream.num_rows]
            first, last = block.ends(plan)
            if plan.is_complete and first.norm:
                x = residual = block.reduce_norm.add(stream)
            else:
                x, residual = block.reduce_norm(stream, first.rounded)
            if tap is not None and block is self.blocks[0]:
                tap.copy_(block.reduce_norm.complete(residual))
            if block.mixes:
                residual = wanted_rows(residual, step.wanted)
            rows = None if block.mixes else step.wanted
            if plan.is_complete:
                norm = block.reduce_norm.row_norm if first.norm else None
                block.compute(x, Call(step, rows, norm, residual))
                stream = Stream(residual)
            else:
                stream = Stream(residual, block.compute(x, Call(step, rows)), last.is_early)
        return stream

    def checkpoint_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        for name, norm in self.norms.items():
            yield from norm.checkpoint_weights(f"{prefix}.{name}")
        if self.scalar is not None:
            yield from self.scalar.checkpoint_weights(f"{prefix}.layer_scalar")
        name = getattr(self.self_attn, "checkpoint_name", "self_attn")
        yield from self.self_attn.checkpoint_weights(f"{prefix}.{name}")
        yield from self.mlp.checkpoint_weights(f"{prefix}.mlp")
        if self.input_gate is not None:
            yield from self.input_gate.checkpoint_weights(prefix)


def taken_in(context: ModelContext, norm: RowNorm | None, before: DecoderLayer | None) -> ReduceAddNorm:
    """ReduceAddNorm that takes in the result of the layer `before`, and has this norm of the stream."""
    multiplier = context.config.residual_multiplier
    if before is None:
        return ReduceAddNorm(context, norm, None, multiplier)
    return ReduceAddNorm(context, norm, before.out_norm, multiplier, before.scalar, before.out_norms)


class DecoderForCausalLM(WeightedModule):
    """One rank's share of the model."""

    layers: list[DecoderLayer]

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.context, self.config = context, (config := context.config)
        tables = PositionTables.of(context)
        self.embed_tokens = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()  # type: ignore[assignment]  # a list that modules() walks
        before = None
        for spec in config.layers:
            self.layers.append(before := DecoderLayer(context, spec, tables, before))
        self._share_keys()
        self.layer_inputs = None if config.layer_inputs is None else LayerInputs(context)
        self.norm = taken_in(context, make_norm(context, is_last=True), before)
        self.group = context.group
        self.lm_head = self.embed_tokens
        if not config.tie_word_embeddings:
            sizes = (config.vocab_size, config.hidden_size)
            self.lm_head = VocabParallelEmbedding(context, *sizes, config.head_precision)
        self._embedding_multiplier = config.embedding_multiplier
        if config.rounds_embedding_multiplier:
            self._embedding_multiplier = torch.tensor(config.embedding_multiplier, dtype=context.dtype).item()

    def _share_keys(self) -> None:
        """Has each layer that has keys of its own hand them to those that share them."""
        keepers: dict[int | None, Any] = {}
        for spec, layer in zip(self.config.layers, self.layers, strict=True):
            if spec.shares_keys:
                keepers[spec.window].readers += (layer.self_attn,)
            elif spec.mixer == "attention":
                keepers[spec.window] = layer.self_attn

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Token ids int32 [T] -> [T, hidden], a partial sum."""
        x = self.embed_tokens.embed(input_ids)
        if self.config.embedding_norm:  # zeros, of tokens that other ranks have, stay
            x = rms_norm(x, x.shape[-1:], eps=self.config.norm_eps)
        return x if self._embedding_multiplier == 1.0 else x.mul_(self._embedding_multiplier)

    def forward(self, input_ids: torch.Tensor, step: ForwardStep, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids int32 [T] -> final hidden states [T, hidden], normalised and complete on every rank; of the tokens
        `wanted`, int [N], alone [N, hidden].

        Of a prompt only the last token is sampled from, and what the last layer does after its attention goes nowhere
        else: one rank leaves it out for the others. (With several, rows of the residual stream are not all here, and a
        model that drafts may need what comes of all.)
        """
        embedded, is_alone = self.embed(input_ids), self.group.size == 1
        stream = Stream(embedded) if is_alone else Stream(None, embedded)
        if self.layer_inputs is not None:
            embedded, inputs = self.layer_inputs(input_ids, stream)
            stream, step = Stream(embedded), replace(step, layer_inputs=inputs)
        *layers, last = self.layers
        tap, before_last = step.taps.get(len(self.layers)), step.taps.get(len(layers))
        leaves_out = is_alone and tap is None and (before_last is None or last.blocks[0].mixes)
        for number, layer in enumerate(layers):
            stream = layer(stream, step, step.taps.get(number))
        stream = last(stream, replace(step, wanted=wanted) if leaves_out else step, before_last)
        hidden = self.norm(stream)[0]
        if tap is not None:
            tap.copy_(hidden)
        return hidden if leaves_out else wanted_rows(hidden, wanted)

    @property
    def takes_halves(self) -> bool:
        """Whether steps may be cut in two (forward_two_batch): no layer needs the embedding complete."""
        return self.layer_inputs is None

    def forward_two_batch(
        self, input_ids: torch.Tensor, steps: tuple[ForwardStep, ForwardStep], wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """forward for many tokens on several ranks, cut into two halves (parallel/two_batch.py)."""
        first, second = input_ids.split([step.positions.shape[0] for step in steps])
        blocks = [(block.reduce_norm, block.compute) for layer in self.layers for block in layer.blocks]
        halves, calls = (self.embed(first), self.embed(second)), (Call(steps[0]), Call(steps[1]))
        return wanted_rows(run_micro_batches(halves, calls, blocks, self.norm), wanted)

    def plans(self, num_rows: int) -> list[LayerPlan]:
        """Kernel plan of each layer for so many tokens."""
        return [layer.plans[num_rows] for layer in self.layers]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, hidden] -> logits [B, this rank's part of the padded vocabulary]."""
        logits, cap = self.lm_head.logits(hidden), self.config.logits_softcap
        if self.config.logits_multiplier != 1.0:
            logits.mul_(self.config.logits_multiplier)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def num_weights(self) -> int:
        """Number of weights on this rank that a token is multiplied by, in all layers."""
        return sum(one.num_weights for layer in self.layers for one in layer.operations)

    def mixers(self) -> Sequence[Mixer]:
        """Layers' mixers, which keep memory of rows."""
        return [layer.self_attn for layer in self.layers]

    def attention_layers(self) -> list[PagedAttention]:
        """Mixers, and parts of mixers, that ask the attention backend."""
        parts = (part for layer in self.layers for part in layer.self_attn.modules())
        return [part for part in parts if isinstance(part, PagedAttention)]

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Context in which the model has two layers of each signature. They launch every kernel that all would: layers
        of one signature differ in their weights alone, but a prompt leaves rows out of the last one."""
        layers, found = self.layers, Counter[Hashable]()
        kept = nn.ModuleList()
        for layer in layers:
            found[layer.signature] += 1
            if found[layer.signature] <= 2:
                kept.append(layer)
        self.layers = kept  # type: ignore[assignment]
        try:
            yield
        finally:
            self.layers = layers

    def checkpoint_weights(self, prefix: str = "model") -> Iterator[CheckpointWeight]:
        """All tensors by their names in the checkpoint (of one whose names are stripped; see CheckpointNames)."""
        return in_checkpoint(self._canonical_weights(prefix), self.config)

    def _canonical_weights(self, prefix: str) -> Iterator[CheckpointWeight]:
        yield from self.embed_tokens.checkpoint_weights(f"{prefix}.embed_tokens")
        if self.layer_inputs is not None:
            yield from self.layer_inputs.checkpoint_weights(prefix)
        for index, layer in enumerate(self.layers):
            yield from layer.checkpoint_weights(f"{prefix}.layers.{index}")
        assert self.norm.norm is not None
        yield from self.norm.norm.checkpoint_weights(f"{prefix}.norm")
        if self.lm_head is not self.embed_tokens:
            yield from self.lm_head.checkpoint_weights("lm_head")
