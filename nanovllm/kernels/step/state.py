"""Tensors of a rank: the state of running requests, and the inputs of a step."""

from dataclasses import dataclass, fields

import torch

from nanovllm.wire.state import ALIGNED


@dataclass
class DeviceState:
    """State of each running request that a rank keeps, by slot."""

    block_table: torch.Tensor
    """int32 [S, tables, table width]: the blocks of a row, by table."""
    last_token: torch.Tensor
    """int32 [S]: sampled last, or the last of what the row began with."""
    num_computed: torch.Tensor
    """int32 [S]: tokens whose keys and values are there: the position at which the row's next decode begins."""
    temperature: torch.Tensor
    """float32 [S]"""
    seed: torch.Tensor
    """int64 [S]"""
    num_lines: int = 0
    """Lines of memory of fixed size, after which comes one for rows of padding; 0: there are none."""
    places_of_lines: torch.Tensor | None = None
    """int32 [num_lines]: where each line is in the memory, with drafts; None: at its number."""
    spare_places: torch.Tensor | None = None
    """int32 [rows of decodes]: places of no line, behind them all, where decodes leave the state after each of their
    places until `take_draws` makes one that of the line."""
    drafts: torch.Tensor | None = None
    """int32 [S, k]: what may follow the last token of each slot, -1 where nothing is drafted; None: there are none.
    Then a step that computes a decode moves its slot on; else `take_draws` does (kernels/step/drafts.py)."""
    ids: torch.Tensor | None = None
    """int32 [blocks, block size]: ids of the tokens in the blocks of the first table, with drafts."""
    adapters: torch.Tensor | None = None
    """int32 [S]: slot of the row's adapter, -1: none; None: rows have none."""

    @classmethod
    def allocate(
        cls, max_num_seqs: int, num_tables: int, table_width: int, device: torch.device | str, num_lines: int = 0,
        num_drafts: int = 0, ids: torch.Tensor | None = None, has_adapters: bool = False, num_spare: int = 0,
    ) -> "DeviceState":  # fmt: skip
        places = torch.arange(num_lines + 1 + num_spare, dtype=torch.int32, device=device) if num_spare else None
        return cls(
            block_table=torch.zeros(max_num_seqs, num_tables, table_width, dtype=torch.int32, device=device),
            last_token=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            num_computed=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            temperature=torch.zeros(max_num_seqs, dtype=torch.float32, device=device),
            seed=torch.zeros(max_num_seqs, dtype=torch.int64, device=device), num_lines=num_lines, ids=ids,
            drafts=torch.full((max_num_seqs, num_drafts), -1, dtype=torch.int32, device=device) if num_drafts else None,
            adapters=torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device) if has_adapters else None,
            places_of_lines=None if places is None else places[:num_lines].clone(),
            spare_places=None if places is None else places[num_lines + 1 :].clone(),
        )  # fmt: skip


