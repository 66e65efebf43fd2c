from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE, DTYPE, TOLERANCE, Case, make_case, make_places_case, nan_like, setup_of
from interpreting import fewer, nightly

from nanovllm.attention import BACKENDS, AttentionBackend, AttentionSetup, AttentionSpec, KVCache, select_backend
from nanovllm.attention.torch_backend import TorchBackend
from nanovllm.kernels.plan.config import LIBRARY
from nanovllm.kernels.plan.plan import Launch

# Decode rows (one of them padding), then chunks with and without a prefix, then a padding chunk.
QUERIES = [1, 1, 1, 20, 37, 1, 0]
CONTEXTS = [50, 0, 300, 20, 90, 65, 0]
SPEC = AttentionSpec(4, 2, 64, scale=0.125)
ON_CPU = AttentionSetup((SPEC,), 16, torch.device("cpu"), torch.float32)
by_name = pytest.mark.parametrize("name", list(BACKENDS))
pytestmark = pytest.mark.usefixtures("untraced")


def make_backend(name: str, case: Case, specs: tuple[AttentionSpec, ...] = ()) -> AttentionBackend:
    setup = setup_of(case, specs)
    try:
        return select_backend(name, setup).backend(setup)
    except ValueError as error:
        pytest.skip(str(error))


def run(case: Case, backend: AttentionBackend) -> torch.Tensor:
    backend.prepare(case.metadata)
    return backend.forward(case.q, case.cache, case.metadata, nan_like(case.q).to(DTYPE), case.spec, case.sinks)


@by_name
@pytest.mark.parametrize(("step", "heads", "block_size"), [
    ((QUERIES, CONTEXTS, 3), (4, 2), 128), ((QUERIES, CONTEXTS, 3), (5, 1), 16),
    (([1, 1, 1], [40, 129, 1], 3), (4, 2), 128), (([30, 7], [30, 77], 0), (4, 2), 128)],
    ids=["mixed", "mixed, five heads", "decodes alone", "prompts alone"])
def test_a_step_matches_float64(
    name: str, step: tuple[list[int], list[int], int], heads: tuple[int, int], block_size: int
) -> None:
    case = make_case(*step, num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=64, block_size=block_size,
                     padding_tokens=2)
    assert case.error_of(run(case, make_backend(name, case))) < TOLERANCE


@by_name
def test_layers_of_several_kinds_in_one_step(name: str) -> None:
    """As in Gemma: layers with and without a window share a backend, here with other heads too."""
    shape: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 128}
    kinds: list[dict[str, Any]] = [{}, {"window": 33, "softcap": 20.0}, {"window": 33, "num_kv_heads": 1},
                                   {"head_dim": 128, "has_sinks": True}]
    cases = [make_case(QUERIES, CONTEXTS, 3, **shape | kind) for kind in kinds]
    backend = make_backend(name, cases[0], tuple(case.spec for case in cases))
    metadata = cases[0].metadata
    backend.prepare(metadata)
    for case in [*cases, *cases[: fewer(1, len(cases))]]:
        assert torch.equal(case.metadata.block_tables[0], metadata.block_tables[0])
        out = backend.forward(case.q, case.cache, metadata, nan_like(case.q), case.spec, case.sinks)
        assert case.error_of(out) < (1e-5 if DEVICE == "cpu" else TOLERANCE)


def test_a_step_with_prompts_is_never_rounded() -> None:
    case = make_case([1, 1], [50, 65], 1, num_q_heads=2, num_kv_heads=1, head_dim=128, block_size=128)
    backend, out = make_backend("triton", case), nan_like(case.q)
    backend.prepare(case.metadata)
    behind = Launch(LIBRARY, rounded=True)
    assert backend.forward(case.q, case.cache, case.metadata, out, case.spec, behind=behind) is out
    assert case.error_of(out) < TOLERANCE


