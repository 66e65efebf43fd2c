"""A rank's commands on its weights: replaced in place, refreshed, compared, put to sleep."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.errors import OutOfMemory
from nanovllm.layers.weights import CheckpointWeight, TensorSource
from nanovllm.model_config import ModelConfig
from nanovllm.models.checkpoint import HEAD, check_names, load_checkpoint, open_checkpoint
from nanovllm.models.int4_tensors import Int4Reader
from nanovllm.models.live_module import LiveModule
from nanovllm.models.mxfp4 import widened
from nanovllm.models.names import CheckpointNames
from nanovllm.runner.device_io import DeviceIO
from nanovllm.runner.memory_probe import MemoryProbe
from nanovllm.runner.sleep import SleepableMemory
from nanovllm.runner.weight_update import ShardChecksums, WeightUpdate, weight_checksums
from nanovllm.transfer.shared import MappedBuckets


class WeightCommands:
    """The part of ModelRunner that changes parameters. What it works on is ModelRunner's."""

    device: torch.device
    int4_reader: Int4Reader | None
    io: DeviceIO
    live_module: LiveModule | None
    memory: MemoryProbe
    model_config: ModelConfig
    sleepable: SleepableMemory | None
    weights: list[CheckpointWeight]
    weight_update: WeightUpdate
    buckets: MappedBuckets | None = None
    """Buckets of new weights that this rank has mapped."""
    _progress: Callable[[], None]
    _spelling: CheckpointNames

    def begin_weight_update(self, partial: bool) -> None:
        """All weights are to come anew, or with `partial` some of them. An update that has begun starts over."""
        self.weight_update = self._new_update(partial)

    def _new_update(self, partial: bool) -> WeightUpdate:
        tied = self.model_config.tie_word_embeddings
        return WeightUpdate(self.weights, tied, self._spelling, partial, self.int4_reader)

    def check_all_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError where these are not all weights, each as it can be loaded. Nothing is written."""
        self._new_update(partial=False).check(tensors, are_all=True)

    def open_weights(self, folder: Path) -> dict[str, TensorSource]:
        """The tensors of a folder under the names of `weights`. Raises ValueError or FileNotFoundError where one is
        missing, surplus or misshapen."""
        tensors = self._tensors_of(folder)
        if self.model_config.tie_word_embeddings:
            tensors.pop(HEAD, None)
        for weight in self.weights:
            weight.check(tensors[weight.name])
        return tensors

    def _tensors_of(self, folder: Path, wide: bool = True) -> dict[str, TensorSource]:
        """wide: see Int4Reader.read."""
        tensors = widened(dict(self._spelling.select(open_checkpoint(folder).items())), self.device)
        if self.int4_reader is not None:
            tensors = dict(self.int4_reader.read(tensors.items(), wide))
        check_names(self.weights, tensors, self.model_config.tie_word_embeddings)
        return tensors

    @torch.inference_mode()
    def load_weight_folder(self, folder: Path) -> None:
        """Copies this rank's share of a folder's tensors into its parameters, in place."""
        with self.io.stream_context():
            load_checkpoint(self.weights, self.open_weights(folder), self.device, self._progress)
        self.weight_update.expect_no_more()

    @torch.inference_mode()
    def weight_checksums(self) -> dict[str, list[ShardChecksums]]:
        """Checksums of this rank's shards (runner/weight_update.py)."""
        self.io.synchronize()
        return weight_checksums(self.weights, self._progress)

    @torch.inference_mode()
    def update_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copies whole tensors, which weight_update has checked, into this rank's parameters, in place."""
        self.io.synchronize()  # the caller may have computed them a moment ago, in a stream that ours does not wait for
        with self.io.stream_context():
            self.weight_update.load(tensors)
        self.io.synchronize()

    @torch.inference_mode()
    def update_from_bucket(self, message: dict[str, Any]) -> None:
        """Takes weights that rank 0 has filled into a bucket (transfer/shared.py)."""
        self.buckets = self.buckets or MappedBuckets(self.device)
        with self.io.stream_context():
            self.weight_update.load(list(self.buckets.sources(message)))
        self.io.synchronize()

    def forget_buckets(self) -> None:
        """Rank 0 is about to free what was mapped."""
        if self.buckets is not None:
            self.buckets.close()

    def refresh_weights(self) -> None:
        """Copies what a live module cannot share."""
        assert self.live_module is not None
        self.io.synchronize()  # as in update_weights
        with self.io.stream_context():
            self.live_module.refresh()
        self.io.synchronize()

    def prepare_sleep(self) -> str | None:
        """Takes host memory for the weights. Returns why there is none, as a rank that raised would be gone."""
        try:
            if self.sleepable is not None:
                self.sleepable.take_host_memory()
        except OutOfMemory as error:
            return str(error)
        return None

    @torch.inference_mode()
    def sleep(self, tags: tuple[str, ...], keep_weights: bool) -> int:
        """Gives the memory of "weights" and "kv_cache" back; returns the bytes."""
        self.io.synchronize()
        if self.sleepable is None:
            return 0
        freed = self.sleepable.sleep(tags, keep_weights)
        self.memory.release_cached()
        return freed

    def prepare_wake_up(self, tags: tuple[str, ...]) -> str | None:
        """Takes device memory again, at the same addresses. Returns why there is none: then nothing has changed."""
        self.memory.release_cached()
        try:
            if self.sleepable is not None:
                self.sleepable.take_again(tags)
        except OutOfMemory as error:
            return str(error)
        return None

    def give_up_wake_up(self, tags: tuple[str, ...]) -> None:
        """Gives back what prepare_wake_up took: another rank got none."""
        if self.sleepable is not None:
            self.sleepable.give_back(tags)

    @torch.inference_mode()
    def wake_up(self, tags: tuple[str, ...]) -> None:
        """Fills the memory with what was kept."""
        if self.sleepable is not None:
            self.sleepable.wake(tags)
