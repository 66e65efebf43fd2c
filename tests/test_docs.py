"""Facts of README and docs that the code knows better: options, outputs, commands, files, the order of the rooms."""

import ast
import graphlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from programs import load

import nanovllm
from nanovllm import LLM, errors, outputs
from nanovllm.cli.serve import SERVER_FIXED
from nanovllm.config import OPTIMISATIONS, EngineConfig
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.api.routes import ADMIN_ROUTES, ROUTES
from nanovllm.serve.options import ServeOptions
from nanovllm.vllm_options import FIXED, RENAMED

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "nanovllm"
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
OPTIONS = ROOT / "docs" / "options.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def section(page: Path, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    text = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")[2]
    assert text, f"{page.name} has no {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", text, flags=re.MULTILINE)[0]


def table_rows(text: str) -> list[list[str]]:
    """Cells of all table lines, headings and rules left out."""
    lines = text.splitlines()
    ruled = [bool(re.match(r"\|[-| ]+\|$", line)) for line in [*lines, ""]]
    kept = [line for n, line in enumerate(lines) if line.startswith("| ") and not ruled[n + 1]]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in kept]


def prose(page: Path) -> str:
    """The page without its Python examples."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def shown_default(option: Any) -> str:
    if option.default is not MISSING:
        return f"`{option.default!r}`"
    return "required" if option.default_factory is MISSING else f"`{option.default_factory()!r}`"


@pytest.mark.parametrize(("heading", "kind"), [("## Engine", EngineConfig), ("## Sampling", SamplingParams)])
def test_every_option_is_described_with_its_default(heading: str, kind: type) -> None:
    described = [(names(row[0])[0], row[1]) for row in table_rows(section(OPTIONS, heading))]
    assert sorted(described) == sorted((option.name, shown_default(option)) for option in fields(kind))


@pytest.mark.parametrize("page", ["options.md", "from-vllm.md"])
def test_tables_of_options_are_those_of_the_code(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert load(ROOT / "scripts" / "option_tables.py").with_tables(page, text) == text, "run scripts/option_tables.py"


MISSING_HERE = "## Options that do not exist"


def test_what_the_page_for_users_of_vllm_names_is_there() -> None:
    page = ROOT / "docs" / "from-vllm.md"
    sampling = {option.name for option in fields(SamplingParams)}
    for theirs, ours in table_rows(section(page, "## Sampling")):
        known = [name for name in names(ours) if name.isidentifier() and name != "json"]
        assert {*known} <= sampling, theirs
    options = {option.name for kind in (EngineConfig, ServeOptions) for option in fields(kind)}
    absent = {name for row in table_rows(section(page, MISSING_HERE)) for name in names(row[1]) if name.isidentifier()}
    assert len(absent) > 80 and not absent & {*options, *RENAMED, *FIXED, *SERVER_FIXED}
    for theirs, ours in table_rows(section(page, "## Library")):
        for name in names(ours):
            if name.startswith("LLM."):
                assert hasattr(LLM, name.removeprefix("LLM.")), theirs
    paths = {path for _, path in (ROUTES | ADMIN_ROUTES)}
    for theirs, ours in table_rows(section(page, "## Calls of the server")):
        there = names(theirs) if "the same path" in ours else [name for name in names(ours) if name.startswith("/")]
        assert {*there} <= paths, theirs


def test_every_optimisation_that_can_be_disabled_is_described() -> None:
    rows = table_rows(section(OPTIONS, "## What `disable` takes"))
    assert {names(row[0])[0]: row[1] for row in rows} == OPTIMISATIONS


def test_every_field_of_the_outputs_is_named() -> None:
    for row in table_rows(section(ROOT / "docs" / "library.md", "## The API on one screen")):
        kind = getattr(outputs, names(row[0])[0])
        own = {option.name for option in fields(kind) if option.compare}
        said = {name for name in names(row[1]) if name.isidentifier()}
        assert own <= said, kind
        assert all(name in own or isinstance(getattr(kind, name, None), property) for name in said), kind


def test_every_error_of_an_engine_is_named_and_exported() -> None:
    [said] = re.findall(r"it raises (.*?)\n- ", (ROOT / "docs" / "library.md").read_text("utf-8"), re.DOTALL)
    own = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RuntimeError)}
    assert {name.removeprefix("nanovllm.") for name in names(said)} == own <= {*nanovllm.__all__}


def commands(page: Path, program: str) -> list[list[str]]:
    """Arguments of every mention of a program in a code block or between backticks."""
    text = prose(page)
    code = [line for line in text.splitlines() if line.startswith("    ")] + names(text)
    found = [re.search(rf"(?:^|\s){re.escape(program)}(\s[^#]*)?(?:#|$)", line) for line in code]
    return [shlex.split(hit[1] or "") for hit in found if hit]


@by_page
def test_commands_are_understood(page: Path) -> None:
    from nanovllm.cli.bench import engine as bench

    for arguments in commands(page, "bench.py"):
        bench.parse_args(arguments)
    groups = load(ROOT / "scripts" / "bench_table").GROUPS
    for arguments in commands(page, "scripts/bench_table"):
        assert set(arguments) <= set(groups), arguments


def test_recipes_send_json_and_quote_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from nanovllm.cli.main import main

    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    requests = re.findall(r"--json '([^']+)'", page)
    assert len(requests) >= 10
    for body in requests:
        assert json.loads(body)["messages"]
    commands = re.findall(r"\$ nanovllm (plan .*)\n((?:    .*\n|\n(?=    ))+)", page)
    assert len(commands) >= 2
    for arguments, quoted in commands:
        assert main(shlex.split(arguments)) == 0
        assert [line[4:] for line in quoted.splitlines()] == capsys.readouterr().out.splitlines()


@by_page
def test_python_examples_use_what_there_is(page: Path) -> None:
    known = {"LLM": EngineConfig, "SamplingParams": SamplingParams}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for call in ast.walk(ast.parse(block)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in known:
                used = {keyword.arg for keyword in call.keywords}
                assert used <= {option.name for option in fields(known[call.func.id])}


@by_page
def test_files_that_are_mentioned_exist(page: Path) -> None:
    text = prose(page)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        place, _, heading = target.partition("#")
        linked = page.parent / place if place else page
        assert target.startswith("https://") or linked.exists(), target
        if heading and not target.startswith("https://"):
            headings = re.findall(r"^#+ (.+)$", linked.read_text("utf-8"), flags=re.MULTILINE)
            assert heading in (re.sub(r"[^\w -]", "", words).lower().replace(" ", "-") for words in headings), target
    for name in names(text):
        if re.fullmatch(r"[\w./]*\w+\.py", name):
            places = [ROOT / name, *(ROOT / "tests").rglob(name), PACKAGE / name, *PACKAGE.rglob(name)]
            assert any(place.is_file() for place in places), name
        elif name.split("/")[0] in ("scripts", "tests", "docs"):
            assert (ROOT / name.split()[0]).exists(), name


def test_the_readmes_first_screen_shows_what_it_is_and_how_to_start() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:42])
    for part in ("(docs/speed-short.svg)", "    pip install '.", "    nanovllm serve ", "    curl ", "```python\n"):
        assert part in first, part
    claims = re.findall(r"^- \*\*It .*?(?=^- |^## |\Z)", first, flags=re.MULTILINE | re.DOTALL)
    assert len(claims) >= 2 and all(re.search(r"\d", claim) for claim in claims), "claims have numbers"


@by_page
def test_extras_that_are_installed_exist(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for asked in re.findall(r"pip install '[\w.]+\[([\w,-]+)\]'", page.read_text("utf-8")):
        assert set(asked.split(",")) <= set(extras), asked
    for listed in re.findall(r"Extras to install: (.*)", page.read_text("utf-8")):
        assert set(names(listed)) <= set(extras), listed


def test_chart_of_speed_is_the_table() -> None:
    chart = load(ROOT / "scripts" / "speed_chart.py")
    pages = (ROOT / "docs" / "performance.md", "Figures"), (README, "Speed")
    rows, short = (chart.speed_rows(page.read_text(encoding="utf-8"), title) for page, title in pages)
    assert short and all(row in rows for row in short), "README repeats rows of docs/performance.md"
    bars = list(chart.bars(rows))
    assert bars and chart.CHART.read_text(encoding="utf-8") == chart.draw(bars), "run scripts/speed_chart.py"
    assert chart.SHORT.read_text(encoding="utf-8") == chart.draw(list(chart.bars(short))), "run scripts/speed_chart.py"


@cache
def imported(path: Path) -> set[str]:
    """Names that a file imports, in full: also late, and for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def rooms() -> list[str]:
    """Rooms of the table in docs/architecture.md, from the top down."""
    rows = table_rows(section(ARCHITECTURE, "## Rooms"))
    return [room.rstrip("/") for row in rows for room in names(row[0])]


