"""FlashAttention-4 packages of every sort: absent, whole, half there. All of them are stand-ins made here."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nanovllm.attention import AttentionSetup, flash_import, select_backend
from nanovllm.attention.base import AttentionSpec

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Writes modules of package flash_attn, given as file=source, and lets them be found first."""

    def write(**files: str) -> None:
        for name, source in {"__init__": "", **files}.items():
            path = tmp_path / "flash_attn" / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)

    monkeypatch.syspath_prepend(str(tmp_path))
    flash_import.start.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    yield write
    flash_import.start.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_installed_looks_at_files_and_imports_nothing(install: Install) -> None:
    install(__init__="raise SystemExit('imported')", cute__in__interface="")
    assert flash_import.installed()
    assert "flash_attn" not in sys.modules


def test_forward_into_a_given_tensor_or_by_a_copy(install: Install) -> None:
    install(cute__in__interface="def flash_attn_varlen_func(x): return x + 1, None\n")
    out = torch.zeros(2)
    flash_import.start().result()(torch.ones(2), out=out)
    assert out.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "source",
    ["raise RuntimeError('no driver')", "raise SystemExit('no driver')", "import not_there_at_all", "x = 1"],
)
def test_half_an_installation_is_named(install: Install, source: str) -> None:
    install(cute__in__interface=source)
    with pytest.raises(flash_import.ImportFailed, match=r"no driver|not_there_at_all|flash_attn_varlen_func"):
        flash_import.start().result()


def _backend(is_required: bool) -> object:
    from nanovllm.attention.flash_backend import FlashBackend

    backend = object.__new__(FlashBackend)
    backend._is_loaded, backend.is_required = False, is_required
    return backend


def test_auto_falls_back_and_says_why(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    install(cute__in__interface="raise RuntimeError('half of it')")
    backend = _backend(is_required=False)
    with caplog.at_level(logging.WARNING):
        assert not backend._has_flash() and not backend._has_flash()
    assert len(caplog.records) == 1 and "half of it" in caplog.text
    assert backend.name == "triton" and "half of it" in backend.fallen_back_from


def test_asked_for_by_name_it_is_an_error(install: Install) -> None:
    pytest.importorskip("triton")
    install(cute__in__interface="raise RuntimeError('half of it')")
    with pytest.raises(ValueError, match=r"attention_backend='flash'.*half of it"):
        _backend(is_required=True)._has_flash()


def test_not_installed_at_all_is_found_out_at_once(install: Install) -> None:
    pytest.importorskip("triton")
    sys.modules.pop("nanovllm.attention.flash_backend", None)
    install()
    with pytest.raises(ValueError, match="attention_backend='flash': must be installed"):
        select_backend("flash", AttentionSetup((), 128, torch.device("cuda"), torch.bfloat16))


@pytest.mark.parametrize("capability, takes", [((9, 0), {64, 80, 96, 128, 192, 256}), ((10, 0), {64, 128})])
def test_head_sizes_by_device(
    install: Install, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], takes: set[int]
) -> None:
    pytest.importorskip("triton")
    install(cute__in__interface="")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    from nanovllm.attention.flash_backend import FlashBackend

    for head_dim in (64, 72, 80, 96, 128, 160, 176, 192, 248, 256):
        specs = (AttentionSpec(4, 2, head_dim, head_dim**-0.5),)
        setup = AttentionSetup(specs, 128, torch.device("cuda"), torch.bfloat16)
        if head_dim in takes:
            FlashBackend.check(setup)
        else:
            with pytest.raises(ValueError, match=f"head_dim={head_dim}: attention_backend='flash'"):
                FlashBackend.check(setup)
