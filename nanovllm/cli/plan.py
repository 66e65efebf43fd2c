"""`nanovllm plan MODEL`: what a model takes of each GPU and how many users fit, from config.json and headers alone."""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.cli.options import Parser, add_fields, chosen, count
from nanovllm.config import MAX_TENSOR_PARALLEL_SIZE, EngineConfig
from nanovllm.errors import refuse
from nanovllm.model_config import ModelConfig
from nanovllm.models.files import CONFIGURATION, check_configuration, fetch
from nanovllm.models.registry import is_hub_id, read_model_config

if TYPE_CHECKING:
    from nanovllm.runner.footprint import Footprint, Gpu

_GIB = 1 << 30
_LENGTHS = (4096, 32768)


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm plan",
        description="Prints how much memory a model needs on each GPU and how many users fit, for 1, 2, 4 and 8 ranks "
        "or -tp N. Needs no GPU and no weights. Takes the engine's options (nanovllm serve --help).",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with config.json, a hub id, or a shape's name")
    parser.add_argument("--gpu", default="H200", metavar="X", help="its name, or the GiB of one like it [H200]")
    parser.add_argument("--length", type=count, nargs="+", metavar="N", help="tokens of a user [4k 32k longest]")
    parser.add_argument("--json", action="store_true", help="as JSON, sizes in bytes")
    add_fields(parser, EngineConfig, leave_out=["model", "device"])
    return parser


def run(parser: Parser, arguments: list[str]) -> int:
    """Raises ValueError with the engine's own words where no number of ranks can serve the model."""
    given = parser.parse_args(arguments)
    options = chosen(given, EngineConfig)
    config = EngineConfig.from_options(**{"skip_tokenizer_init": True, "device": "cuda", **options})
    gpu = _gpu(given.gpu)
    config, model, note = _read(config, gpu)
    from nanovllm.models.drafters import with_drafter
    from nanovllm.runner.footprint import footprint_of

    model = with_drafter(config, model)
    footprints, refused = [], {}
    sizes = [config.tensor_parallel_size] if "tensor_parallel_size" in options else [1, 2, 4, MAX_TENSOR_PARALLEL_SIZE]
    for size in sizes:
        try:
            footprint = footprint_of(_settled(replace(config, tensor_parallel_size=size), model, gpu), model, gpu)
            assert footprint.blocks  # or it raises
            footprints.append(footprint)
        except ValueError as error:
            refused[size] = str(error)
    if not footprints:
        raise ValueError(refused[sizes[-1]])
    longest = config.max_model_len or model.usual_context
    lengths = given.length or sorted({min(length, longest) for length in (*_LENGTHS, longest)})
    for length in lengths:
        if not 1 <= length <= longest:
            refuse("--length", length, f"in 1..{longest}, the longest context")
    if given.json:
        found = {"gpu": gpu.device.name, "plans": [_as_dict(each, lengths) for each in footprints], "refused": refused}
        print(json.dumps(found))
    else:
        rest = (f"ranks={size}: {why}" for size, why in refused.items())
        print("\n".join([*_heading(config, model, gpu, footprints[0], note), "", *_table(footprints, lengths), *rest]))
    return 0


def _read(config: EngineConfig, gpu: "Gpu") -> tuple[EngineConfig, ModelConfig, str]:
    """The options with a folder for a hub id, what the folder says, and what was found of weights."""
    from nanovllm.models.headers import check_headers, headers_of_folder, headers_of_hub
    from nanovllm.models.planned import rank_model
    from nanovllm.models.published import PUBLISHED_SHAPES
    from nanovllm.runner.kernel_choice import rules_of

    named = config.model
    if named in PUBLISHED_SHAPES and not Path(named).is_dir():
        config = replace(config, load_format="dummy")
        return config, read_model_config(replace(config, tensor_parallel_size=1)), "a shape that is known by name"
    is_remote = is_hub_id(config)
    folder = Path(fetch(named, CONFIGURATION, config.revision, config.download_dir) if is_remote else named)
    check_configuration(named, folder)
    config = replace(config, model=str(folder))
    model = read_model_config(replace(config, tensor_parallel_size=1))
    if model.implementation != "native":
        refuse("model", named, "an architecture with our own layers (model_impl='native')")
    headers = headers_of_hub(named, config.revision) if is_remote else headers_of_folder(folder)
    if not headers:
        return config, model, "no weights there: from config.json alone"
    alone = _settled(replace(config, tensor_parallel_size=1), model, gpu)
    layers = rank_model(model, rules_of(alone, model, gpu.device, config.uses("fused_kernels")), alone.dtype)
    check_headers(list(layers.checkpoint_weights()), model, headers, layers.embed_tokens.weight.dtype)
    size = sum(one.shape.numel() * one.dtype.itemsize for one in headers.values())
    return config, model, f"{len(headers):,} tensors, {size / _GIB:.2f} GiB, as the configuration needs them"


