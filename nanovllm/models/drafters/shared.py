"""Bases of the methods' classes: a rank's share of a model that drafts, and its work after a step whose tokens are
known: it takes the step in, and drafts what may follow."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from nanovllm.attention.base import AttentionBackend, AttentionMetadata
from nanovllm.config import EngineConfig
from nanovllm.errors import is_integer, refuse
from nanovllm.kernels.pointwise.norm import add_up
from nanovllm.kernels.sampling.gumbel import Draws
from nanovllm.kernels.step.state import DeviceState, DraftRows, StepBuffers
from nanovllm.layers.attention import PagedAttention
from nanovllm.layers.context import ModelContext
from nanovllm.layers.linear import RowParallelLinear
from nanovllm.layers.step import OUTSIDE, ForwardStep
from nanovllm.layers.vocab import VocabParallelEmbedding
from nanovllm.layers.weights import CheckpointWeight, WeightedModule
from nanovllm.model_config import DrafterConfig

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def check_taps(name: str, layers: Any, low: int, high: int) -> tuple[int, ...]:
    """The entry of that name, a list of layers. Raises ValueError where it is none of ascending ones in low..high."""
    numbers = isinstance(layers, list) and all(is_integer(layer) and low <= layer <= high for layer in layers)
    if not numbers or not layers or sorted(set(layers)) != layers:
        refuse(name, layers, f"ascending numbers from {low} to {high}, below the target's layers")
    return tuple(layers)


class Drafter(WeightedModule, ABC):
    """One rank's share of a model that drafts. It reads the residual streams of some of the target's layers, `fc` of
    them, and drafts ids of a vocabulary of its own or of the target's."""

    offsets: torch.Tensor
    """int64 [vocab_size]: of the target's ids to those that it drafts."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """[N, hidden] -> [N, this rank's ids, padding at the end]; by a head of its own or the target's."""
    vocab_start: int
    """First of this rank's ids."""

    def __init__(self, context: ModelContext, settings: DrafterConfig, target: Any, columns: int | None = None) -> None:
        """settings: those of context.config. target: the DecoderForCausalLM that it drafts for. columns: of `fc`, other
        than those of what it reads."""
        super().__init__()
        config, width = context.config, target.config.hidden_size
        self._group, self._kernels, self._dtype = context.group, context.kernels, context.dtype
        self._shares_width = config.hidden_size == width  # as peer memory was laid out for
        embedding = target.embed_tokens
        if EMBEDDING in settings.tensors:
            self.embed_tokens = embedding = VocabParallelEmbedding(context, config.vocab_size, config.hidden_size)
        self._embed = embedding.embed
        self.fc = RowParallelLinear(context, columns or width * len(settings.taps), config.hidden_size)
        self.offsets = torch.zeros(settings.vocab_size, dtype=torch.int64, device=context.device)

    def taken_in(self, taps: torch.Tensor) -> torch.Tensor:
        """Residual streams [T, taps * hidden of the target] -> [T, hidden], whole on every rank."""
        if taps.shape[1] != (size := self.fc.product.k):  # a rank's share, or padded
            taps = taps[:, self._group.rank * size :][:, :size]
            taps = pad(taps, (0, size - taps.shape[1])).contiguous()
        return self._sum(self.fc(taps, OUTSIDE))

    @abstractmethod
    def attention_layers(self) -> Sequence[PagedAttention]:
        """Layers of its own, which keep keys and values in the blocks of the target's."""

    def checkpoint_weights(self, prefix: str = "") -> Iterator[CheckpointWeight]:
        """All tensors by the names that `canonical` gives them."""
        if hasattr(self, "embed_tokens"):
            yield from self.embed_tokens.checkpoint_weights("embed_tokens")
        yield from self.fc.checkpoint_weights("fc")

    def check(self) -> None:
        """Raises ValueError for loaded tensors that it cannot draft with."""

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The ranks' partial sum [T, hidden], or parts of one, whole on every rank."""
        peers = self._group.fused_all_reduce(partial.shape[-2]) if self._shares_width else None
        if peers is not None:
            return peers.all_reduce(partial)
        if partial.dim() == 3:
            partial = add_up(partial, self._dtype, self._group.exact_bits == "tp")
        return self._group.all_reduce(partial) if self._group.size > 1 else partial


class ModelDrafter(ABC):
    """A model that drafts, and the tensors that it works on. `see` and then `draft` read nothing on the host that a
    captured graph could not know, but for the attention backend."""

    rows: DraftRows
    taps: torch.Tensor
    """[tokens, taps * hidden of the target]: residual streams of a step."""

    def __init__(self, model: Any, config: EngineConfig, context: ModelContext, backend: AttentionBackend) -> None:
        """model: the Drafter. context: what its target was built with."""
        assert context.config.drafter is not None and config.speculation is not None and config.kvcache_block_size
        self.model, self.settings, self._context, self._backend = model, context.config.drafter, context, backend
        self._kernels, self._group, self._max_model_len = context.kernels, context.group, context.max_model_len
        self.max_num_seqs, self._num_drafts = config.max_num_seqs, config.speculation.num_tokens
        self.most_rows, self._block_size = config.most_drafting, config.kvcache_block_size

    def allocate(self, max_tokens: int) -> None:
        """Buffers of steps of at most so many tokens."""
        width, dtype, device = self._context.config.hidden_size, self._context.dtype, self._context.device
        self.taps = torch.zeros(max_tokens, len(self.settings.taps) * width, dtype=dtype, device=device)
        self.rows = DraftRows.allocate(self.max_num_seqs, self.settings.model.hidden_size, dtype, device)
        most_tokens = max(self.max_num_seqs, self.most_rows * (1 + self._num_drafts))
        self._starts = torch.arange(most_tokens + 1, dtype=torch.int32, device=device)

    def taps_of(self, num_tokens: int) -> dict[int, torch.Tensor]:
        """Tensors in which a step of so many tokens leaves residual streams, by layer."""
        parts = self.taps[:num_tokens].chunk(len(self.settings.taps), 1)
        return dict(zip(self.settings.taps, parts, strict=True))

    def see(
        self, packed: torch.Tensor, state: DeviceState, buffers: StepBuffers, step: ForwardStep, num_rows: int
    ) -> None:
        """Makes an entry of each token of a step, int32 words, after take_draws. num_rows: rows that may have gained a
        token, at most."""
        hidden = self.model.taken_in(self.taps[: buffers.next_ids.shape[0]])
        # Right before what reads the ids, which waits for its end: kernels behind that may start early.
        self._kernels.follow_rows(
            packed, self.max_num_seqs, state, buffers, self.rows, step.attention.num_decode_rows, self._block_size,
            self._max_model_len,
        )  # fmt: skip
        self._enter(hidden, buffers, step, min(num_rows, self.max_num_seqs))

    @abstractmethod
    def _enter(self, hidden: torch.Tensor, buffers: StepBuffers, step: ForwardStep, num_rows: int) -> None:
        """Makes the entries of a step's tokens from what the model has taken in [T, hidden], which it may overwrite."""

    @abstractmethod
    def draft(self, state: DeviceState, num_rows: int) -> None:
        """Drafts state.drafts for the first `num_rows` of `rows`, at most most_rows, padding or not."""

    def _take(self, logits: torch.Tensor, state: DeviceState, place: int, table: int = 0) -> None:
        """Draws draft number `place` of the rows from logits [N, this rank's ids], and moves the rows on to the next
        position, whose key goes into blocks of that table."""
        rows, num_rows = self.rows, logits.shape[0]
        draws = Draws(rows.row_slot[:num_rows], state.temperature, state.seed, rows.sample_positions[:num_rows])
        model = self.model
        keys = self._kernels.gumbel_argmax(logits, draws, model.vocab_start, len(model.offsets), model.offsets)
        if self._group.size > 1:
            keys = self._group.all_reduce_max(keys)
        self._kernels.place_drafts(keys, rows, state, place, table, self._block_size)

    def _step(
        self, state: DeviceState, row_slot: torch.Tensor, positions: torch.Tensor, context_lens: torch.Tensor,
        slot_mappings: Iterable[torch.Tensor],
    ) -> ForwardStep:  # fmt: skip
        """A prepared step of one token for each row, int32 [rows] each."""
        num_rows = row_slot.shape[0]
        attention = AttentionMetadata(
            num_rows=num_rows, num_decode_rows=num_rows, row_slot=row_slot, context_lens=context_lens,
            cu_seqlens_q=self._starts[: num_rows + 1], block_tables=state.block_table.unbind(1), max_seqlen_q=1,
            max_context_len=self._max_model_len, num_tokens=num_rows, is_captured=True,
        )  # fmt: skip
        self._backend.prepare(attention)
        return ForwardStep(positions, tuple(slot_mappings), attention, self._backend)