@dataclass
class StepBuffers:
    """Device inputs of one step of up to B rows and M tokens, and the tokens it samples."""

    row_slot: torch.Tensor
    """int32 [B]; -1: padding."""
    context_lens: torch.Tensor
    """int32 [B]: tokens that the row's last query sees; 0: padding. Also the index of the sampled token."""
    cu_seqlens_q: torch.Tensor
    """int32 [B + 1]: where each row's tokens start."""
    positions: torch.Tensor
    """int32 [M]; padding 0."""
    input_ids: torch.Tensor
    """int32 [M]; padding 0."""
    slot_mapping: torch.Tensor
    """int32 [tables, M]: slot in the flat cache by the blocks of each table; -1: padding."""
    logits_indices: torch.Tensor
    """int32 [B]: last token of each row that samples; 0 elsewhere."""
    lines: torch.Tensor
    """int32 [7, B]: places of the lines that a row reads, writes and keeps, and tokens before that
    (kernels/recurrent/rows.py); and, with drafts, the number of the line that it writes, that of the line that keeps,
    and tokens before that, which of decodes are not among the first four. Written where the state has lines."""
    tokens: torch.Tensor
    """int32 [B + 1]: that each row drew; written by the sampler, not here. One word more: see take_draws."""
    next_ids: torch.Tensor
    """int32 [M]: the token after each of the step; written by follow_rows, where a model drafts."""

    @classmethod
    def allocate(cls, max_rows: int, max_tokens: int, num_tables: int, device: torch.device | str) -> "StepBuffers":
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        mapping = zeros(num_tables, -(-max_tokens // ALIGNED) * ALIGNED)
        return cls(
            row_slot=zeros(max_rows), context_lens=zeros(max_rows), cu_seqlens_q=zeros(max_rows + 1),
            positions=zeros(max_tokens), input_ids=zeros(max_tokens), slot_mapping=mapping[:, :max_tokens],
            logits_indices=zeros(max_rows), lines=zeros(7, max_rows), tokens=zeros(max_rows + 1),
            next_ids=zeros(max_tokens),
        )  # fmt: skip

    def narrow(self, num_rows: int, num_tokens: int) -> "StepBuffers":
        """A view of these buffers, for a step of that many rows and tokens."""
        rows, tokens = num_rows, num_tokens
        return StepBuffers(
            row_slot=self.row_slot[:rows], context_lens=self.context_lens[:rows],
            cu_seqlens_q=self.cu_seqlens_q[: rows + 1], positions=self.positions[:tokens],
            input_ids=self.input_ids[:tokens], slot_mapping=self.slot_mapping[:, :tokens],
            logits_indices=self.logits_indices[:rows], lines=self.lines[:, :rows], tokens=self.tokens[:rows],
            next_ids=self.next_ids[:tokens],
        )  # fmt: skip

    def token_adapters(self, of_slots: torch.Tensor) -> torch.Tensor:
        """int32 [M]: of_slots int32 [S] of each token's row, -1 for padding. Reads nothing on the host."""
        token = torch.arange(self.positions.shape[0], dtype=torch.int32, device=of_slots.device)
        row = torch.searchsorted(self.cu_seqlens_q[1:], token, right=True)
        slot = torch.nn.functional.pad(self.row_slot, (0, 1), value=-1)[row]
        return torch.where(slot < 0, -1, of_slots[slot.clamp(min=0)])

    @property
    def sample_positions(self) -> torch.Tensor:
        """int32 [B]: index in its sequence of each row's sampled token, which equals the length of its context."""
        return self.context_lens


@dataclass
class DraftRows:
    """Rows for which a model drafts, of up to B: their entries, and their tokens on the way (step/model_drafts.py)."""

    slot: torch.Tensor
    """int32 [B], as all but the last two; -1: none."""
    index: torch.Tensor
    """The row's last entry among the tokens of the step."""
    latest: torch.Tensor
    """The last position for which the row has a block, within the model's length."""
    row_slot: torch.Tensor
    """`slot`, or -1 where the row has ended, or may have no drafts."""
    positions: torch.Tensor
    sample_positions: torch.Tensor
    """Index in its sequence of the token that is drafted."""
    context_lens: torch.Tensor
    input_ids: torch.Tensor
    slot_mapping: torch.Tensor
    num_drafted: torch.Tensor
    """int32 [1]: tokens drafted in this step."""
    hidden: torch.Tensor
    """[2, B, hidden]: of each row's last entry what the head takes, and what the next entry takes."""

    @classmethod
    def allocate(cls, rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str) -> "DraftRows":
        columns = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(9))
        named = dict(zip((field.name for field in fields(cls)), columns, strict=False))
        return cls(
            **named, num_drafted=torch.zeros(1, dtype=torch.int32, device=device),
            hidden=torch.zeros(2, rows, hidden_size, dtype=dtype, device=device),
        )  # fmt: skip
