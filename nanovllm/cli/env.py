"""`nanovllm env`: versions, GPUs, the attention backend that the engine would use, and missing packages."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement

import nanovllm
from nanovllm.cli.options import Parser

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "flash-attn-4")
_BLOCK_SIZE = 128


def make_parser() -> Parser:
    parser = Parser(prog="nanovllm env", description="Prints versions, GPUs and what is missing, for bug reports.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_of(extra: str) -> list[str]:
    """Packages of one of our extras that are not installed."""
    try:
        required = [*map(Requirement, importlib.metadata.requires("nanovllm") or [])]
    except importlib.metadata.PackageNotFoundError:  # run from a clone
        return []
    wanted = [each.name for each in required if each.marker is not None and each.marker.evaluate({"extra": extra})]
    return [name for name in wanted if name != "nanovllm" and _version(name) is None]


def _driver() -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def _gpus() -> list[dict[str, Any]]:
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        gib = round(properties.total_memory / (1 << 30), 1)
        found.append({"name": properties.name, "memory_gib": gib, "compute_capability": capability})
    return found


def _attention() -> dict[str, str]:
    """The backend for a model of common shape, and why it is the one."""
    import torch

    from nanovllm.attention import AttentionSetup, AttentionSpec, select_backend

    cuda = torch.cuda.is_available()
    spec = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
    dtype = torch.bfloat16 if cuda else torch.float32
    device = torch.device("cuda" if cuda else "cpu")
    try:
        chosen = select_backend("auto", AttentionSetup((spec,), _BLOCK_SIZE, device, dtype))
    except ValueError as error:
        return {"backend": "none", "reason": str(error)}
    return {"backend": chosen.backend.__name__.removesuffix("Backend").lower(), "reason": chosen.reason}


def gather() -> dict[str, Any]:
    """Gathers all facts, in JSON's types."""
    import torch

    gpus = _gpus()
    missing = {extra: names for extra in ("serve", "structured") if (names := missing_of(extra))}
    if gpus and gpus[0]["compute_capability"].split(".")[0] in ("9", "10") and _version("flash-attn-4") is None:
        missing["flash"] = ["flash-attn-4"]
    return {
        "nanovllm": nanovllm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "cuda_of_torch": torch.version.cuda,
        "driver": _driver(),
        "gpus": gpus,
        "attention": _attention(),
        "missing": missing,
    }


def _rows(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name, found[name]) for name in ("nanovllm", "python", "platform", "cpus"))
    yield from found["packages"].items()
    yield "CUDA", f"torch is built for {found['cuda_of_torch'] or 'none'}, driver {found['driver'] or 'none'}"
    for index, gpu in enumerate(found["gpus"]):
        capability = f"compute capability {gpu['compute_capability']}"
        yield f"GPU {index}", f"{gpu['name']}, {gpu['memory_gib']} GiB, {capability}"
    if not found["gpus"]:
        yield "GPU", "none that torch sees: models run on the CPU"
    yield "attention", "{backend} ({reason})".format(**found["attention"])
    for extra, names in found["missing"].items():
        yield "missing", f"{', '.join(names)}: pip install 'nanovllm[{extra}]'"


def run(parser: Parser, arguments: list[str]) -> int:
    given = parser.parse_args(arguments)
    found = gather()
    lines = (f"{name:<12} {text}" for name, text in _rows(found))
    print(json.dumps(found, indent=1) if given.json else "\n".join(lines))
    return 0
