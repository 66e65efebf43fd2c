"""Options of the server, beside the engine's."""

import importlib.util
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanovllm.errors import Bound, near_miss, option, refuse, shown

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Entries of generation_config.json that requests without them get."""

_SECONDS: Bound = (lambda value: 0 <= value < math.inf, "a number >= 0")
_ORIGIN = re.compile(r"[\w+.-]+://[^/\s]+/?|\*|null")
_FILE: Bound = (lambda value: Path(value).is_file(), "a file")
_DEFAULTS: Bound = (
    lambda value: value in ("auto", "vllm") or (Path(value) / "generation_config.json").is_file(),
    "'auto', 'vllm' or a folder with generation_config.json",
)


@dataclass(frozen=True)
class ServeOptions:
    """Options of `nanovllm serve`; on the command line with dashes."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = option(8000, (lambda value: 0 <= value < 65536, "in 0..65535"))
    """Port to listen on; 0: any free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port."""
    root_path: str = ""
    """Prefix under which a proxy shows the server, such as /llm; every path is served with and without it."""
    ssl_keyfile: str | None = option(None, _FILE)
    """Private key of ssl_certfile, a PEM file."""
    ssl_certfile: str | None = option(None, _FILE)
    """Certificate for HTTPS, a PEM file."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server, such as https://your.page; none by default. "*": all."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: tuple[str, ...] = option((), (all, "names that are not empty"))
    """Names that requests may use for the model; the first is shown. "*": any name. Default: the model's own name."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters that requests may name as their model: name=folder, each. Needs enable_lora (docs/adapters.md)."""
    max_num_queued_reqs: int | None = option(None, (lambda value: value >= 1, ">= 1"))
    """Completions in flight from which on new requests get a 503; the last one accepted may exceed it. Default:
    4 * max_num_seqs + 512."""
    max_waiting_per_key: int | None = option(None, (lambda value: value >= 0, ">= 0"))
    """Maximum completions of one API key that may wait, beyond max_num_seqs; further requests get a 429. Default: half
    of the queue, or all of it with a single key."""
    request_timeout: float | None = option(None, _SECONDS)
    """Seconds after which a request is aborted; off by default."""
    weight_update_timeout: float = option(600.0, (lambda value: value >= 0, "a number >= 0, or inf"))
    """Seconds that requests wait for new weights while the trainer is silent. Then they get a 503 until an update
    succeeds. inf: no limit."""
    shutdown_timeout: float = option(30.0, _SECONDS)
    """Seconds that running requests get to finish after SIGTERM."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no tokenizer is loaded, and requests with text are refused."""
    chat_template: str | None = option(None, _FILE)
    """File with a chat template that replaces the model's."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, unless a request sets them."""
    trust_request_chat_template: bool = False
    """Allow requests to contain chat templates."""
    trust_special_tokens: bool = False
    """Treat control tokens spelled out in a message as tokens, not as text."""
    generation_config: str = option("auto", _DEFAULTS)
    """"auto": sampling defaults from the model's generation_config.json; "vllm": none; or a folder with such a file."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults that replace the model's."""
    tool_call_parser: str = "auto"
    """"auto": chosen by the chat template; "none"; or the name of a parser."""
    reasoning_parser: str = "auto"
    """"auto": chosen by the chat template; "none"; or a kind: "think" ..."""
    strict_fields: bool = False
    """Refuse requests with unknown fields."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that receives a span per request. Needs the extra otel."""
    log_format: str = option("text", (lambda value: value in ("text", "json"), "'text' or 'json'"))
    """"text" or "json"."""
    disable_log_stats: bool = False
    """Do not log a line of totals every 10 s."""
    log_prompts: bool = False
    """Log prompts."""
    ui: bool = True
    """Serve the chat page at /."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            holds, bound = each.metadata.get("bound", (None, ""))
            if value is not None and holds is not None and not holds(value):
                refuse(each.name, value, bound)
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path={self.root_path!r}: must begin with /")
        if wrong := [origin for origin in self.allowed_origins if not _ORIGIN.fullmatch(origin)]:
            refuse("allowed_origins", wrong[0], "an origin such as https://your.page, or *")
        if unknown := [*self.override_generation_config.keys() - {*SAMPLING_DEFAULTS}]:
            hint = near_miss(unknown[0], SAMPLING_DEFAULTS) or f"; must be one of {', '.join(SAMPLING_DEFAULTS)}"
            raise ValueError(f"override_generation_config: unknown entry {shown(unknown[0])}{hint}")
        if wrong := [entry for entry in self.lora_modules if not all(entry.partition("="))]:
            refuse("lora_modules", wrong[0], "name=folder")
        if self.max_waiting_per_key is not None and not self.api_keys:
            raise ValueError("max_waiting_per_key: needs api_keys")
        if self.otlp_traces_endpoint is not None:
            _check_collector(self.otlp_traces_endpoint)
        if not all((*self.api_keys, *self.admin_api_keys)):
            raise ValueError("api_keys, admin_api_keys: must hold no empty key")
        if not set(self.api_keys).isdisjoint(self.admin_api_keys):
            raise ValueError("admin_api_keys: must be other keys than api_keys")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile: must be given together")


def _check_collector(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"otlp_traces_endpoint={shown(url)}: must be the http URL of a collector")
    found = None
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    if found is None:
        raise ValueError("otlp_traces_endpoint: needs pip install 'nanovllm[otel]'")
