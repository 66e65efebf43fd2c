"""Limits in bytes, read off measurements, that choose the way of a sum of rows over the ranks.

One-shot moves (world-1) x bytes out of each rank in one hop, two-shot (with the residual left with its owners)
2 (world-1)/world x bytes in two hops of about 2 us each. Measured on H200s, us of sum, residual and norm:

    ranks  hidden    rows      KiB   one-shot  two-shot  NCCL + norm
    2      4096       128    1,024        7.6  8.4, 6.7           -
    2      4096       256    2,048       11.2  11.1, 10.8       32.8
    2      4096       512    4,096       19.3  15.7, 20.3       38.9
    2      5120       256    2,560       14.7      14.2         34.5
    2      5120     8,192   81,920          -       324          390
    4      5120        64      640       12.7  14.2, 8.5        20.0
    4      5120       192    1,920          -  18.9, 14.0          -
    4      5120       256    2,560       32.2  21.6, 17.1       35.3
    4      4096        64      512        9.8      10.4         19.5
    4      4096       256    2,048       25.4      16.5         32.4
    4      1024       256      512        8.9       7.5         19.3
    4      1024       512    1,024       14.6       9.7         23
    4      5120     8,192   81,920          -       452          479

(Two figures of two-shot: with whole rows, and with rows cut in four, parallel/peer/two_shot.py.) With whole rows
two ranks meet at 2 MiB; interpolated between its rows, four meet at 880 (hidden 5120), 610 (4096) and 300 KiB
(1024): 640 KiB, and 128 rows, one for each program, beyond which the second row waits for the first. With rows cut
two meet near 1 MiB and four near 160 KiB. For eight ranks computed from 380 GB/s a link: 145 KB. Two-shot leads
NCCL as far as it was measured.
"""

PEER_BYTES = 80 << 20
"""Bytes above which a sum is left to NCCL. Halves of a step that are larger are not cut (parallel/two_batch.py): the
block holds four times as much for them."""
_ONE_SHOT_BYTES = {2: (2 << 20, 1 << 20), 4: (640 << 10, 160 << 10), 8: (144 << 10, 144 << 10)}
"""Maximum bytes of a one-shot sum over up to so many ranks, where two-shot takes whole rows and where it cuts them."""
_ROUNDED_BYTES = 3 << 20
"""Limit over two ranks where the sum rounds to e4m3, which two-shot sums cannot: a step of 128 rows of 32B takes 9,750
us so, and 10,430 with two-shot sums and kernels that round; of 224 rows 15,030 and 16,220."""
_ONE_SHOT_ROWS = 128
"""Rows up to which three or more ranks sum in one shot."""
_CUT_ROWS = 256
"""Rows up to which columns are cut; with more, whole rows occupy the chip."""
_LEAST_CUT_BYTES = 4096
"""Least bytes of a row whose columns are cut: parts of shorter rows were not measured."""


def _one_shot_bytes(world_size: int) -> tuple[int, int]:
    return next(both for ranks, both in _ONE_SHOT_BYTES.items() if world_size <= ranks)


def cut_rows(world_size: int, row_bytes: int) -> int:
    """Maximum rows of `row_bytes` that two-shot sums take in four parts; 0: none. Where so many rows are still best
    summed in one shot, there is nothing to cut."""
    whole, cut = _one_shot_bytes(world_size)
    can = cut < whole and row_bytes >= _LEAST_CUT_BYTES and row_bytes % 64 == 0  # 16 bytes a part
    return _CUT_ROWS if can and _CUT_ROWS * row_bytes >= whole else 0


def one_shot_rows(world_size: int, row_bytes: int, rounds: bool = False) -> int:
    """Maximum rows of `row_bytes` for the one-shot kernel, over 2 to 8 ranks. rounds: it rounds them to e4m3."""
    if rounds and world_size <= 2:
        return _ROUNDED_BYTES // row_bytes
    whole, cut = _one_shot_bytes(world_size)
    rows = (cut if cut_rows(world_size, row_bytes) else whole) // row_bytes
    return rows if world_size <= 2 else min(rows, _ONE_SHOT_ROWS)
