"""A model for Ray Data's map_batches."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from nanovllm.sampling_params import SamplingParams


class Predictor:
    """Continues the prompts of a column: one engine in each actor of
    `dataset.map_batches(Predictor, fn_constructor_kwargs={...}, compute=ActorPoolStrategy(size=N), num_gpus=1)`.

    Rows without a seed get one made from their prompt, so that a row's output depends neither on its actor nor on its
    batch. Rows with equal prompts get equal outputs, unless they have different seeds.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | None = None,
        column: str = "prompt",
        output: str = "generated",
        seed_column: str | None = None,
        **options: Any,
    ) -> None:
        """`column`: texts, lists of token ids, or chats (lists of messages). `output`: what the new columns begin with:
        `generated_text`, `generated_token_ids`, `generated_finish_reason`; of n > 1 completions, lists of these.
        `seed_column`: integers. `options`: of LLM.
        """
        from nanovllm.llm import LLM

        self._llm = LLM(model, **options)
        self._params = SamplingParams() if sampling_params is None else sampling_params
        self._column, self._output, self._seed_column = column, output, seed_column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """`batch`: a numpy array for each column. Returns it with the new columns."""
        for name in filter(None, (self._column, self._seed_column)):
            if name not in batch:
                raise ValueError(f"column={name!r}: must be one of {', '.join(map(repr, batch))}")
        prompts = [_plain(value) for value in batch[self._column]]
        seeds = [None] * len(prompts) if self._seed_column is None else map(int, batch[self._seed_column])
        params = [self._of_row(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        if prompts and isinstance(prompts[0], list) and prompts[0] and isinstance(prompts[0][0], dict):
            outputs = self._llm.chat(prompts, params, use_tqdm=False)
        else:
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
        many = self._params.n > 1
        for name in ("text", "token_ids", "finish_reason"):
            column = np.empty(len(outputs), dtype=object)
            for row, output in enumerate(outputs):
                values = [getattr(each, name) for each in output.outputs]
                column[row] = values if many else values[0]
            batch[f"{self._output}_{name}"] = column
        return batch

    def _of_row(self, prompt: Any, seed: int | None) -> SamplingParams:
        if seed is None and self._params.seed is not None:
            return self._params
        if seed is None:
            seed = xxhash.xxh3_64_intdigest(json.dumps(prompt, sort_keys=True).encode()) >> 1
        return replace(self._params, seed=seed)


def _plain(value: Any) -> Any:
    """Converts a cell to Python's own types: Arrow gives arrays."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list) else value
