"""Checks of what an engine leaves behind, read from /proc; and the smallest engine that can."""

import json
import os
import time
from pathlib import Path
from typing import Any

from fork_server import MARK

from nanovllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "num_kvcache_blocks": 64,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)


def write_tiny_config(folder: Path, **changes: Any) -> str:
    """A model folder without weights, small enough that a step is all overhead."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 301, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def tiny_llm(folder: str, **options: Any) -> LLM:
    return LLM(folder, **{**OPTIONS, "tensor_parallel_size": 2, **options})


def token_ids(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(list(prompts), params, use_tqdm=False)]


def marked_processes(mark: str) -> list[int]:
    """Running processes that were started with MARK=mark in their environment, or are forks that say so; zombies are
    not among them."""
    sign, found = f"{MARK}={mark}", []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (
                sign.encode() in (entry / "environ").read_bytes().split(b"\0")
                or any(sign in link for link in open_files(entry.name))
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def children() -> list[int]:
    """Children of this process, zombies included."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"\nPPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def open_files(pid: int | str = "self") -> list[str]:
    """Targets of a process's file descriptors."""
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return links


def listening_ports() -> set[str]:
    """Local addresses on which this process listens."""
    mine = set(open_files())
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}


class Leftovers:
    """The state of this process before an engine, to compare with the state after it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._before = self._state()

    def _state(self) -> dict[str, set[object]]:
        shared_memory = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
        return {
            "workers": set(marked_processes(self._mark)),
            "children": set(children()),
            "files": set(range(len(open_files()))),  # their number: the same file may be open as another descriptor
            "listening": set(listening_ports()),
            "shared memory": set(shared_memory),
        }

    def _new(self) -> dict[str, set[object]]:
        """Things that were not there before. Those that were and have gone may be from a test before this one."""
        new = {kind: found - self._before[kind] for kind, found in self._state().items()}
        return {kind: found for kind, found in new.items() if found}

    def assert_none(self) -> None:
        deadline = time.monotonic() + 3.0
        while (new := self._new()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not new, new
