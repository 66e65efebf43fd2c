"""`nanovllm chat [MODEL | --url URL]`."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.cli.connect import add_sampling_options, add_server_options, sampling_fields, server_url
from nanovllm.cli.options import Parser

SUMMARY = "talk to a model in the terminal"
_HELP = """/reset         begins a new chat
/system TEXT   sets the system prompt and begins a new chat; without TEXT: none
/save FILE     writes the chat as JSON
/exit          ends; so does Ctrl-D. Ctrl-C stops an answer"""


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm chat",
        description="Talks to a model. What comes through a pipe is one message: echo hi | nanovllm chat -q",
    )
    add_server_options(parser)
    add_sampling_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--no-thinking", action="store_true", help="asks the chat template for answers at once")
    return parser


@dataclass
class Answer:
    """What has come so far."""

    text: str = ""
    num_tokens: int = 0
    begin: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0

    def summary(self) -> str:
        gaps = max(self.num_tokens - 1, 0)
        rate = gaps / (self.last - self.first) if self.last > self.first else 0.0
        first = self.first - self.begin if self.first else 0.0
        return f"{self.num_tokens} tokens, {rate:.1f} tok/s, first token after {first:.3f} s"


class Chat:
    """The messages, and how an answer is shown."""

    def __init__(self, url: str, given: argparse.Namespace) -> None:
        self._url, self._given = url, given
        self._quiet = given.quiet
        self._styled = sys.stdout.isatty()
        self._system = given.system
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        self.messages[:] = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> None:
        """Prints the answer as it comes; Ctrl-C keeps what there is of it. Raises ServerError."""
        self.messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            asyncio.run(self._stream(answer))
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except OSError:
            self.messages.pop()
            raise
        finally:
            print("\x1b[0m" if self._styled else "")
        self.messages.append({"role": "assistant", "content": answer.text})
        if not self._quiet:
            print(f"[{answer.summary()}]", file=sys.stderr)

    async def _stream(self, answer: Answer) -> None:
        from nanovllm.cli.http_client import Client

        body = {
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling_fields(self._given),
        }
        if self._given.no_thinking:
            body["chat_template_kwargs"] = {"enable_thinking": False, **body.get("chat_template_kwargs", {})}
        async with Client(self._url, self._given.api_key) as client:
            body.setdefault("model", self._given.model_name or await client.model())
            answer.begin = time.perf_counter()
            async with client.stream("/v1/chat/completions", body) as events:
                async for now, event in events:
                    self._show(answer, now, event)

    def _show(self, answer: Answer, now: float, event: dict[str, Any]) -> None:
        if event.get("usage"):
            answer.num_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices") or ():
            delta = choice["delta"]
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = delta.get("content") or ""
            answer.text += text
            if thought or text:
                answer.first, answer.last = answer.first or now, now
                answer.num_tokens += 1
            if thought and not self._quiet:
                self._write(thought, "\x1b[2m")
            if text:
                self._write(text, "\x1b[0m")
            for call in delta.get("tool_calls") or ():
                function = call.get("function", {})
                self._write((function.get("name") or "") + (function.get("arguments") or ""), "\x1b[0m")

    def _write(self, text: str, style: str) -> None:
        sys.stdout.write(style + text if self._styled else text)
        sys.stdout.flush()

    def command(self, line: str) -> bool:
        """Does what a line such as /reset says; returns whether the chat goes on."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self.reset()
        elif name == "/system":
            self._system = rest.strip()
            self.reset()
        elif name == "/save" and rest.strip():
            text = json.dumps(self.messages, ensure_ascii=False, indent=1)
            Path(rest.strip()).write_text(text + "\n", encoding="utf-8")
        else:
            print(_HELP)
        return True


def _talk(chat: Chat) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)
    print("/help tells what there is; Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            if line.startswith("/"):
                if not chat.command(line):
                    return
            elif line:
                chat.ask(line)
        except OSError as error:
            print(error, file=sys.stderr)


def run(parser: Parser, arguments: list[str]) -> int:
    given = parser.parse_args(arguments)
    piped = None if sys.stdin.isatty() else sys.stdin.read().strip()
    if piped == "":
        raise ValueError("nothing came through the pipe")
    with server_url(given, quiet=given.quiet) as url:
        chat = Chat(url, given)
        if piped is None:
            _talk(chat)
        else:
            chat.ask(piped)
    return 0
