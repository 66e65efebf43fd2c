"""`nanovllm kernels MODEL`: which kernel runs for every operation of a model, on any device, without a GPU."""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from nanovllm.cli.options import Parser, add_fields, chosen
from nanovllm.config import EngineConfig

ROWS = [1, 8, 64, 256, 4096]


def numbers(text: str) -> list[int]:
    """"1,8,64" as ascending integers."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be positive integers with commas between")
    return found


def make_parser() -> Parser:
    text = "Prints the kernel of each operation and number of rows, its parameters, what is fused, and why not more."
    parser = Parser(prog="nanovllm kernels", description=text)
    parser.add_argument("model", metavar="MODEL", help="a folder, a hub id, or a published name such as Qwen3-8B")
    parser.add_argument("--rows", type=numbers, default=ROWS, metavar="LIST", help="numbers of rows [1,8,64,256,4096]")
    parser.add_argument("--device", dest="gpu", metavar="X", help="a GPU such as H200, cpu, or a JSON file [this one]")
    add_fields(parser, EngineConfig, leave_out=["model", "device"])
    parser.epilog = "The engine's options are taken too; -tp, --quantization or --exact-bits change the kernels."
    return parser


def run(parser: Parser, arguments: Sequence[str]) -> int:
    given = parser.parse_args(arguments)

    import torch

    from nanovllm.executor.resolve import settle
    from nanovllm.kernels.plan.device import Device
    from nanovllm.models.planned import lines
    from nanovllm.models.registry import read_model_config, resolve_model_folder
    from nanovllm.runner.kernel_choice import rules_of

    options = {"load_format": "dummy", "skip_tokenizer_init": True, **chosen(given, EngineConfig)}
    config = resolve_model_folder(EngineConfig.from_options(**options))
    model = read_model_config(config)
    if given.gpu is not None:
        device = Device.named(given.gpu)
    else:
        device = Device.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    config = settle(replace(config, device="cuda" if device.is_cuda else "cpu"), model, device.capability)
    rules = rules_of(config, model, device, device.is_cuda and config.uses("fused_kernels"))
    for line in lines(model, rules, config.dtype, given.rows):
        print(line)
    return 0
