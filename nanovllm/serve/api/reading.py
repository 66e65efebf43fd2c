"""Reading of a request's body into checked fields."""

import logging
from typing import Any

from nanovllm.serve.api import fields as api
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.call import Call
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.served_model import ServedModel

logger = logging.getLogger("nanovllm.serve")


def read(model: ServedModel, call: Call, kind: type[api.Given], body: dict[str, Any]) -> api.Given:
    """The fields of a request; a header names those that mean nothing here. Raises ApiError."""
    fields, ignored = api.read(kind, body)
    note_ignored(model.options, call, ignored)
    model.check_name(fields.model)
    return fields


def note_ignored(options: ServeOptions, call: Call, ignored: list[str]) -> None:
    """Names in a header what of a request nothing is done with. Raises ApiError under --strict-fields."""
    if ignored and options.strict_fields:
        raise bad_request(f"{ignored[0]}: unknown field (--strict-fields)", ignored[0], "unknown_field")
    if ignored:
        text = "".join(each if " " <= each <= "~" else "?" for each in ", ".join(ignored)[:500])
        logger.debug("request %s: ignored fields: %s", call.request_id, text)
        call.notes.append((b"x-ignored-fields", text.encode()))
