"""Weights from safetensors files (or from nothing), each rank reading only the bytes of its own shards."""

import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.layers.weights import CheckpointWeight, DerivedTensor, TensorSource
from nanovllm.models.files import weight_files, weight_map

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FILE_DTYPES = {
    **DTYPES, "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32,
    "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip
"""Dtypes of files by safetensors' names; integers are parts of quantised tensors."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_READ_THREADS = 8


@dataclass(frozen=True)
class FileTensor:
    """A tensor inside a mapped file; only the ranges that are narrowed to and copied are ever read."""

    part: Any
    """Slice object of safe_open's get_slice."""
    dtype: torch.dtype
    shape: torch.Size

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """A scalar counts as [1]."""
        part: torch.Tensor = self.part[(*(slice(None),) * dim, slice(start, start + length))[: len(self.shape)]]
        return part if self.shape else part.view(1)


def read_safetensors(path: Path) -> dict[str, FileTensor]:
    """The tensors of one file by name. Raises ValueError naming the file where it cannot be read or is not
    well-formed, FileNotFoundError where it is not there."""
    try:
        file = safe_open(path, framework="pt")
    except SafetensorError as error:
        with path.open("rb") as file_of_git:
            if file_of_git.read(20) == b"version https://git-":
                raise ValueError(f"{path}: a pointer of Git LFS, not the weights: run git lfs pull there") from None
        raise ValueError(f"{path}: corrupt or cut short: {error}") from None
    except FileNotFoundError:
        raise
    except OSError as error:  # which does not name the file
        raise ValueError(f"{path}: cannot be read: {error}") from None
    return {name: _file_tensor(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (no dict)


def _file_tensor(path: Path, name: str, part: Any) -> FileTensor:
    dtype = part.get_dtype()
    if dtype not in FILE_DTYPES:
        raise ValueError(f"{path}: tensor {name!r} has type {dtype}: must be one of {', '.join(FILE_DTYPES)}")
    return FileTensor(part, FILE_DTYPES[dtype], torch.Size(part.get_shape()))


def open_checkpoint(folder: Path, option: str | None = "model") -> dict[str, FileTensor]:
    """All tensors of a folder that an option names; of a tensor in several files the one that the index names. Raises
    FileNotFoundError where there are no files, but for no option."""
    index = weight_map(folder)
    files = weight_files(folder, index)
    if not files and option is not None:
        raise FileNotFoundError(f"{option}={str(folder)!r}: must be a folder with *.safetensors")
    copies: dict[str, dict[Path, FileTensor]] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            copies.setdefault(name, {})[file] = tensor
    tensors = {}
    for name, found in copies.items():
        chosen = found.get(folder / index.get(name, ""))
        if chosen is None and len(found) > 1:
            raise ValueError(f"{[*found][-1]}: weight {name!r} is in another file of the checkpoint too")
        tensors[name] = chosen or next(iter(found.values()))
    return tensors


def check_names(weights: Iterable[CheckpointWeight], given: Iterable[str], tied_head: bool) -> None:
    """Raises ValueError naming what is missing or surplus. A tied model may bring its head; load_checkpoint sees that
    it is the embedding."""
    needed, found = {weight.name for weight in weights}, set(given)
    surplus = found - needed - ({HEAD} if tied_head else set())
    for problem, names in (("missing", needed - found), ("surplus", surplus)):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            if names == {HEAD} and not tied_head:
                shown += " (hf_overrides={'tie_word_embeddings': True} takes the embedding)"
            raise ValueError(f"checkpoint: {len(names)} {problem} weight{'s' * (len(names) > 1)}: {shown}")


def load_checkpoint(
    weights: list[CheckpointWeight], sources: Mapping[str, TensorSource], device: torch.device,
    progress: Callable[[], None] = lambda: None, on_share: Callable[[float], None] = lambda share: None,
) -> None:  # fmt: skip
    """Copies every weight from its source; reads overlap, since copying releases the interpreter. `progress`: called
    after each piece of a few MB, from several threads; `on_share`: with the share that is there, after each weight.
    Raises ValueError for a tied model whose head, where one is there, is another."""
    stage = _pinned if device.type == "cuda" else lambda tensor: tensor

    @torch.inference_mode()  # the caller's does not reach the pool's threads
    def load(weight: CheckpointWeight) -> None:
        source = sources[weight.name]
        if weight.scaled_by and weight.is_wide(source):
            found = f"has type {source.dtype}, but config.json has a quantization_config"
            raise ValueError(f"weight {weight.name!r} {found}: must be of type {torch.float8_e4m3fn}")
        weight.load(source, progress, stage)

    largest_first = sorted(weights, key=lambda weight: -torch.Size(weight.shape).numel())
    by_name = {weight.name: weight for weight in weights}
    with ThreadPoolExecutor(_READ_THREADS) as pool:
        is_tied = EMBEDDING in by_name and HEAD not in by_name and HEAD in sources
        head = pool.submit(_check_tied_head, by_name[EMBEDDING], sources, progress) if is_tied else None
        ends = [*accumulate(torch.Size(weight.shape).numel() for weight in largest_first)]
        for end, _ in zip(ends, pool.map(load, largest_first), strict=True):
            on_share(end / ends[-1])
        if head is not None:
            head.result()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_tied_head(
    embedding: CheckpointWeight, sources: Mapping[str, TensorSource], progress: Callable[[], None]
) -> None:
    """Compares a head that is not loaded with the embedding that replaces it, in the range that this rank holds.
    Fine-tuning may have parted them and left the configuration as it was."""
    head = replace(embedding, name=HEAD)
    pairs = zip(embedding.parts(sources[EMBEDDING]), head.parts(sources[HEAD]), strict=True)
    for (_, ours), (_, theirs) in pairs:
        if not torch.equal(ours, theirs.to(ours.dtype)):
            found = f"weight {HEAD!r} is not {EMBEDDING!r}, but tie_word_embeddings=True"
            raise ValueError(f"checkpoint: {found} (hf_overrides={{'tie_word_embeddings': False}} keeps both)")
        progress()


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a range of a mapped file to pinned memory, from where the copy to the device is fast and asynchronous.

    Torch's pinned allocator keeps such a block until the copies that were launched from it have ended.
    """
    if tensor.device.type != "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


def _dummy(weight: CheckpointWeight, dtype: torch.dtype, device: torch.device, seed: int) -> DerivedTensor:
    """Random values of a whole tensor, from its name and the seed alone: every rank cuts its shard of the same
    tensor."""
    name, shape = weight.name, torch.Size(weight.shape)

    def narrow(dim: int, start: int, length: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)
        values = torch.empty(shape or (1,), dtype=dtype, device=device)
        if not dtype.is_floating_point:  # packed numbers
            values.random_(-(1 << 15), 1 << 15, generator=generator)
            if dtype == torch.int32:  # exponents with which numbers of e2m1 deviate by 0.023, or 224 in e4m3
                values.fill_(0xF6F6F6F6 - (1 << 32))
        elif name.endswith("_zero_point"):
            values.random_(0, 16, generator=generator)
        elif name.endswith(("_scale", "_scale_2")):
            values.uniform_(0.003, 0.006, generator=generator)
        elif len(shape) == 1 and name.endswith("weight"):  # of a norm; its offset is added when it is loaded
            values.normal_(1.0 - weight.offset, 0.1, generator=generator)
        else:
            values.normal_(0.0, 0.02, generator=generator)
        return values.narrow(dim, start, length)

    return DerivedTensor(shape, dtype, narrow)


def load_dummy(
    weights: list[CheckpointWeight], dtype: torch.dtype, device: torch.device, seed: int,
    progress: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Random weights: matrices and biases from N(0, 0.02), norm scales from N(1, 0.1). `progress`: called after each
    piece."""
    made = {name for weight in weights for name in weight.scaled_by}
    for weight in weights:
        if weight.name in made:
            continue
        held = weight.shards[0].target.dtype if weight.shards else dtype
        kind = held if held in (torch.int16, torch.int32) else dtype
        weight.load(_dummy(weight, kind, device, seed), progress)
