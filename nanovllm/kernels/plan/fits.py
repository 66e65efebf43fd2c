"""Whether a kernel can multiply by a weight, and why not. No torch."""

from nanovllm.kernels.plan.config import FP8, INT4, ITEM_SIZES, SHARED_BYTES, SUMMED, Gemm, GemmConfig


def misfit(gemm: Gemm, config: GemmConfig, tma: bool = True) -> str:
    """Reason why `config` cannot multiply by this weight; "" where it can. tma: the device has tensor copy engines."""
    k = gemm.k
    if config.kernel == "library":
        return ""
    takes: dict[str, tuple[str, ...]] = {"roles": (FP8,), "int4": (INT4,), "int4_whole": (INT4,)}
    takes["stream"] = (INT4, FP8, "bfloat16", "float16")
    if gemm.dtype not in takes[config.kernel] if config.kernel in takes else gemm.dtype == INT4:
        return f"{config.kernel!r} does not multiply by weights of {gemm.dtype}"
    if gemm.dtype == FP8:
        reason = _fp8_misfit(gemm, config)
        if reason:
            return reason
    if config.parts > 1 and gemm.kind not in SUMMED:
        return f"the consumer of {gemm.kind} takes no parts of a sum"
    if config.kernel == "split":
        return "" if config.split_k > 1 and k % config.split_k == 0 else f"K={k} has no {config.split_k} equal parts"
    if gemm.dtype == INT4:
        if config.kernel == "stream":
            return row_misfit(k, gemm.kind == "gate_up", config)
        left_out = config.split_k > -(-k // 128)
        return f"split_k={config.split_k} leaves a part without columns, K={k}" if left_out else ""
    if gemm.dtype != FP8 and (gemm.dtype not in ITEM_SIZES or k % 8):
        return f"dtype {gemm.dtype} and K={k}: our kernels take {', '.join(ITEM_SIZES)} and multiples of 8"
    if config.kernel == "stream":
        return "" if gemm.dtype == FP8 else _stream_misfit(64, config)
    if config.kernel in ("tile", "roles"):
        if config.split_k > -(-k // config.block_k):
            return f"split_k={config.split_k} leaves a part without columns, K={k}"
        return "" if tma else "the device has no tensor copy engine"
    if config.kernel == "fma" and config.split_k > 1:
        return "it takes no parts of K"
    if config.kernel == "fma" and gemm.kind == "gate_up" and config.block_n < 2 * config.num_warps:
        return "a warp has one weight row; gate and up need two"
    return ""


def _fp8_misfit(gemm: Gemm, config: GemmConfig) -> str:
    kernels = ("tile", "roles", "stream")
    if config.kernel not in kernels or gemm.k % 16:
        return f"K={gemm.k} by {config.kernel!r}: FP8 has {kernels}, for multiples of 16"
    if config.block_k % 128 or 128 % config.block_n:
        return f"block_k={config.block_k}, block_n={config.block_n}: must be steps of 128, and of rows in a block"
    if config.kernel == "tile":
        return ""
    if config.kernel == "roles":
        return _roles_misfit(gemm.kind == "gate_up", config)
    return _stream_misfit(128, config)


def _stream_misfit(columns: int, config: GemmConfig) -> str:
    fits = config.block_n == 16 and config.block_k == columns * config.num_warps and config.split_k == 1
    reason = f"must have 16 weight rows, a warp for each {columns} columns of a step, no parts of K"
    return "" if fits else f"{config}: {reason}"


def _roles_misfit(paired: bool, config: GemmConfig) -> str:
    sums = config.block_m // (16 * max(1, config.num_warps)) * (2 if paired else 1) * config.block_n
    tiles = config.block_m in (64, 128, 256) and config.block_n in ((128,) if paired else (64, 128)) and sums <= 256
    if not tiles or config.block_k != 128 or config.num_warps != (4 if config.block_m == 64 else 8):
        return f"{config}: must have 64, 128 or 256 rows, 4 warps for 64 and 8 for more, and sums that registers hold"
    nbytes = config.stages * (128 * (config.block_m + config.block_n * (2 if paired else 1)) + 4 * config.block_m + 16)
    nbytes += 128 * 64 * config.num_warps // 4 if paired else 0  # results on their way to another order
    return "" if nbytes <= SHARED_BYTES else f"{config} needs {nbytes} bytes of shared memory"


def row_misfit(k: int, paired: bool, config: GemmConfig) -> str:
    """Reason why "stream" cannot multiply by weights of 4 bits; "" where it can. paired: with SiLU(gate) * up."""
    if config.block_n not in ((32, 64) if paired else (16, 32, 64)):
        return f"block_n={config.block_n}: must be 1, 2 or 4 tiles of 16 weight rows; gate and up need two"
    steps = -(-k // (128 * config.num_warps))
    if steps < 2 or config.block_k != 128 * config.num_warps:
        return f"K={k}: {config.num_warps} warps take steps of 128 columns each, and more than one"
    # x, words with scales of groups of 32 (the most), and the warps' sums
    nbytes = (2 * 128 << (steps - 1).bit_length()) + (config.stages + 1) * config.block_n * (64 + 16)
    nbytes = (nbytes + config.block_n * 32) * config.num_warps
    return "" if nbytes <= SHARED_BYTES else f"K={k}: {config} needs {nbytes} bytes of shared memory"
