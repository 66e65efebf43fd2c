"""Comparisons with transformers, left out where its version computes something else."""

import re

import pytest
import transformers
from threads import one_thread  # noqa: F401

_SINCE = {
    r"test_families\.py.*minimax_m2": (5, 18),  # older ones pass over rotary_dim
    r"test_family_configs\.py.*(Gemma3|Olmo3)ForCausalLM-no theta": (5, 18),  # cannot read it
    r"test_(families|packed_checkpoints)\.py.*(gpt_oss|mxfp4)": (5, 20),  # pass over swiglu_limit
    r"test_wrapped_models\.py.*test_sound": (5, 23),  # name its tensors otherwise than the published checkpoint
}
"""First version of transformers that a test, by its id, can be compared with."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = tuple(map(int, transformers.__version__.split(".")[:2]))
    for item in items:
        for since in (version for part, version in _SINCE.items() if re.search(part, item.nodeid) and found < version):
            reason = f"comparable since transformers {since[0]}.{since[1]}"
            item.add_marker(pytest.mark.skip(reason=reason))
