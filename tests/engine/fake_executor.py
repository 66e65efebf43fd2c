"""An executor whose only rank is a FakeDevice, and engines that run on it, with as many tokens a step as it pleases."""

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from fake_device import FakeDevice

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.executor.protocol import Executor
from nanovllm.executor.resolve import resolve
from nanovllm.models.registry import read_model_config, resolve_model_folder
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.wire.sampling import SCORES, Section, StepScores, split_section
from nanovllm.wire.state import StateSize

if TYPE_CHECKING:
    from nanovllm.executor.protocol import Weights


class FakeExecutor:
    """Steps are computed as they are launched. The log-probability of a token is minus its id."""

    failed = shares_weights = False

    def __init__(self, config: EngineConfig, tokens_per_step: int, gain: Callable[[int], int] | None) -> None:
        """`config`: resolved, with num_kvcache_blocks. `gain`: see FakeDevice."""
        assert config.num_kvcache_blocks and config.kvcache_block_size
        self.config, self.owner = config, os.getpid()
        self.state_size = StateSize(config.num_kvcache_blocks, config.kvcache_block_size)
        self.tokens_per_step = tokens_per_step
        self.device = FakeDevice(config.max_num_seqs, config.num_kvcache_blocks, config.kvcache_block_size, gain)
        self._results: deque[tuple[list[int], StepScores | None]] = deque()

    def launch(self, packed: np.ndarray) -> None:
        step, section = split_section(packed)
        tokens, _ = self.device.execute(step)
        scores = None if section is None else self._scores(section, tokens)
        drafted = [len(tokens) * (self.tokens_per_step - 1)] if self.tokens_per_step > 1 else []
        self._results.append((tokens + drafted, scores))

    def _scores(self, section: Section, tokens: list[int]) -> StepScores:
        ids = np.array(tokens)[section["rows"][section["scored"]]]
        table = [[token, 1, int(np.float32(-token).view(np.int32))] for token in ids]
        none: list[np.ndarray | None] = [None] * (len(SCORES) - 1)
        return StepScores([np.array(table, np.int32).reshape(-1, 3), *none], [None, None], None)

    def has_result(self) -> bool:
        return True

    def collect(self) -> tuple[list[int], StepScores | None]:
        return self._results.popleft()

    def check(self) -> None: ...
    def call(self, method: str, *args: Any) -> list[Any]: ...
    def check_weights(self, weights: "Weights") -> None: ...
    def update_weights(self, weights: "Weights") -> None: ...
    def finish_weight_update(self) -> None: ...
    def wake_up(self, tags: tuple[str, ...]) -> None: ...
    def close(self) -> None: ...

    def weights_changed(self) -> bool:
        return False

    def checksum(self) -> dict[str, str]:
        return {}

    def sleep(self, tags: tuple[str, ...], keep_weights: bool) -> int:
        return 0

    def info(self) -> dict[str, Any]:
        return {}


_: type[Executor] = FakeExecutor


def fake_engine(tokens_per_step: int = 1, gain: Callable[[int], int] | None = None, **options: Any) -> LLMEngine:
    """An engine of the demo model, whose steps a FakeDevice computes."""
    given = resolve_model_folder(EngineConfig.from_options("demo", device="cpu", **options))
    model = read_model_config(given)
    return LLMEngine(FakeExecutor(resolve(given, model), tokens_per_step, gain), model, Tokenizer(given))
