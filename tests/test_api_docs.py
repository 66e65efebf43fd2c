"""The API reference is complete and builds, and so do the pages as a site; README and docs have no misspelt word."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from programs import load

import nanovllm

ROOT = Path(__file__).resolve().parent.parent


def described() -> Iterator[tuple[str, object]]:
    """Everything that `nanovllm` exports, and the public methods of its classes."""
    for name in nanovllm.__all__:
        exported = getattr(nanovllm, name)
        if inspect.isclass(exported) or inspect.isfunction(exported):
            yield name, exported
        if inspect.isclass(exported):
            for method, value in vars(exported).items():
                if not method.startswith("_") and isinstance(value, FunctionType | classmethod | property):
                    yield f"{name}.{method}", value


def test_what_is_exported_has_a_docstring() -> None:
    assert len(list(described())) > 30
    wrong = []
    for name, value in described():
        text = (getattr(value, "__doc__", None) or "").strip()
        if not text.endswith("."):
            wrong.append(f"{name}: {text[:60]!r}")
    assert not wrong


def test_the_api_reference_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    load(ROOT / "scripts" / "api_docs").build(tmp_path)
    page = (tmp_path / "nanovllm.html").read_text(encoding="utf-8")
    assert all(f'id="{name}"' in page for name in nanovllm.__all__ if not name.startswith("_"))


def test_the_pages_build_as_a_site_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert all(door in home for door in ("Start", "Guides", "Reference", "Internals"))
    assert "examples/custom_model.py" in (tmp_path / "models" / "index.html").read_text(encoding="utf-8")


def test_no_word_is_misspelt() -> None:
    codespell = pytest.importorskip("codespell_lib")
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert codespell.main("--quiet-level=3", *map(str, pages)) == 0
