"""`nanovllm serve [MODEL]`."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanovllm.cli.config_file import parse_with_config
from nanovllm.cli.options import Parser, add_fields, add_fixed, chosen
from nanovllm.config import DEMO_MODEL, EngineConfig
from nanovllm.models.registry import is_hub_id
from nanovllm.serve.options import ServeOptions
from nanovllm.vllm_options import FIXED, translated

ENGINE_GROUPS = {
    "tokenizer": "model and device",
    "max_model_len": "batching and scheduling",
    "gpu_memory_utilization": "memory",
    "attention_backend": "kernels, overlap, failures",
}
_SERVER_GROUPS = {
    "host": "listening",
    "served_model_name": "requests",
    "chat_template": "chats, tools, defaults of sampling",
    "strict_fields": "log and page",
}
_SWITCHES = ("disable_fastapi_docs", "disable_log_requests", "disable_uvicorn_access_log")
SERVER_FIXED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "api_server_count": (("1",), "one process serves HTTP"),
    "chat_template_content_format": (("auto",), "it is detected from the template"),
    **dict.fromkeys(_SWITCHES, (("true", "false"), "")),
    "enable_auto_tool_choice": (("true",), "requests choose with tool_choice"),
    "enable_force_include_usage": (("false",), "set stream_options in requests"),
    "enable_log_outputs": (("false",), "answers are never logged"),
    "enable_log_requests": (("true",), "requests are always logged, without prompts"),
    "enable_prompt_tokens_details": (("true",), "usage always includes them"),
    "enable_request_id_headers": (("true",), "every answer has x-request-id"),
    "enable_server_load_tracking": (("true",), "/load is always available"),
    "headless": (("false",), "data_parallel_backend=ray places replicas on other machines"),
    "max_queued_requests": ((), "use max_num_queued_reqs"),
    "middleware": ((), "put a proxy before the server"),
    "response_role": (("assistant",), "chat templates have no other role for answers"),
    "return_tokens_as_token_ids": (("false",), "set it in requests"),
    "stream_interval": (("1",), "each step's tokens are sent at once"),
    "tool_parser_plugin": ((), "use tool_call_parser"),
    **dict.fromkeys(("uvicorn_log_level", "weight_transfer_config"), (("*",), "")),
}
"""vLLM's options of its server that are none here, as vllm_options.FIXED has those of the engine."""
SERVER_VALUES: Mapping[str, Mapping[str, str]] = {
    "reasoning_parser": {
        **dict.fromkeys(("deepseek_r1", "ernie45", "glm45", "hunyuan_a13b", "minimax_m2", "qwen3"), "think"),
        "openai_gptoss": "harmony",
    },
    "tool_call_parser": {
        "openai": "harmony", "qwen3_xml": "qwen3_coder", "pythonic": "llama4_pythonic",
        "ernie45": "hermes", **dict.fromkeys(("glm47", "poolside_v1"), "glm45"),
    },
}  # fmt: skip


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm serve",
        description="Serves a model with OpenAI's API and a chat page at /. Defaults are in [brackets]. "
        "docs/options.md and docs/command-line.md have the full descriptions.",
        epilog="N may be 4k (4,000) or 4K (4,096). --config supplies options that are not given.",
    )
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file with options; the command line takes precedence")
    # skip_tokenizer_init is an option of the engine as well: one on the command line, for both
    add_fields(parser, ServeOptions, _SERVER_GROUPS, leave_out=["api_keys", "admin_api_keys", "skip_tokenizer_init"])
    text = "a key, or @FILE with one per line; repeatable; also NANOVLLM_API_KEY"
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help=text)
    text = "key of the admin calls, which no other key opens; also NANOVLLM_ADMIN_API_KEY"
    parser.add_argument("--admin-api-key", action="append", default=[], metavar="KEY", help=text)
    add_fields(parser, EngineConfig, ENGINE_GROUPS, leave_out=["model", "max_queued_requests"])
    add_fixed(parser, {name: entry for name, entry in FIXED.items() if name not in ServeOptions.__dataclass_fields__})
    add_fixed(parser, SERVER_FIXED)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help="a folder with config.json and *.safetensors, a hub id, or demo, a small model in the package [demo]",
    )


def check_options(model: str, options: dict[str, Any], server: dict[str, Any]) -> None:
    """Raises ValueError or FileNotFoundError, before anything starts, for a mistake that needs no look at the model's
    files."""
    if server.get("lora_modules") and not options.get("enable_lora"):
        raise ValueError("lora_modules: needs enable_lora")
    is_hub_id(EngineConfig.from_options(model, **options))


def _api_keys(given: list[str], option: str, variable: str) -> tuple[str, ...]:
    """The keys of an option and of its environment variable. Raises ValueError for an entry that holds none: whoever
    sets one wants a server that asks for it."""
    named = [*((f"{option}={one!r}" if one.startswith("@") else option, one) for one in given)]
    if (set_outside := os.environ.get(variable)) is not None:
        named.append((variable, set_outside))
    keys: list[str] = []
    for name, one in named:
        try:
            found = Path(one[1:]).read_text(encoding="utf-8").split() if one.startswith("@") else [one.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: {getattr(error, 'strerror', None) or 'must be UTF-8'}") from None
        if not all(found) or not found:
            raise ValueError(f"{name}: holds no key; leave it out for a server without one")
        keys += found
    return tuple(keys)


def translated_options(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the engine and of the server that were given, by our names. Raises ValueError for one of vLLM's that
    has no meaning here."""
    fixed = {name: value for name, value in vars(given).items() if name in FIXED}
    own = {name: value for name, value in vars(given).items() if name in SERVER_FIXED}
    engine = translated({**chosen(given, EngineConfig), **fixed})
    return engine, translated({**chosen(given, ServeOptions), **own}, SERVER_FIXED, SERVER_VALUES)


def parse(parser: Parser, arguments: list[str]) -> tuple[str, dict[str, Any], ServeOptions]:
    """Model, options of the engine and options of the server that a command line asks for, checked as far as they can
    be without the model's files."""
    given = parse_with_config(parser, arguments)
    engine, server = translated_options(given)
    model = engine.pop("model", None)
    model = DEMO_MODEL if model is None else model
    check_options(model, engine, server)
    admin = _api_keys(given.admin_api_key, "--admin-api-key", "NANOVLLM_ADMIN_API_KEY")
    keys = _api_keys(given.api_key, "--api-key", "NANOVLLM_API_KEY")
    return model, engine, ServeOptions(**server, api_keys=keys, admin_api_keys=admin)


def run(parser: Parser, arguments: list[str]) -> int:
    """Serves until it is told to end."""
    served = parse(parser, arguments)
    from nanovllm.serve.lifecycle import serve

    return serve(*served)
