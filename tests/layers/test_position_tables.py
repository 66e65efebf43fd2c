"""Rotary tables are as wide as the heads of the layers that take them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from nanovllm.models.decoder import PositionTables
from nanovllm.models.published import PUBLISHED_SHAPES
from nanovllm.models.registry import parse_config


def test_layers_whose_heads_differ_have_tables_of_their_own_width() -> None:
    config = parse_config(PUBLISHED_SHAPES["Qwen3-0.6B"])
    wide, narrow = config.layers[0], replace(config.layers[1], head_dim=64)
    config = replace(config, layers=(wide, narrow))
    context: Any = SimpleNamespace(config=config, max_model_len=32, device=torch.device("cpu"))
    tables = PositionTables.of(context).cos_sin
    assert {width: table.shape[-1] for (_, width), table in tables.items()} == {128: 128, 64: 64}