def test_every_room_is_described() -> None:
    there = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert sorted(rooms()) == sorted(there - {"__init__.py"})


def test_rooms_import_only_rooms_below_them() -> None:
    place = {room.removesuffix(".py"): number for number, room in enumerate(rooms())}
    wrong = set()
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        others = {name.split(".")[1] for name in imported(path) if name.startswith("nanovllm.")}
        wrong |= {(room, other) for other in others & {*place} if room in place and place[other] < place[room]}
    assert not wrong


def test_modules_import_each_other_in_no_circle() -> None:
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    graph = {
        name: {part for full in imported(path) for part in (full, full.rpartition(".")[0]) if part in files} - {name}
        for name, path in files.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("room", ["config.py", "sampling_params.py", "outputs.py", "engine", "wire"])
def test_rooms_without_torch(room: str) -> None:
    place = PACKAGE / room
    for path in place.rglob("*.py") if place.is_dir() else [place]:
        assert not {name.split(".")[0] for name in imported(path)} & {"torch", "triton"}, path


SHAPE = re.compile(r"(?<!\w)\[[^\[\]]+\]")
"""A shape in brackets, such as [T, hidden]; what follows a name is an index."""


def test_launched_kernels_and_functions_of_tensors_state_shapes() -> None:
    """Shapes of a function are those of its docstring, or of a function of the same file that this names in backticks,
    as plain twins do."""
    rooms = [PACKAGE / name for name in ("kernels", "layers", "attention", "parallel", "runner", "models")]
    files = {path: path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py")}
    launched = {name for text in files.values() for name in re.findall(r"\b(\w+)\[", text)}  # each with its grid
    stating, silent = 0, []
    for path, source in files.items():
        functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        docs = {name: ast.get_docstring(node) or "" for name, node in functions.items()}
        for name, node in functions.items():
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            hints = [node.returns, *(arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg))]
            has_tensors = any(re.search(r"\bTensor\b", ast.unparse(hint)) for hint in hints if hint is not None)
            if name in launched if is_kernel else has_tensors and not name.startswith("_"):
                texts = [docs[name], *(docs.get(other, "") for other in re.findall(r"`(\w+)`", docs[name]))]
                stating += 1
                if not any(SHAPE.search(text) for text in texts):
                    silent.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert stating > 100 and not silent, "\n".join(silent)


def python_files() -> list[Path]:
    """Files of the package, of tests, scripts and examples. Programs in scripts/ may have no suffix."""
    folders = (ROOT / name for name in ("nanovllm", "tests", "scripts", "examples"))
    programs = (path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix)
    found = [path for path in programs if path.read_text(encoding="utf-8").startswith("#!/usr/bin/env python3\n")]
    return sorted([*found, *ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


def test_files_and_functions_are_short() -> None:
    """At most 400 lines a file and 60 a function, its decorators aside: what CONTRIBUTING.md asks for."""
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert (node.end_lineno or node.lineno) - node.lineno < 60, f"{path}:{node.lineno}: {node.name}"


FRAGMENT = re.compile(
    r"(By|For|From|At|On|In|Of|To|With|Without|Within|Between|Up to|Until|After|Before|Once|When|Where|If|As|How|Why|"
    r"What|Which|Who|Whose|That|Those|These|They|Them|There|It|Its|Not|And|Or|But|So|This(?! \w+'s)|"
    r"(All|Any|One|Some) (of|that|there|more|who)|The same (of|for|to|with|where|as|on|by|in|but))\b"
)
"""Beginnings of docstrings whose noun or verb stands elsewhere, if anywhere."""


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring: of modules, classes and functions, and those below an assignment. A test's own
    is none of them, since it goes on where the test's name ends."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for holder in ast.walk(node):
        body = getattr(holder, "body", None)
        for before, child in zip([None, *body], body, strict=False) if isinstance(body, list) else ():
            is_first = before is None and isinstance(holder, holders)
            if is_first and getattr(holder, "name", "").startswith("test_"):
                continue
            match child:
                case ast.Expr(ast.Constant(str(text))) if is_first or isinstance(before, (ast.Assign, ast.AnnAssign)):
                    yield child.lineno, text


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """So that each can be read alone: "Rows of each kind", not "By kind"."""
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in python_files()
        for line, text in docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if FRAGMENT.match(text)
    ]
    assert not fragments, "\n".join(fragments)
