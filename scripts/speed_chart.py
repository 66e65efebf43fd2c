#!/usr/bin/env python3
"""Draws docs/speed.svg from the table of docs/performance.md, docs/speed-short.svg from README's: times vLLM's speed.

    python scripts/speed_chart.py            writes them
"""

import math
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHART, SHORT = ROOT / "docs" / "speed.svg", ROOT / "docs" / "speed-short.svg"
PAGES = {CHART: (ROOT / "docs" / "performance.md", "Figures"), SHORT: (ROOT / "README.md", "Speed")}

BAR_WIDTH, LINE, TOP = 330, 19, 26
LETTER = 6.3  # width of one, on average
LEAST, MOST = 0.5, 9.0
TICKS = (0.5, 1, 2, 4, 8)
STYLE = """
  text { font: 11.5px system-ui, sans-serif; fill: #24292f }
  .grid { stroke: #8c959f; stroke-opacity: .4 } .one { stroke: #57606a }
  .faster { fill: #1a7f37 } .slower { fill: #bc4c00 }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .one { stroke: #9da7b3 } .faster { fill: #3fb950 } }
"""


class Bar(NamedTuple):
    work: str
    ratio: float
    """Our speed over vLLM's."""


def speed_rows(page: str, title: str) -> list[list[str]]:
    """Cells of the table below a title: work, limit, vLLM, nanovllm, share."""
    table = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    return [row for row in rows if len(row) == 5 and row[0].strip() != "work" and not row[0].startswith("-")]


def bars(rows: list[list[str]]) -> Iterator[Bar]:
    """Bars of the rows that have a figure of vLLM; cells of two figures give two."""
    for work, _, theirs, ours, _ in rows:
        if theirs == "–":
            continue
        is_time = re.search(r"\d m?s$", theirs) is not None
        head, colon, parts = work.rpartition(": ") if ";" in work else ("", "", work)
        figures = zip(parts.split("; "), theirs.split("; "), ours.split("; "), strict=True)
        for name, *pair in figures:
            they, we = (float(re.sub(r"[^0-9.]", "", figure)) for figure in pair)
            yield Bar(head + colon + name, they / we if is_time else we / they)


def draw(found: list[Bar]) -> str:
    """The SVG: one bar a row, on a logarithmic axis that begins at equal speed."""
    text_width = round(LETTER * max(len(work) for work, _ in found)) + 16

    def x(ratio: float) -> float:
        return text_width + BAR_WIDTH * math.log2(min(ratio, MOST) / LEAST) / math.log2(MOST / LEAST)

    height = TOP + LINE * len(found) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {text_width + BAR_WIDTH + 60} {height}" role="img">',
        f"<title>Times vLLM's speed</title><style>{STYLE}</style>",
        f'<text x="{text_width - 28}" y="{TOP - 11}" text-anchor="end">times vLLM\'s speed</text>',
    ]
    for tick in TICKS:
        kind = "one" if tick == 1 else "grid"
        lines.append(f'<line class="{kind}" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP - 6}" y2="{height - 8}"/>')
        lines.append(f'<text x="{x(tick):.1f}" y="{TOP - 11}" text-anchor="middle">{tick:g} x</text>')
    for n, (work, ratio) in enumerate(found):
        y, kind = TOP + LINE * n, "faster" if ratio >= 1 else "slower"
        left, right = sorted((x(1), x(ratio)))
        lines.append(f'<text x="{text_width - 8}" y="{y + 11}" text-anchor="end">{escape(work)}</text>')
        lines.append(f'<rect class="{kind}" x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="13" rx="2"/>')
        lines.append(f'<text x="{max(right, x(1)) + 5:.1f}" y="{y + 11}">{ratio:.2f}</text>')
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    for path, (page, title) in PAGES.items():
        path.write_text(draw(list(bars(speed_rows(page.read_text(encoding="utf-8"), title)))), encoding="utf-8")


if __name__ == "__main__":
    main()
