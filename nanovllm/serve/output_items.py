"""The last output items of the Responses API, for requests that name them by their ids."""

from typing import Any

import msgspec

from nanovllm.serve import limits


class OutputItems:
    """Items by API key and id; the oldest make room for new ones. Read from any thread."""

    def __init__(self) -> None:
        self._items: dict[tuple[int | None, str], bytes] = {}
        self._bytes = 0

    def keep(self, key: int | None, items: list[dict[str, Any]]) -> None:
        """Keeps the output of an answer to a request with this key (its index)."""
        for item in items:
            place, data = (key, item["id"]), msgspec.json.encode(item)
            self._drop(place)
            self._items[place] = data
            self._bytes += _ITEM_BYTES + len(data)
        while self._bytes > limits.OUTPUT_ITEMS_BYTES:
            self._drop(next(iter(self._items)))

    def _drop(self, place: tuple[int | None, str]) -> None:
        if (data := self._items.pop(place, None)) is not None:
            self._bytes -= _ITEM_BYTES + len(data)

    def find(self, key: int | None, item_id: str) -> dict[str, Any] | None:
        data = self._items.get((key, item_id))
        return None if data is None else msgspec.json.decode(data, type=dict[str, Any])


_ITEM_BYTES = 300
"""About what an item takes beside its text."""
