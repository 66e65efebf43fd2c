"""Whether a kernel can multiply by a weight, and why not. No torch."""

from nanovllm.kernels.plan.config import FP8, INT4, KERNELS, LIBRARY, PACKED, SHARED_BYTES, SUMMED, Gemm, GemmConfig
from nanovllm.kernels.plan.device import Device
from nanovllm.kernels.plan.product import Product

NORM_COLUMNS = 32
"""Maximum columns of tensor cores' right operand, rows of x in as many steps, that "stream" norms itself in 16 bits."""


def refusal(product: Product, rows: int, config: GemmConfig, device: Device, world: int) -> str:
    """Reason why `config` cannot multiply so many rows of this product on a device, as one of so many ranks; "" where
    it can. It is the one bound of plans; tables, which know no product, have `why_not` of it."""
    if config.parts > 1 and not product.around.adds_parts:
        return f"its consumer adds up no parts of a sum, {config.kernel!r} makes {config.parts}"
    if product.dtype == FP8 and device.is_cuda and not device.has_tma and config != LIBRARY:
        return f"e4m3 is multiplied on compute capability 9.x and 10.x alone, not {device.capability}"
    if config.kernel == "stream":
        if product.dtype in PACKED and product.x_dtype == "float32":
            return "weights of 4 and 8 bits for few rows take 16-bit numbers, not float32"
        whole = 32 if product.around.after == "gate" else 16
        if product.scale_rows is not None and (product.scale_rows % 16 or product.n % whole):
            return f"{product.n} weight rows, {product.scale_rows} of which share scales, are no whole 16s that do"
    if config.kernel == "roles":
        if product.is_adapted:
            return "it adds nothing that adapters do"
        if not device.has_roles:
            return f"kernels with roles run on compute capability 9.0, not {device.capability}"
        if product.scale_rows is not None and product.scale_rows % config.block_n:
            return f"{product.scale_rows} weight rows share scales, a tile has {config.block_n}"
    normed_rows = rows if norms_inside(product, world) else 0
    return why_not(product.gemm(world), config, rows, device.has_tma, normed_rows)


def norms_inside(product: Product, world: int) -> bool:
    """Whether a skinny kernel would compute the norm before this product."""
    before = product.around.before
    return (before == "own rms" or (world == 1 and before == "rms")) and not product.has_bias


