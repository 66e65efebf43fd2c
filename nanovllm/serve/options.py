"""Options of the server, beside the engine's."""

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanovllm.errors import refuse, shown


@dataclass(frozen=True)
class ServeOptions:
    """Options of `nanovllm serve`; on the command line with dashes."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead of host and port."""
    root_path: str = ""
    """Prefix under which a proxy shows the server, such as /llm; every path is served with and without it."""
    ssl_keyfile: str | None = None
    """Private key of ssl_certfile, a PEM file."""
    ssl_certfile: str | None = None
    """Certificate for HTTPS, a PEM file."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server, such as https://your.page; none by default."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use for the model; the first is shown. "*": any name. Default: the model's own name."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters that requests may name as their model: name=folder, each. Needs enable_lora (docs/adapters.md)."""
    max_num_queued_reqs: int | None = None
    """Completions in flight from which on new requests get a 503; the last one accepted may exceed it. Default:
    4 * max_num_seqs + 512."""
    max_waiting_per_key: int | None = None
    """Maximum completions of one API key that may wait, beyond max_num_seqs; further requests get a 429. Default: half
    of the queue, or all of it with a single key."""
    request_timeout: float | None = None
    """Seconds after which a request is aborted; off by default."""
    weight_update_timeout: float | None = 600.0
    """Seconds that requests wait for new weights while the trainer is silent. Then they get a 503 until an update
    succeeds. None: no limit."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no tokenizer is loaded, and requests with text are refused."""
    chat_template: str | None = None
    """File with a chat template that replaces the model's."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, unless a request sets them."""
    trust_request_chat_template: bool = False
    """Allow requests to contain chat templates."""
    trust_special_tokens: bool = False
    """Treat control tokens spelled out in a message as tokens, not as text."""
    generation_config: str = "auto"
    """"auto": sampling defaults from the model's generation_config.json; "vllm": none; or a folder with such a file."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults that replace the model's."""
    tool_call_parser: str = "auto"
    """"auto": chosen by the chat template; "none"; or the name of a parser."""
    reasoning_parser: str = "auto"
    """"auto": chosen by the chat template; "none"; or "think"."""
    strict_fields: bool = False
    """Refuse requests with unknown fields."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector that receives a span per request. Needs the extra otel."""
    log_format: str = "text"
    """"text" or "json"."""
    disable_log_stats: bool = False
    """Do not log a line of totals every 10 s."""
    log_prompts: bool = False
    """Log prompts."""
    ui: bool = True
    """Serve the chat page at /."""

    def __post_init__(self) -> None:
        for name in ("shutdown_timeout", "request_timeout", "weight_update_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: must be a number >= 0")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: must be in 0..65535")
        if self.root_path and not self.root_path.startswith("/"):
            raise ValueError(f"root_path={self.root_path!r}: must begin with /")
        for name, least in (("max_num_queued_reqs", 1), ("max_waiting_per_key", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}={value}: must be >= {least}")
        if wrong := [entry for entry in self.lora_modules if not all(entry.partition("="))]:
            refuse("lora_modules", wrong[0], "name=folder")
        if self.max_waiting_per_key is not None and not self.api_keys:
            raise ValueError("max_waiting_per_key: needs api_keys")
        if self.otlp_traces_endpoint is not None:
            _check_collector(self.otlp_traces_endpoint)
        if self.log_format not in ("text", "json"):
            raise ValueError(f"log_format={self.log_format!r}: must be 'text' or 'json'")
        if not all((*self.api_keys, *self.admin_api_keys)):
            raise ValueError("api_keys, admin_api_keys: must hold no empty key")
        if not set(self.api_keys).isdisjoint(self.admin_api_keys):
            raise ValueError("admin_api_keys: must be other keys than api_keys")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile: must be given together")
        for name in ("chat_template", "ssl_keyfile", "ssl_certfile"):
            if (file := getattr(self, name)) is not None and not Path(file).is_file():
                refuse(name, file, "a file")
        folder = self.generation_config
        if folder not in ("auto", "vllm") and not (Path(folder) / "generation_config.json").is_file():
            refuse("generation_config", folder, "'auto', 'vllm' or a folder with generation_config.json")


def _check_collector(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(f"otlp_traces_endpoint={shown(url)}: must be the http URL of a collector")
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ValueError("otlp_traces_endpoint: needs pip install 'nanovllm[otel]'")
