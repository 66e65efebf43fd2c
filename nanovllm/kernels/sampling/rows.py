"""Inputs of the kernels for rows with sampling options."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Rows:
    """The G rows of a step that have sampling options, on one device. S = max_num_seqs, B = rows of the step."""

    logits: torch.Tensor
    """[any, >= vocab_size], last dimension contiguous."""
    rows: torch.Tensor
    """int32 [G]: each row's line of `logits`."""
    slots: torch.Tensor
    """int32 [G]: where its request lives."""
    records: torch.Tensor
    """int32 [G, RECORD_WORDS]: its options (wire/sampling.py)."""
    target_rows: torch.Tensor
    """int32 [G]: its row of the step."""
    temperature: torch.Tensor
    """float32 [S]"""
    seed: torch.Tensor
    """int64 [S]"""
    positions: torch.Tensor
    """int32 [B]: index in its sequence of the token that is sampled."""
    input_ids: torch.Tensor
    """int32 [tokens of the step]: those of decodes by row, of one decode one place after another."""
    tokens: torch.Tensor
    """int32 [B]: written at `target_rows`."""
    last_token: torch.Tensor
    """int32 [S]: written at `slots`."""
    vocab_size: int

    def __len__(self) -> int:
        return self.rows.shape[0]

    def part(self, which: slice) -> "Rows":
        """View of some of the rows."""
        own = {name: getattr(self, name)[which] for name in ("rows", "slots", "records", "target_rows")}
        return replace(self, **own)