def _settled(config: EngineConfig, model: ModelConfig, gpu: "Gpu") -> EngineConfig:
    from nanovllm.executor.resolve import settle

    model.check_tensor_parallel(config.tensor_parallel_size)
    return settle(config, model, gpu.device.capability)


def _gpu(name: str) -> "Gpu":
    from nanovllm.runner.footprint import GPUS, Gpu

    known = {each.lower(): gpu for each, gpu in GPUS.items()}
    if name.lower() in known:
        return known[name.lower()]
    with suppress(ValueError):
        if 0 < (gib := float(name)) < math.inf:
            return Gpu(replace(GPUS["H200"].device, name=f"{gib:g} GiB"), int(gib * _GIB))
    refuse("--gpu", name, f"a size in GiB, or one of {', '.join(GPUS)}")


def _heading(config: EngineConfig, model: ModelConfig, gpu: "Gpu", footprint: "Footprint", note: str) -> Iterator[str]:
    settled = _settled(config, model, gpu)
    held = sorted({found.method for spec in model.layers for found in spec.formats})
    weights = f"weights in {', '.join(held) or settled.dtype}"
    yield f"{model.wrapper or model.architecture}: {len(model.layers)} layers, {weights}; {note}"
    yield f"{gpu.device.name}: {gpu.total / _GIB:.1f} GiB, of which {footprint.option}"
    for pages, (layers, nbytes) in footprint.token_bytes.items():
        seen = "all keys" if pages.window is None else f"a window of {pages.window}"
        shape = f"{pages.heads} x {pages.widths[0]} on a rank of {footprint.ranks}"
        yield f"KV cache: {layers} layers that see {seen}, {shape}: {nbytes / 1024:.1f} KiB a token"
    if footprint.slots:
        yield f"States of fixed size: {footprint.num_lines}, each of {footprint.line_bytes / (1 << 20):.1f} MiB"
    most = f"{config.max_num_seqs} requests at once, steps of {config.max_num_batched_tokens:,} tokens"
    yield f"{most}, contexts of up to {settled.max_model_len:,}"


def _table(footprints: list["Footprint"], lengths: list[int]) -> Iterator[str]:
    columns = ["ranks", *footprints[0].parts, "blocks", "tokens"]
    columns += [f"users of {length:,}" for length in lengths]
    rows = []
    for footprint in footprints:
        counts = (footprint.blocks, footprint.tokens, *map(footprint.users, lengths))
        sizes = (f"{size / _GIB:.2f}" for size in footprint.parts.values())
        rows.append([str(footprint.ranks), *sizes, *(f"{count:,}" for count in counts)])
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
    yield "Sizes are GiB of a rank. Step, graphs and libraries are estimates, which an engine measures."


def _as_dict(footprint: "Footprint", lengths: list[int]) -> dict[str, Any]:
    groups = [
        {
            "window": pages.window, "kv_heads": pages.heads, "head_dim": pages.widths[0], "layers": layers,
            "token_bytes": nbytes,
        }
        for pages, (layers, nbytes) in footprint.token_bytes.items()
    ]  # fmt: skip
    return {
        "tensor_parallel_size": footprint.ranks, **footprint.parts, "kv_cache": groups,
        "num_kvcache_blocks": footprint.blocks, "tokens": footprint.tokens,
        "users": {str(length): footprint.users(length) for length in lengths},
    }  # fmt: skip