@by_name
@pytest.mark.parametrize("options", [{}, nightly({"window": 20}), {"window": 70, "block_size": 16}])
def test_nothing_that_a_row_cannot_see_reaches_it(name: str, options: dict[str, Any]) -> None:
    """Past the rows' ends and in blocks that lie wholly before their windows is what other requests have left: keys
    that are NaN, large values."""
    made: dict[str, Any] = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 128} | options
    case = make_case([1, 1, 20, 37, 1], [50, 300, 20, 90, 65], 2, **made)
    m, block_size = case.metadata, case.k_cache.shape[2]
    rows = zip(m.row_slot.tolist(), m.context_lens.tolist(), m.cu_seqlens_q.diff().tolist(), strict=True)
    for slot, context, count in rows:
        first = max(0, context - count + 1 - case.spec.window) if case.spec.window else 0
        blocks = m.block_tables[0][slot, : -(-context // block_size)].long()
        for cache, left in ((case.k_cache, float("nan")), (case.v_cache, 1e4)):
            cache[blocks[: first // block_size]] = left
            cache[blocks[-1], :, context - (len(blocks) - 1) * block_size :] = left
    backend: Any = make_backend(name, case)
    assert case.error_of(run(case, backend)) < TOLERANCE
    if name == "triton" and DEVICE == "cpu":  # the interpreter has tensor descriptors too
        backend.decode[case.spec].has_tma = backend.prefill[case.spec].use_tma = block_size == 128
        assert case.error_of(run(case, backend)) < TOLERANCE


@by_name
@pytest.mark.parametrize("options", [{}, {"window": 66, "has_sinks": True}])
def test_several_rows_of_a_sequence(name: str, options: dict[str, Any]) -> None:
    """Decodes of up to four places, in a backend that was told of these."""
    case = make_places_case([4, 1, 0, 3], [70, 300, 0, 3], 4, num_q_heads=4, num_kv_heads=2, head_dim=64,
                            block_size=128, **options)
    setup = replace(setup_of(case), places=4)
    try:
        backend = select_backend(name, setup).backend(setup)
    except ValueError as error:
        pytest.skip(str(error))
    backend.warmup(case.cache, case.spec)
    assert case.error_of(run(case, backend)) < TOLERANCE


@by_name
def test_warmup_leaves_the_cache_alone(name: str) -> None:
    case = make_case([1], [5], 1, num_q_heads=4, num_kv_heads=2, head_dim=64, block_size=128)
    k, v = torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache)
    make_backend(name, case).warmup(KVCache(k, v), case.spec)
    assert not k.any() and not v.any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("options", [
    {}, {"window": 100, "has_sinks": True, "head_dim": 64}, {"window": 700, "softcap": 50.0, "head_dim": 256},
    {"head_dim": 96}, {"head_dim": 80, "num_q_heads": 6}])
def test_captured_step_serves_other_lengths(options: dict[str, Any]) -> None:
    shape = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 128} | options
    case = make_case([1] * 4 + [60], [700, 30, 2000, 129, 300], 4, **shape)
    backend, m, out = make_backend("triton", case), case.metadata, nan_like(case.q)
    assert case.error_of(run(case, backend)) < TOLERANCE
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.prepare(m)
        backend.forward(case.q, case.cache, m, out, case.spec, case.sinks)
    for lens in ([700, 30, 2000, 129, 300], [1, 0, 1999, 128, 61], [513, 7, 256, 0, 60]):
        m.context_lens.copy_(torch.tensor(lens))
        out.fill_(float("nan"))
        graph.replay()
        expected = case.reference()
        expected[:4][m.context_lens[:4] == 0] = float("nan")
        assert replace(case, expected=expected).error_of(out) < TOLERANCE


def test_torch_rows_do_not_depend_on_neighbours() -> None:
    case = make_case(QUERIES, CONTEXTS, 3, num_q_heads=4, num_kv_heads=2, head_dim=64)
    together = run(case, make_backend("torch", case))
    alone = case.metadata
    for row in (2, 4):
        tokens = slice(*alone.cu_seqlens_q[row : row + 2].tolist())
        part = make_case(QUERIES, CONTEXTS, 3, num_q_heads=4, num_kv_heads=2, head_dim=64)
        part.metadata.row_slot[:row] = -1
        part.metadata.row_slot[row + 1 :] = -1
        assert torch.equal(run(part, make_backend("torch", part))[tokens], together[tokens])


def test_auto_on_a_cpu_is_torch() -> None:
    selection = select_backend("auto", ON_CPU)
    assert selection.backend is TorchBackend
    assert "cpu" in selection.reason


def test_a_backend_that_is_not_installed_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from nanovllm.attention.triton_backend import TritonBackend

    monkeypatch.setattr(TritonBackend, "check", classmethod(lambda *_: None))
    monkeypatch.setitem(BACKENDS, "flash", ("no_such_module", "FlashBackend"))
    on_gpu = AttentionSetup((SPEC,), 128, torch.device("cuda"), torch.bfloat16)
    selection = select_backend("auto", on_gpu)
    assert selection.backend is TritonBackend
    assert "no_such_module" in selection.reason
    assert select_backend("triton", on_gpu).reason == "asked for"


@pytest.mark.parametrize(("name", "change", "message"), [
    ("flashy", {}, "attention_backend='flashy': must be one of"),
    ("triton", {"block_size": 24}, "kvcache_block_size=24"),
    ("triton", {"head_dim": 76}, "head_dim=76"),
    ("triton", {"head_dim": 520}, "head_dim=520"),
    ("triton", {"dtype": torch.float64}, "dtype=torch.float64"),
])
def test_refusals_name_option_and_value(name: str, change: dict[str, object], message: str) -> None:
    options: dict[str, Any] = {"device": torch.device(DEVICE), "dtype": DTYPE, "head_dim": 64} | change
    setup = replace(ON_CPU, specs=(SPEC, replace(SPEC, head_dim=options.pop("head_dim"))), **options)
    with pytest.raises(ValueError, match=message):
        select_backend(name, setup)


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="device='cpu'"):
        select_backend("triton", ON_CPU)


@pytest.mark.parametrize(("change", "message"), [
    ({"num_heads": 5}, "num_heads=5"), ({"window": 0}, "window=0"), ({"softcap": -1.0}, "softcap=-1")])
def test_impossible_specs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **change)
