"""Stand-in for a tokenizer where requests bring token ids and get token ids."""

from collections.abc import Sequence
from typing import Any, NoReturn

from nanovllm.text.checkpoint import CheckpointTokenizer

_NEEDED = "must be token ids: there is no tokenizer (skip_tokenizer_init=True)"


class NoText:
    """Stand-in for a detokenizer: all text is empty."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class NoTokenizer(CheckpointTokenizer):
    """Refuses all text. Raises ValueError naming what must be token ids."""

    longest_token = 1  # type: ignore[assignment]
    eos_token_id = None  # type: ignore[assignment]
    has_chat_template = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.added_tokens_decoder = {}

    def __len__(self) -> int:
        return 0

    def encode_all(self, texts: list[str], add_special_tokens: bool = True) -> NoReturn:
        raise ValueError(f"prompt: {_NEEDED}")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, after: Sequence[int] = ()) -> str:
        return ""

    def token_text(self, token_id: int) -> None:
        return None

    def detokenizer(self, skip_special_tokens: bool = True, after: Sequence[int] = ()) -> Any:
        return NoText()

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def with_template(self, source: str) -> "CheckpointTokenizer":
        return self

    def _guard(self, with_tools: bool) -> NoReturn:
        raise ValueError(f"messages: {_NEEDED}")
