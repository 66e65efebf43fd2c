"""One rank's adapters: all that were loaded, in host memory by digest, and the slots that hold some on the device."""

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from nanovllm.errors import short, shown
from nanovllm.layers.adapted import AdaptedMatrix
from nanovllm.model_config import ModelConfig
from nanovllm.models.adapter_files import Adapter, check_finite, is_finite, modules_of, read_adapter
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.runner.adapter_layout import AdapterLayouts, Halves, Layout
from nanovllm.runner.device_io import DeviceIO
from nanovllm.transfer.shared import MappedBuckets


class RankAdapters:
    def __init__(self, model: DecoderForCausalLM, config: ModelConfig, max_rank: int, io: DeviceIO) -> None:
        self._max_rank, self._io = max_rank, io
        self._layers = {name: part for name, part in model.named_modules() if isinstance(part, AdaptedMatrix)}
        self.layouts = AdapterLayouts(self._layers, config, max_rank)
        slots = next(iter(self._layers.values())).a
        self._dtype, self._is_pinned = slots.dtype, slots.is_cuda
        self._held: dict[str, dict[str, Halves]] = {}
        """Halves of each layer that an adapter has, by the adapter's digest and the layer's name."""
        self._reading: _Reading | None = None
        """Adapter that is being read, or was and is to be put."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        """Streams in which tensors that are on GPUs are fetched, beside the steps."""

    def read(self, given: Path | Adapter, message: dict[str, Any] | None = None) -> None:
        """Begins to read an adapter into host memory, in a thread beside the steps; what was being read before is
        dropped. given: a folder, or tensors, which stay as they are until then. message: of a SharedBucket that has the
        tensors, and is mapped now."""
        if isinstance(given, Adapter) and message is not None:
            given = given._replace(tensors=dict(MappedBuckets(torch.device("cpu")).tensors(message)))
        tensors = given.tensors.values() if isinstance(given, Adapter) else ()
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._reading = _Reading(self, given, [torch.cuda.current_stream(one).record_event() for one in devices])
        self._reading.start()

    def is_reading(self) -> bool:
        assert self._reading is not None
        return self._reading.is_alive()

    def put(self) -> tuple[str, str]:
        """Takes the adapter that was read. Returns its digest and what is wrong with it, "" where nothing is: a rank
        that raised would be gone."""
        reading, self._reading = self._reading, None
        assert reading is not None
        reading.join()
        if reading.halves is not None:
            self._held[reading.digest] = reading.halves
        return reading.digest, reading.fault

    def drop(self, digests: list[str]) -> None:
        """Forgets adapters that no row has any more. Those that are in slots stay there until others come."""
        for digest in digests:
            self._held.pop(digest, None)

    @torch.inference_mode()
    def place(self, slot: int, digest: str) -> None:
        """Copies an adapter into a slot, in the order of launches: a later step finds it there, and steps launched
        before have read what was there."""
        held = self._held[digest]
        here = [half[slot] for path in held for half in (self._layers[path].a, self._layers[path].b)]
        rest = [layer.b[slot] for path, layer in self._layers.items() if path not in held]
        with self._io.stream_context():
            torch._foreach_copy_(here, [half for halves in held.values() for half in halves], non_blocking=True)
            if rest:
                torch._foreach_zero_(rest)

    @torch.inference_mode()
    def halves_of(
        self, given: Path | Adapter, events: Sequence[torch.cuda.Event] = ()
    ) -> tuple[str, dict[str, Halves] | None]:
        """Digest of an adapter, and its halves on this rank; None: they are held. events: behind which tensors on a GPU
        are there. From any thread. Raises ValueError where it is not one of this model."""
        with self._io.stream_context():  # of this rank's device
            adapter = read_adapter(given) if isinstance(given, Path) else given
            if adapter.digest in self._held:
                return adapter.digest, None
            layout, tensors = self.layouts.of(adapter), [*adapter.tensors.values()]
            memory = torch.empty(layout.size, dtype=self._dtype, pin_memory=self._is_pinned)
            source = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
            if source is None:
                layout.fill(memory, tensors)
                is_good = is_finite(memory)
            else:
                is_good = self._fetch(memory, layout, tensors, source, events)
            if not is_good:
                check_finite(modules_of(adapter, self._max_rank), self._dtype)
            return adapter.digest, layout.halves(memory)

    def _fetch(
        self, memory: torch.Tensor, layout: Layout, tensors: Sequence[torch.Tensor], source: torch.device,
        events: Sequence[torch.cuda.Event],
    ) -> bool:  # fmt: skip
        """Fills host memory with tensors on a GPU, which are arranged there and come in one copy. Returns whether they
        are finite."""
        if source not in self._streams:
            self._streams[source] = torch.cuda.Stream(source)
        with torch.cuda.device(source), torch.cuda.stream(stream := self._streams[source]):
            for event in events:
                stream.wait_event(event)
            try:
                there = torch.empty(layout.size, dtype=self._dtype, device=source)
            except torch.OutOfMemoryError:
                there, tensors = memory, [tensor.cpu() for tensor in tensors]
            layout.fill(there, tensors)
            memory.copy_(there, non_blocking=True)
            is_good = is_finite(there)
            stream.synchronize()
        return is_good


class _Reading(Thread):
    """An adapter that is read into a rank's host memory."""

    def __init__(self, adapters: RankAdapters, given: Path | Adapter, events: list[torch.cuda.Event]) -> None:
        super().__init__(name="nanovllm-adapter", daemon=True)
        self._adapters, self._given, self._events = adapters, given, events
        self.digest, self.fault = "", ""
        self.halves: dict[str, Halves] | None = None

    def run(self) -> None:
        try:
            self.digest, self.halves = self._adapters.halves_of(self._given, self._events)
        except (OSError, ValueError) as error:
            self.fault = str(error)
        except Exception as error:  # of a library that reads what is none
            said = f"must be an adapter as PEFT writes it: {type(error).__name__}: {short(error)}"
            is_folder = isinstance(self._given, Path)
            self.fault = f"lora_path={shown(str(self._given))}: {said}" if is_folder else f"tensors: {said}"
