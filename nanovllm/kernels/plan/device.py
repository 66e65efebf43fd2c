"""Properties of a device that decide which kernels run."""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.plan.config import SHARED_BYTES

_KIB = 1 << 10


@dataclass(frozen=True)
class Device:
    """Facts of a GPU, or of the CPU. Plain data: a plan can be made for a device that is not there."""

    name: str
    """Name by torch.cuda.get_device_name."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability; (0, 0): a CPU."""
    processors: int = 1
    """Multiprocessors."""
    shared_bytes: int = SHARED_BYTES
    """Maximum shared memory of one program; for a CPU that of the largest GPUs."""
    scaled_library: bool = False
    """cuBLAS multiplies e4m3 with a scale for each group of 128 columns: on 9.0, from CUDA 12.9 on."""

    @property
    def is_cuda(self) -> bool:
        return self.capability != (0, 0)

    @property
    def has_tma(self) -> bool:
        """Whether it has bulk tensor copy engines, and the 227 KB of shared memory that our tiles for them take (12.x
        has the engines and 99 KB). On the same GPUs our kernels multiply e4m3."""
        return self.capability[0] in (9, 10)

    @property
    def has_pdl(self) -> bool:
        """Whether it can start a kernel before the one ahead of it has ended (kernels/base/device.py)."""
        return self.capability >= (9, 0)

    @property
    def has_roles(self) -> bool:
        """Whether it runs kernels whose warps have roles (gemm/roles.py)."""
        return self.capability == (9, 0)

    @classmethod
    @cache  # it is asked at every launch
    def of(cls, device: torch.device) -> "Device":
        """The facts of a device of this machine."""
        if device.type != "cuda":
            return CPU
        found: Any = torch.cuda.get_device_properties(device)
        capability = (found.major, found.minor)
        version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        scaled = capability == (9, 0) and version >= (12, 9)
        return cls(found.name, capability, found.multi_processor_count, found.shared_memory_per_block_optin, scaled)

    @classmethod
    def named(cls, name: str) -> "Device":
        """A known GPU whose name contains `name`, "cpu", or what a JSON file of that path says. Raises ValueError for
        any other."""
        if name.lower() == "cpu":
            return CPU
        known = [device for device in KNOWN if name.lower() in device.name.lower()]
        if known:
            return known[0]
        try:
            raw = json.loads(Path(name).read_text(encoding="utf-8"))
            return cls(**raw | {"capability": tuple(raw["capability"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            names = ", ".join(device.name for device in KNOWN)
            form = f"a JSON file such as {json.dumps(asdict(KNOWN[0]))} ({type(error).__name__})"
            raise ValueError(f"device={name!r}: must be one of {names}, cpu, or {form}") from error


CPU = Device("cpu")
KNOWN = (
    Device("NVIDIA H200", (9, 0), 132, 227 * _KIB, True),
    Device("NVIDIA H100", (9, 0), 132, 227 * _KIB, True),
    Device("NVIDIA GH200", (9, 0), 132, 227 * _KIB, True),
    Device("NVIDIA B200", (10, 0), 148, 227 * _KIB),
    Device("NVIDIA A100", (8, 0), 108, 163 * _KIB),
    Device("NVIDIA L40S", (8, 9), 142, 99 * _KIB),
    Device("NVIDIA GeForce RTX 4090", (8, 9), 128, 99 * _KIB),
    Device("NVIDIA GeForce RTX 5090", (12, 0), 170, 99 * _KIB),
)
"""GPUs that a plan can be made for by name."""
