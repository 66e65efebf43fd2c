"""Reading of a request's body into checked fields."""

import logging
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec

from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.call import Call
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.served_model import ServedModel

logger = logging.getLogger("nanovllm.serve")
_MOST_NAMES = 64
_ONLY_ABOUT = frozenset(
    "id object status name description strict cache_control citations annotations logprobs signature data "
    "url detail media_type file_id filename phase caller".split()
)
"""Fields inside of others that are about these, or belong to what is left out and named as a whole."""


def read(model: ServedModel, call: Call, kind: type[api.Given], body: dict[str, Any]) -> api.Given:
    """The fields of a request; a header names those that mean nothing here. Raises ApiError."""
    fields, ignored = api.read(kind, body)
    inner: dict[str, None] = {}
    _find_unknown(kind, body, "", inner)
    note_ignored(model.options, call, *ignored, *inner)
    model.check_name(fields.model)
    return fields


def _find_unknown(kind: type[msgspec.Struct], body: dict[str, Any], path: str, found: dict[str, None]) -> None:
    """Adds the names of fields that the structs inside of `kind` do not have."""
    for name, (inner, known) in _structs(kind).items():
        value = body.get(name)
        for each in value if isinstance(value, list) else (value,):
            if not isinstance(each, dict) or len(found) >= _MOST_NAMES:
                continue
            if (kinds := getattr(inner, "kinds", None)) is not None and str(each.get("type")) not in kinds:
                continue  # left out as a whole
            for key in each.keys() - known:
                if each[key] is not None:
                    found[f"{path}{name}.{key}"[:100]] = None
            _find_unknown(inner, each, f"{path}{name}.", found)


@cache
def _structs(kind: type[msgspec.Struct]) -> dict[str, tuple[type[msgspec.Struct], frozenset[str]]]:
    """Fields of a struct that hold a struct, or a list of some: its type, and the names that say nothing new in it."""
    inner = {name: _struct_in(hint) for name, hint in get_type_hints(kind).items()}
    return {name: (each, _ONLY_ABOUT.union(each.__struct_fields__)) for name, each in inner.items() if each is not None}


def _struct_in(hint: Any) -> type[msgspec.Struct] | None:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint
    return next((found for each in get_args(hint) if (found := _struct_in(each)) is not None), None)


def note_ignored(options: ServeOptions, call: Call, *ignored: str) -> None:
    """Names in a header what of a request nothing is done with. Raises ApiError under --strict-fields."""
    if ignored and options.strict_fields:
        raise bad_request(f"{ignored[0]}: unknown field (--strict-fields)", ignored[0], "unknown_field")
    if ignored:
        text = "".join(each if " " <= each <= "~" else "?" for each in ", ".join(ignored)[:500])
        logger.debug("request %s: ignored fields: %s", call.request_id, text)
        call.notes.append((b"x-ignored-fields", text.encode()))
