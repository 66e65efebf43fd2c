"""Keys and values in e4m3: attention of what the cache holds, in float64, with everything that a layer may ask for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE, DTYPE, FEATURES, TOLERANCE, Case, make_case
from test_backends import make_backend, run

from nanovllm.attention import AttentionSetup, AttentionSpec, select_backend

FP8 = torch.float8_e4m3fn
SPEC = AttentionSpec(4, 2, 64, scale=0.125)
# Decode rows (one of them padding), a prompt, a chunk behind a prefix, padding.
STEP: tuple[list[int], list[int], int] = ([1, 1, 1, 5, 37, 0], [50, 0, 200, 5, 90, 0], 3)


def fp8_case(step: tuple[list[int], list[int], int] = STEP, **options: Any) -> Case:
    shape = {"num_q_heads": 4, "num_kv_heads": 2, **options}
    return make_case(*step, padding_tokens=2, fp8=True, **shape)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(("head_dim", "heads", "options"), [FEATURES[i] for i in (0, 1, 2, 3, 5)])
def test_mixed_step_matches_float64(
    name: str, head_dim: int, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    case = fp8_case(head_dim=head_dim, num_q_heads=heads[0], num_kv_heads=heads[1], **options)
    assert case.error_of(run(case, make_backend(name, case))) < TOLERANCE


def test_tensor_descriptors_and_split_rows_match_float64() -> None:
    pytest.importorskip("triton")
    case = fp8_case(([1, 1, 33], [300, 40, 65], 2), head_dim=64, block_size=64)
    backend: Any = make_backend("triton", case)
    backend.decode[case.spec].has_tma = backend.prefill[case.spec].use_tma = True  # the interpreter has them too
    assert case.error_of(run(case, backend)) < TOLERANCE
    assert backend.work_lists[case.spec].most_chunks(2, 300) > 1


def test_the_reference_is_exact() -> None:
    case = fp8_case(window=30, has_sinks=True)
    real = ~case.expected.isnan().flatten(1).any(1)
    assert torch.allclose(case.reference()[real], case.expected[real], rtol=1e-9)


def test_a_value_of_zeros_that_takes_most_of_the_weight() -> None:
    """Its scale is 0, or as small as scales are, beside values of any size."""
    pytest.importorskip("triton")
    case = fp8_case(([1, 5], [40, 30], 1), head_dim=32, block_size=64)
    assert case.kv_scales is not None
    case.kv_scales[..., 3, 1] = 0
    case.kv_scales[..., 7, 1] = 2.0**-60
    case.kv_scales[..., 8, 1] = 2.0**60
    expected = case.reference()
    expected[case.expected.isnan()] = float("nan")
    assert replace(case, expected=expected).error_of(run(case, make_backend("triton", case))) < TOLERANCE


@pytest.mark.parametrize("name", ["flash", "flex"])
def test_backends_without_it_say_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "flash":
        pytest.importorskip("triton")
        from nanovllm.attention import flash_import

        monkeypatch.setattr(flash_import, "installed", lambda: True)
        monkeypatch.setattr("nanovllm.attention.triton_backend.TritonBackend.check", classmethod(lambda *_: None))
    with pytest.raises(ValueError, match=f"kv_cache_dtype='fp8': must be 'auto' with attention_backend='{name}'"):
        select_backend(name, AttentionSetup((SPEC,), 128, torch.device(DEVICE), DTYPE, FP8))


def test_a_device_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': .* compute capability 8\.0; FP8 needs 8\.9"):
        select_backend("auto", AttentionSetup((SPEC,), 128, torch.device("cuda"), torch.bfloat16, FP8))
