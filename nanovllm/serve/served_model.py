"""The model as requests see it: its names, its text, and what the engines say of themselves."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nanovllm
from nanovllm.engine.engine_state import LoadedAdapter
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import ApiError
from nanovllm.serve.options import SAMPLING_DEFAULTS, ServeOptions
from nanovllm.serve.parsers import OutputParser
from nanovllm.text.checkpoint import CheckpointTokenizer, read_json
from nanovllm.text.no_tokenizer import NoTokenizer

ANY_NAME = "*"
"""Served name that stands for all."""
_OTHER_RUNNER = {
    "generate": "this server computes embeddings (--runner pooling) and generates no text; use /v1/embeddings",
    "pooling": "this server generates text; start it with --runner pooling for embeddings",
}
"""Refusals of an endpoint, by the runner that it needs."""


class ServedModel:
    """The one model of the server."""

    tokenizer: CheckpointTokenizer
    parser: OutputParser

    def __init__(
        self, path: str, options: ServeOptions, adapters: Callable[[], Mapping[str, LoadedAdapter]] = dict
    ) -> None:
        """`path`: as the command names it. `adapters`: those that requests may name now, by name, which goes before
        the model's own. `tokenizer` and `parser` come with `read_text`."""
        self.path, self.options, self.adapters = path, options, adapters
        self.names = tuple(name for name in options.served_model_name if name != ANY_NAME) or (path,)
        self.name = self.names[0]
        self.created = int(time.time())
        self.fingerprint = f"nanovllm-{nanovllm.__version__}"
        self.info: dict[str, Any] = {}
        """Facts about the engines (host/program.py), once they and the tokenizer are there."""
        self.defaults: dict[str, Any] = {}
        """Sampling defaults for what requests leave open."""
        self.default_max_tokens: int | None = None

    @property
    def public_name(self) -> str:
        """Name without the folders that it is in, for those who need no key."""
        return Path(self.name).resolve().name if Path(self.name).is_dir() else self.name

    def read_text(self, folder: str) -> None:
        """Reads tokenizer, templates and sampling defaults. Raises ValueError and OSError naming what is wrong."""
        self._read_defaults(folder)
        options = self.options
        has_text = not options.skip_tokenizer_init
        self.tokenizer = CheckpointTokenizer(folder, options.chat_template) if has_text else NoTokenizer()
        _ = self.tokenizer.longest_token
        self.parser = OutputParser(self.tokenizer, options.tool_call_parser, options.reasoning_parser)

    def _read_defaults(self, folder: str) -> None:
        wanted = self.options.generation_config
        path = Path(folder if wanted == "auto" else wanted) / "generation_config.json"
        found = ({} if wanted == "vllm" else read_json(path)) | self.options.override_generation_config
        self.defaults = {name: found[name] for name in SAMPLING_DEFAULTS if found.get(name) is not None}
        self.default_max_tokens = self.defaults.pop("max_new_tokens", None)
        try:
            SamplingParams(**self.defaults, max_tokens=1 if (most := self.default_max_tokens) is None else most)
        except ValueError as error:
            raise ValueError(f"generation_config={wanted!r}, override_generation_config: {error}") from None

    def require_runner(self, runner: str) -> None:
        """Raises ApiError (400) where the engines run the model otherwise; "": any way will do."""
        if runner and self.info.get("runner", runner) != runner:
            raise ApiError(400, _OTHER_RUNNER[runner], "wrong_runner")

    @property
    def all_names(self) -> tuple[str, ...]:
        """The model's names, then those of its adapters."""
        return tuple(dict.fromkeys((*self.names, *self.adapters())))

    def adapter_of(self, name: str | None) -> str | None:
        """Digest of the adapter that a request asks for as its model. Raises ApiError as `check_name`: it may have been
        removed since the name was checked."""
        found = self.check_name(name)
        return None if found is None else found.digest

    def check_name(self, name: Any) -> LoadedAdapter | None:
        """The adapter that a request asks for, if it does. Raises ApiError (404) where it asks for another model."""
        found = self.adapters().get(name or "")
        known = found is not None or name is None or name in self.names
        if not known and ANY_NAME not in self.options.served_model_name:
            shown = str(name)[:200]
            text = f"The model `{shown}` does not exist; this server has `{self.name}`"
            raise ApiError(404, text, "model_not_found", "model")
        return found
