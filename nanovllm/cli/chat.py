"""`nanovllm chat [MODEL | --url URL]`: a chat in the terminal."""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from nanovllm.cli.connect import answer_lines, asking_parser, piped_text, server_url, stream_answer
from nanovllm.cli.options import Parser

_HELP = """/reset         begins a new chat
/system TEXT   sets the system prompt and begins a new chat; without TEXT: none
/save FILE     writes the chat as JSON
/exit          ends; so does Ctrl-D. Ctrl-C stops an answer"""


def make_parser() -> Parser:
    parser = asking_parser("chat", "Chats with a model. Piped input is one message: echo hi | nanovllm chat -q")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument("--no-thinking", action="store_true", help="turn reasoning off in the chat template")
    return parser


class Chat:
    """The messages so far, and the answer that is being shown."""

    def __init__(self, url: str, given: argparse.Namespace) -> None:
        self._url, self._given = url, given
        self._styled = sys.stdout.isatty()
        self._system = given.system
        self.messages: list[dict[str, str]] = []
        self._text, self._num_tokens = "", 0
        self._times: list[float] = []
        """Seconds from the request to each piece of the answer."""
        self.reset()

    def reset(self) -> None:
        self.messages[:] = [{"role": "system", "content": self._system}] if self._system else []

    def ask(self, text: str) -> None:
        """Prints the answer as it comes; Ctrl-C keeps what there is of it. Raises ServerError."""
        self.messages.append({"role": "user", "content": text})
        self._text, self._num_tokens, self._times = "", 0, []
        try:
            asyncio.run(self._stream())
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        except OSError:
            self.messages.pop()
            raise
        finally:
            print("\x1b[0m" if self._styled else "")
        self.messages.append({"role": "assistant", "content": self._text})
        if not self._given.quiet:
            begin, end = (self._times[0], self._times[-1]) if self._times else (0.0, 0.0)
            rate = max(self._num_tokens - 1, 0) / (end - begin) if end > begin else 0.0
            print(f"[{self._num_tokens} tokens, {rate:.1f} tok/s, first token after {begin:.3f} s]", file=sys.stderr)

    async def _stream(self) -> None:
        body: dict[str, Any] = {"messages": self.messages, "stream_options": {"include_usage": True}}
        async for seconds, event in stream_answer(self._url, self._given, "/v1/chat/completions", body):
            if event.get("usage"):
                self._num_tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices") or ():
                self._show(choice["delta"], seconds)

    def _show(self, delta: dict[str, Any], seconds: float) -> None:
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        self._text += text
        if thought or text:
            self._times.append(seconds)
            self._num_tokens += 1
        if not self._given.quiet:
            self._write(thought, "\x1b[2m")
        functions = [call.get("function", {}) for call in delta.get("tool_calls") or ()]
        calls = [(each.get("name") or "") + (each.get("arguments") or "") for each in functions]
        self._write(text + "".join(calls), "\x1b[0m")

    def _write(self, text: str, style: str) -> None:
        if text:
            print(style + text if self._styled else text, end="", flush=True)

    def answer(self, line: str) -> bool:
        """Asks a line, or runs one such as /reset; returns whether the chat goes on."""
        name, _, rest = line.partition(" ")
        if not line.startswith("/"):
            self.ask(line)
        elif name in ("/exit", "/quit"):
            return False
        elif name == "/reset":
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


def run(parser: Parser, arguments: list[str]) -> int:
    given = parser.parse_args(arguments)
    piped = None if sys.stdin.isatty() else piped_text().strip()
    if piped == "":
        raise ValueError("stdin is empty: nothing to ask")
    if given.no_thinking:
        template = {"enable_thinking": False, **given.extra_body.get("chat_template_kwargs", {})}
        given.extra_body = {**given.extra_body, "chat_template_kwargs": template}
    with server_url(given, quiet=given.quiet) as url:
        chat = Chat(url, given)
        if piped is None:
            print("/help lists the commands; Ctrl-D ends.", file=sys.stderr)
            answer_lines(chat.answer)
        else:
            chat.ask(piped)
    return 0
