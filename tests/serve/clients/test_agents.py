"""Coding agents against the server: each takes a turn with a tool. NODE_PATH names a folder in which npm has installed
@anthropic-ai/claude-code, whose install.cjs has run, and @openai/codex.

The demo model is too silly to call a tool, so a proxy narrows the schema of one and asks for a call of it, once. The
call then comes from the server's own grammar and stream. The proxy also cuts long texts: a CPU would read an agent's
40,000 tokens for minutes.
"""

import http.client
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from serving import DEMO, Server, ready_server

SECRET = "the harbour is blue"
COMMAND = "cat note.txt"
STRICT = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('a system message must come first') }}{%- endif %}{%- endfor %}"
)
"""Beginning of a template that takes system messages as those of many models do."""
CODEX = {
    "model_provider": "here", "model_providers.here.name": "here", "model_providers.here.wire_api": "responses",
    "model_providers.here.env_key": "KEY",
}  # fmt: skip


def program(name: str) -> str:
    found = Path(os.environ.get("NODE_PATH", "")) / ".bin" / name
    if not found.exists() or shutil.which("node") is None:
        pytest.skip(f"{name} is not installed below NODE_PATH")
    return str(found)


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server; it makes the model call `tool` until there is a result, and none from then on."""

    daemon_threads = True

    def __init__(self, server: Server, tool: str, arguments: dict[str, str]) -> None:
        self.target, self.tool, self.arguments = server.port, tool, arguments
        self.bodies: list[dict[str, Any]] = []
        self.refusals: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def changed(self, body: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(body.get("messages", body.get("input", "")))
        body = _cut(body)
        own = [tool for tool in body.get("tools", ()) if tool.get("name") == self.tool]
        if "tools" in body:
            body["tools"] = own
        is_messages = "messages" in body
        if not own:
            return body
        if '"tool_result"' in text or '_output"' in text:
            return body | {"tool_choice": {"type": "none"} if is_messages else "none"}
        properties = {name: {"type": "string", "enum": [value]} for name, value in self.arguments.items()}
        schema = {
            "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
        }  # fmt: skip
        field, kind = ("input_schema", "tool") if is_messages else ("parameters", "function")
        own[0] |= {field: schema}
        return body | {"tool_choice": {"type": kind, "name": self.tool}}


def _cut(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _cut(each) for name, each in value.items()}
    return [*map(_cut, value)] if isinstance(value, list) else value[:300] if isinstance(value, str) else value


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _pass_on(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length", 0)))
        if data:
            self.server.bodies.append(body := json.loads(data))
            data = json.dumps(self.server.changed(body)).encode()
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=300)
        headers = {"content-type": "application/json"} | {
            name: value for name, value in self.headers.items() if name.lower().startswith("anthropic")
        }
        upstream.request(self.command, self.path, data or None, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
        self.send_header("connection", "close")
        self.end_headers()
        while piece := answer.read1(1 << 16):
            if answer.status >= 400 and self.path != "/v1/models":
                self.server.refusals.append(piece)
            self.wfile.write(piece)

    do_GET = do_POST = do_HEAD = _pass_on


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model with a context that holds an agent's prompt."""
    folder = tmp_path_factory.mktemp("agents")
    model = folder / "model"
    shutil.copytree(DEMO, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(STRICT + template)
    with ready_server(folder, "--num-kvcache-blocks", "16384", model=model) as started:
        yield started
        assert "Traceback" not in started.log


def run(proxy: Proxy, folder: Path, *command: str, **environment: str) -> str:
    """Output of an agent's turn in a folder of its own with a note."""
    home = folder / "home"
    home.mkdir(parents=True)
    (folder / "note.txt").write_text(SECRET + "\n")
    done = subprocess.run(
        command, cwd=folder, env={"PATH": os.environ["PATH"], "HOME": str(home), **environment}, timeout=150,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert not proxy.refusals, proxy.refusals
    return done.stdout


def test_claude_code(agents_server: Server, tmp_path: Path) -> None:
    proxy = Proxy(agents_server, "Bash", {"command": COMMAND, "description": "reads the note"})
    settings = {
        "ANTHROPIC_BASE_URL": proxy.url, "ANTHROPIC_AUTH_TOKEN": "x", "ANTHROPIC_MODEL": "demo",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
    }  # fmt: skip
    command = (program("claude"), "-p", "What does the note say?", "--allowedTools", "Bash", "--output-format", "json")
    result = json.loads(run(proxy, tmp_path / "claude", *command, **settings))
    assert (result["is_error"], result["num_turns"]) == (False, 2)
    results = [block for body in proxy.bodies for message in body["messages"] for block in message["content"]
               if isinstance(block, dict) and block["type"] == "tool_result"]  # fmt: skip
    assert SECRET in json.dumps(results[-1])


def test_codex(agents_server: Server, tmp_path: Path) -> None:
    proxy = Proxy(agents_server, "exec_command", {"cmd": COMMAND})
    options = CODEX | {"model": "demo", "model_providers.here.base_url": proxy.url + "/v1"}
    pairs = [part for name, value in options.items() for part in ("-c", f'{name}="{value}"')]
    command = (program("codex"), "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *pairs)
    run(proxy, tmp_path / "codex", *command, "What does the note say?", KEY="x")
    outputs = [item for body in proxy.bodies for item in body["input"] if item["type"] == "function_call_output"]
    assert SECRET in json.dumps(outputs[-1])