def why_not(gemm: Gemm, config: GemmConfig, rows: int = 1, tma: bool = True, normed_rows: int = 0) -> str:
    """Reason why `config` cannot multiply so many rows by this weight; "" where it can. tma: the device has tensor copy
    engines. normed_rows: rows of which a skinny kernel computes the norm too."""
    kernel, k, paired = config.kernel, gemm.k, gemm.kind == "gate_up"
    if kernel == "library":
        return ""
    most_rows = 1 if gemm.dtype == INT4 and kernel == "stream" else KERNELS[kernel].most_rows
    if rows > most_rows:
        return f"it takes at most {most_rows} rows, not {rows}"
    if config.max_registers and not (config.is_skinny and 32 <= config.max_registers <= 255):
        return f"max_registers={config.max_registers}: must be 0, or 32 to 255 of a thread of fma or stream"
    if gemm.dtype not in KERNELS[kernel].dtypes:
        return f"{kernel!r} does not multiply by weights of {gemm.dtype}"
    multiple = 16 if gemm.dtype == FP8 else 1 if gemm.dtype in PACKED or kernel == "split" else 8
    if k % multiple:
        return f"K={k}: must be a multiple of {multiple} for weights of {gemm.dtype}"
    if config.parts > 1 and gemm.kind not in SUMMED:
        return f"the consumer of {gemm.kind} takes no parts of a sum"
    if gemm.dtype == FP8 and (config.block_k % 128 or 128 % config.block_n):
        return f"block_k={config.block_k}, block_n={config.block_n}: must be steps of 128, and of rows in a block"
    if kernel == "split":
        return "" if config.split_k > 1 and k % config.split_k == 0 else f"K={k} has no {config.split_k} equal parts"
    if kernel == "stream":
        if gemm.dtype == INT4:
            return why_not_row(k, paired, config)
        columns = stream_columns(gemm.dtype)
        reason = why_not_stream(columns, config)
        is_wide_norm = normed_rows > 0 and gemm.dtype != FP8
        return why_not_norm(normed_rows, k, paired, columns, config) if is_wide_norm and not reason else reason
    if kernel == "fma":
        if config.split_k > 1:
            return "it takes no parts of K"
        too_few = paired and config.block_n < 2 * config.num_warps
        return "a warp has one weight row; gate and up need two" if too_few else ""
    if config.split_k > -(-k // (128 if gemm.dtype in PACKED else config.block_k)):
        return f"split_k={config.split_k} leaves a part without columns, K={k}"
    if kernel in ("tile", "roles") and not tma:
        return "the device has no tensor copy engine"
    return _why_not_roles(paired, config) if kernel == "roles" else ""


def stream_columns(dtype: str) -> int:
    """Columns of a group of weights of this type, of which a warp of "stream" takes one or two in a step."""
    return 128 if dtype == FP8 or dtype in PACKED else 64


def why_not_stream(columns: int, config: GemmConfig) -> str:
    """Reason why "stream" cannot multiply by weights in groups of so many columns with these numbers; "" where it can.
    """
    widths = (columns * config.num_warps, 2 * columns * config.num_warps)
    fits = config.block_n == 16 and config.block_k in widths and config.split_k == 1
    reason = f"must have 16 weight rows, a warp for each {columns} or {2 * columns} columns of a step, no parts of K"
    return "" if fits else f"{config}: {reason}"


def why_not_norm(rows: int, k: int, paired: bool, columns: int, config: GemmConfig) -> str:
    """Reason why "stream" cannot norm so many rows itself before it multiplies by weights in groups of so many columns;
    "" where it can. paired: with SiLU(gate) * up. Registers hold all of x, its gain, and the weights in flight: past
    these limits the compiler spills them, up to 9 KB a thread."""
    steps, wide = -(-k // config.block_k), config.block_k // (columns * config.num_warps)
    held = steps * wide * (columns // 64) << (rows - 1).bit_length()
    flying = min(config.stages, steps) * wide * (2 if paired else 1)
    if held <= NORM_COLUMNS and flying <= 8 and config.num_warps <= 8:
        return ""
    needs = f"{held} columns of x and {flying} steps of weights in {config.num_warps} warps"
    return f"K={k}: registers do not hold {needs}, at most {NORM_COLUMNS}, 8 and 8 with the norm of {rows} rows"


def rounds_inside(rows: int, k: int, has_static_inputs: bool) -> bool:
    """Whether "stream" rounds rows to e4m3 itself: one, not so long that every program had much to round."""
    return rows == 1 and k <= 8192 and not has_static_inputs


def _why_not_roles(paired: bool, config: GemmConfig) -> str:
    sums = config.block_m // (16 * max(1, config.num_warps)) * (2 if paired else 1) * config.block_n
    tiles = config.block_m in (64, 128, 256) and config.block_n in ((128,) if paired else (64, 128)) and sums <= 256
    if not tiles or config.block_k != 128 or config.num_warps != (4 if config.block_m == 64 else 8):
        return f"{config}: must have 64, 128 or 256 rows, 4 warps for 64 and 8 for more, and sums that registers hold"
    nbytes = config.stages * (128 * (config.block_m + config.block_n * (2 if paired else 1)) + 4 * config.block_m + 16)
    nbytes += 128 * 64 * config.num_warps // 4 if paired else 0  # results on their way to another order
    return "" if nbytes <= SHARED_BYTES else f"{config} needs {nbytes} bytes of shared memory"


def why_not_row(k: int, paired: bool, config: GemmConfig) -> str:
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
