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
    """The address to listen on; 0.0.0.0 for all."""
    port: int = 8000
    """0: any that is free."""
    uds: str | None = None
    """A Unix socket's path, in place of host and port."""
    ssl_keyfile: str | None = None
    """The key of ssl_certfile, PEM."""
    ssl_certfile: str | None = None
    """Serve HTTPS with this certificate, PEM."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of pages whose browsers may call; none by default."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    served_model_name: tuple[str, ...] = ()
    """Names that requests may ask for; the first is the one shown. Default: the model's."""
    max_num_queued_reqs: int | None = None
    """Most completions in flight; beyond it requests get a 503. Default: 4 * max_num_seqs + 512."""
    max_waiting_per_key: int | None = None
    """Most completions of one API key in flight beyond max_num_seqs; then its requests get a 429. Default: with several
    keys half of the places that wait, with one all."""
    stream_interval: int = 1
    """Tokens of a chunk: more of them save clients work. The first token is never kept back."""
    request_timeout: float | None = None
    """Seconds after which a request is ended; off by default."""
    weight_update_timeout: float | None = 600.0
    """Seconds that requests wait for a trainer that calls no more. Then they get a 503 until an update succeeds; None:
    they wait without end."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get after SIGTERM."""
    skip_tokenizer_init: bool = False
    """Token ids in, token ids out: no tokenizer is read, and what needs text is refused."""
    chat_template: str | None = None
    """A file that takes the place of the model's chat template."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Given to the chat template where a request says nothing else."""
    trust_request_chat_template: bool = False
    """True: requests may bring chat templates."""
    trust_special_tokens: bool = False
    """True: a control token that a chat spells out is taken as the token."""
    generation_config: str = "auto"
    """"auto": sampling defaults of the model's generation_config.json; "vllm": none; else a folder that has one."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults in place of the model's."""
    tool_call_parser: str = "auto"
    """"auto": by the chat template; "none"; or the name of a family."""
    reasoning_parser: str = "auto"
    """"auto": by the chat template; "none"; or "think"."""
    strict_fields: bool = False
    """True: unknown fields of a request are an error."""
    otlp_traces_endpoint: str | None = None
    """An OpenTelemetry collector, which gets a span of each request. As http://localhost:4318; needs the extra otel."""
    log_format: str = "text"
    """"text" or "json"."""
    disable_log_stats: bool = False
    """True: no line of totals every 10 s."""
    log_prompts: bool = False
    """True: prompts are in the log."""
    ui: bool = True
    """Whether / is a chat page."""

    def __post_init__(self) -> None:
        for name in ("shutdown_timeout", "request_timeout", "weight_update_timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: must be a number >= 0")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port={self.port}: must be in 0..65535")
        if self.max_num_queued_reqs is not None and self.max_num_queued_reqs < 1:
            raise ValueError(f"max_num_queued_reqs={self.max_num_queued_reqs}: must be >= 1")
        if self.max_waiting_per_key is not None and self.max_waiting_per_key < 0:
            raise ValueError(f"max_waiting_per_key={self.max_waiting_per_key}: must be >= 0")
        if self.max_waiting_per_key is not None and not self.api_keys:
            raise ValueError("max_waiting_per_key: needs api_keys")
        if self.stream_interval < 1:
            raise ValueError(f"stream_interval={self.stream_interval}: must be >= 1")
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
