"""Lines of a step's rows: from their numbers, which the host knows, to their places in memory, which move where drafts
are verified (`take_draws`)."""

import torch

from nanovllm.kernels.base.triton_import import tl, triton
from nanovllm.kernels.step.state import DeviceState, StepBuffers
from nanovllm.wire.step import NO_LINE

_NO_LINE = tl.constexpr(NO_LINE)


@triton.jit
def copy_lines(LINES, OF_LINES, SPARE, given, row, num_rows, out_row, place, decodes, inside, live, lines_stride,
               padding_line):  # fmt: skip
    """LINES int32 [7, lines_stride] of output rows `out_row`, from those that a packed step has at `given` for its
    `num_rows` rows; see StepBuffers. OF_LINES, SPARE: places_of_lines and spare_places, if any, of which a decode
    writes one in each place, and reads the one of the place before. decodes: whether rows are decodes. Rows of padding
    read zeros and write line padding_line."""
    for number in tl.static_range(4):
        none = padding_line if number == 1 else (0 if number == 3 else _NO_LINE)
        word = tl.load(given + number * num_rows + row, mask=live, other=0)
        word = tl.where(live, word - (number < 3), none)
        if OF_LINES is not None:
            if number > 0:
                tl.store(LINES + (3 + number) * lines_stride + out_row, word, mask=inside)
            if number > 1:
                word = tl.where(decodes, none, word)
            if number < 3:
                has_line = live & (word >= 0)
                word = tl.where(has_line, tl.load(OF_LINES + word, mask=has_line, other=0), word)
            if number < 2:
                is_spare = live & decodes & (place >= 1 - number)
                word = tl.where(is_spare, tl.load(SPARE + out_row - 1 + number, mask=is_spare, other=0), word)
        tl.store(LINES + number * lines_stride + out_row, word, mask=inside)


def place_lines_reference(
    state: DeviceState, out: StepBuffers, lines: torch.Tensor, where: torch.Tensor, num_decodes: int, places: int
) -> None:
    """Writes out.lines: of the rows `where`, of which decodes come first, of the output's first num_decodes; lines int
    [4, rows] by number. Others are padding."""
    padding = torch.tensor([NO_LINE, state.num_lines, NO_LINE, 0], dtype=torch.int32, device=lines.device)
    out.lines[:4] = padding[:, None]
    if state.places_of_lines is not None and state.spare_places is not None:
        out.lines[4:] = padding[1:, None]
        out.lines[4:, where] = lines[1:]
        rows = where[where < num_decodes]
        lines[2:, : len(rows)] = padding[2:, None]
        found = lines[:3]
        found[found >= 0] = state.places_of_lines[found[found >= 0].long()]
        later = rows % places > 0
        found[1, : len(rows)] = state.spare_places[rows]
        found[0, : len(rows)] = torch.where(later, state.spare_places[(rows - 1).clamp(min=0)], found[0, : len(rows)])
    out.lines[:4, where] = lines
