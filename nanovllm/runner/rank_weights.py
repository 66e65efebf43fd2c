"""One rank's weights: loaded, replaced in place, refreshed, compared."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.config import EngineConfig
from nanovllm.layers.weights import TensorSource
from nanovllm.model_config import ModelConfig
from nanovllm.models.checkpoint import HEAD, check_names, load_checkpoint, load_dummy, open_checkpoint
from nanovllm.models.drafters import load
from nanovllm.models.live_module import LiveModule
from nanovllm.models.names import CheckpointNames
from nanovllm.models.packed_tensors import CheckpointReader
from nanovllm.models.registry import names_of
from nanovllm.runner.device_io import DeviceIO
from nanovllm.runner.memory_probe import MemoryProbe
from nanovllm.runner.sleep import SleepableMemory
from nanovllm.runner.weight_update import ShardChecksums, WeightUpdate, weight_checksums
from nanovllm.transfer.shared import MappedBuckets


class RankWeights:
    """Parameters of a model on one rank, as a checkpoint has them."""

    update: WeightUpdate
    """Update that was begun last."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, model: Any, io: DeviceIO, memory: MemoryProbe,
        module: torch.nn.Module | None, progress: Callable[[], None], sleepable: SleepableMemory | None = None,
        drafter: Any = None,
    ) -> None:  # fmt: skip
        """module, progress: see ModelRunner. sleepable: where the model's parameters are to move: nothing may have
        views of them. drafter: a model that drafts for this one (models/drafters/), which updates leave as it is."""
        self._config, self._model_config, self._io, self._memory = config, model_config, io, memory
        self._device, self._dtype, self._progress = io.device, getattr(torch, config.dtype), progress
        self._is_transformers = model_config.implementation == "transformers"
        self._spelling = CheckpointNames() if self._is_transformers else names_of(model_config)
        self._buckets = MappedBuckets(self._device)
        """Buckets of new weights that this rank has mapped."""
        self.live_module = None if module is None else LiveModule(module, self._spelling)
        if self.live_module is not None:
            io.synchronize()  # the caller may have computed the weights a moment ago, in another stream
            self.live_module.share(model, model_config.tie_word_embeddings)
            memory.release_cached()
        elif sleepable is not None:
            sleepable.adopt("weights", model if drafter is None else torch.nn.ModuleList([model, drafter]))
            memory.release_cached()
        self._drafter = drafter
        self.all = list(model.checkpoint_weights())
        self._reader = CheckpointReader(model_config, self.all, self._dtype, self._device)

    @torch.inference_mode()
    def load(self, on_share: Callable[[float], None] = lambda share: None) -> None:
        """Fills the weights in, from the checkpoint or at random; those of modules of transformers are there.
        `on_share`: called with the share of a checkpoint that is loaded."""
        self.load_drafter()
        if self.live_module is not None or self._is_transformers:
            return
        with self._io.stream_context(), self._memory.libraries():
            if self._config.load_format == "dummy":
                load_dummy(self.all, self._dtype, self._device, self._config.seed, self._progress)
            else:
                tensors = self._tensors_of(Path(self._config.model), wide=False)
                load_checkpoint(self.all, tensors, self._device, self._progress, on_share)

    @torch.inference_mode()
    def load_drafter(self) -> None:
        """Fills in the weights of the model that drafts, if any: at the start, and after a sleep that has dropped
        them."""
        if self._drafter is not None:
            with self._io.stream_context(), self._memory.libraries():
                load(self._drafter, self._model_config, self._config, self._device, self._progress)

    def begin_update(self, partial: bool) -> None:
        """Begins an update of all weights, or with `partial` of some. One that had begun starts over."""
        self.update = self._new_update(partial)

    def _new_update(self, partial: bool) -> WeightUpdate:
        tied = self._model_config.tie_word_embeddings
        return WeightUpdate(self.all, tied, self._spelling, self._reader, partial)

    def check_all(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Raises ValueError unless these are all weights, each of a shape and type that can be loaded. Writes
        nothing."""
        self._new_update(partial=False).check(tensors, are_all=True)

    def open_folder(self, folder: Path, option: str = "model") -> dict[str, TensorSource]:
        """Opens the tensors of a folder, named by `option`, under the names of `all`. Raises ValueError or
        FileNotFoundError where one is missing, surplus or misshapen."""
        tensors = self._tensors_of(folder, option=option)
        if self._model_config.tie_word_embeddings:
            tensors.pop(HEAD, None)
        for weight in self.all:
            weight.check(tensors[weight.name])
        return tensors

    def _tensors_of(self, folder: Path, wide: bool = True, option: str = "model") -> dict[str, TensorSource]:
        """wide: see PackedReader.read."""
        tensors = dict(self._reader.read(self._spelling.select(open_checkpoint(folder, option).items()), wide))
        check_names(self.all, tensors, self._model_config.tie_word_embeddings)
        return tensors

    @torch.inference_mode()
    def load_folder(self, folder: Path) -> str:
        """Copies this rank's share of a folder's tensors into its parameters, in place. Returns what is wrong with a
        value there, "" where nothing is: a rank that raised would be gone."""
        try:
            with self._io.stream_context():
                load_checkpoint(self.all, self.open_folder(folder), self._device, self._progress)
        except (OSError, ValueError) as error:
            return str(error)
        self.update.expect_no_more()
        return ""

    @torch.inference_mode()
    def checksums(self) -> dict[str, list[ShardChecksums]]:
        """Checksums of this rank's shards (runner/weight_update.py)."""
        self._io.synchronize()
        return weight_checksums(self.all, self._progress)

    @torch.inference_mode()
    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copies whole tensors, which `update` has checked, into this rank's parameters, in place."""
        self._io.synchronize()  # the caller may have computed them a moment ago, in another stream
        with self._io.stream_context():
            self.update.load(tensors)
        self._io.synchronize()

    @torch.inference_mode()
    def take_from_bucket(self, message: dict[str, Any]) -> None:
        """Takes weights that rank 0 has filled into a bucket (transfer/shared.py)."""
        with self._io.stream_context():
            self.update.load(list(self._buckets.sources(message)))
        self._io.synchronize()

    def forget_buckets(self) -> None:
        """Lets go of the buckets, which rank 0 is about to free."""
        self._buckets.close()

    def refresh(self) -> None:
        """Copies what the parameters cannot share with a live module."""
        assert self.live_module is not None
        self._io.synchronize()  # as in take
        with self._io.stream_context():
            self.live_module.refresh()
        self._io.synchronize()
