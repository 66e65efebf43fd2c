"""Bounds that a JSON schema sets to a text, as terms of a Lark terminal: for texts that are not written as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from nanovllm.engine.sampling.grammar_compiler import regex_term
from nanovllm.serve.parsers.text_grammar import ATOM

ANYTHING = r"(?:.|\n)*"
_DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_CLOCK})"
_DAYS = r"(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_HOURS = r"T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_WORD = "[0-9A-Fa-f]{1,4}"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": rf"{_ATEXT}(?:\.{_ATEXT})*@{_LABEL}(?:\.{_LABEL})*",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [f"(?:{_WORD}:){{7}}{_WORD}", f"::(?:{_WORD}(?::{_WORD}){{0,6}})?"]
        + [f"{_WORD}(?::{_WORD}){{{i}}}::(?:{_WORD}(?::{_WORD}){{0,{5 - i}}})?" for i in range(6)]
        + [f"{_WORD}(?::{_WORD}){{6}}::"]
    ),
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+",
}
"""Formats of texts: those that llguidance knows in JSON, with times as in RFC 3339."""


def text_terms(schema: Mapping[str, Any], strict: bool) -> list[str]:
    """Terms that a text must match each, from one schema's own entries. Raises ValueError for what no grammar can say,
    unless `strict` is False: then that is left out."""
    fixed = [schema["const"]] if "const" in schema else schema.get("enum")
    terms = []
    if isinstance(fixed, list):
        terms.append(f"({' | '.join(json.dumps(each) for each in fixed if isinstance(each, str))})")
    least, most = (schema.get(name) for name in ("minLength", "maxLength"))
    if isinstance(least, int) or isinstance(most, int):
        terms.append(rf"/(?:.|\n){{{least or 0},{'' if most is None else most}}}/")
    try:
        if isinstance(pattern := schema.get("pattern"), str):
            terms.append(regex_term(_whole(pattern)))
        if (name := schema.get("format")) is not None:
            if name not in _FORMATS:
                raise ValueError(f"format={str(name)[:80]!r}: must be one of {', '.join(_FORMATS)}")
            terms.append(regex_term(_FORMATS[name]))
    except ValueError:
        if strict:
            raise
    return terms


def _whole(pattern: str) -> str:
    """The regular expression of the whole texts in which a pattern is found. Raises ValueError for an anchor that is
    not at an end of it."""
    choices: list[list[str]] = [[]]
    depth = 0
    for found in ATOM.finditer(pattern):
        operator = found["operator"] or ""
        depth += operator.startswith("(") - (operator == ")")
        if operator == "|" and not depth:
            choices.append([])
        else:
            choices[-1].append(found[0])
    whole = []
    for atoms in choices:
        begin, end = (atoms[:1] == ["^"]), (atoms[-1:] == ["$"])
        inside = atoms[begin : len(atoms) - end]
        if {"^", "$"} & {*inside}:
            raise ValueError(f"pattern={pattern[:80]!r}: must have ^ and $ at its ends alone")
        whole.append(("" if begin else ANYTHING) + f"(?:{''.join(inside)})" + ("" if end else ANYTHING))
    return "|".join(whole)
