"""Hook of mkdocs: a link from a page to a file outside of docs/, which a site does not have, becomes its path."""

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns the page with each [words](../path) as words (`path`)."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", r"\1 (`\2`)", markdown)
