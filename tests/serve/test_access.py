"""Access to a server: keys, types of content, origins, names of hosts, TLS."""

import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
from serving import ASK, CHAT, JSON, OPENING, Server, raw, ready_server, refusal, streamed


@pytest.mark.parametrize("key", ["sesame", "from-file", "from-environment"])
def test_each_key_opens(impatient: Server, key: str) -> None:
    answer = httpx.post(impatient.url + CHAT, json=ASK, headers={"authorization": f"Bearer {key}"}, timeout=30)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value", [None, "Bearer ", "Bearer sesam", "Bearer sesame2", "sesame", "Basic sesame", "Bearer é"]
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/load", "/v1/nothing", "//v1/models", "/health/../v1/models"]
)
def test_no_way_past_the_key(impatient: Server, path: str, value: str | None) -> None:
    key = b"" if value is None else b"authorization: " + value.encode() + b"\r\n"
    for host in (b"a", b"a/health", b"a/health?x="):
        request = b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n%s\r\n" % (path.encode(), host, key)
        status, error = refusal(raw(impatient, request))
        assert (status, error["code"]) == (401, "invalid_api_key")


def test_refusal_in_the_form_of_the_endpoint(impatient: Server) -> None:
    error = httpx.post(impatient.url + "/v1/messages", json={}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")


def test_refused_before_the_body_is_read(impatient: Server) -> None:
    """And once: a second answer, to a body that never comes, would be taken for another request's."""
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=60) as connection:
        connection.sendall(OPENING + b"content-length: 1000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"
        rest = b""
        while data := connection.recv(1 << 16):
            rest += data
    assert b"HTTP/1.1" not in rest


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics", "/version", "/"])
def test_open_paths(impatient: Server, path: str) -> None:
    assert httpx.get(impatient.url + path).status_code == 200


def test_keys_are_not_logged(impatient: Server) -> None:
    assert not any(key in impatient.log for key in ("sesame", "from-file", "from-environment"))


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "a/json; application/json"])
def test_what_is_not_said_to_be_json_is_refused(client: httpx.Client, kind: str | None) -> None:
    """A page of another origin can send these without asking."""
    headers = {} if kind is None else {"content-type": kind}
    answer = client.post(CHAT, content=json.dumps(ASK).encode(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_body_that_is_packed_is_refused(client: httpx.Client) -> None:
    answer = client.post(CHAT, content=b"packed", headers={**JSON, "content-encoding": "gzip"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json"])
def test_types_of_json(client: httpx.Client, kind: str) -> None:
    answer = client.post(CHAT, content=json.dumps(ASK).encode(), headers={"content-type": kind})
    assert answer.status_code == 200


def test_cross_origin_is_closed(client: httpx.Client) -> None:
    headers = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    for path in ("/v1/models", "/health", "/"):
        for origin in ("https://elsewhere.example", "null", "http://localhost:1", "http://["):
            answer = client.get(path, headers={"origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_origin")
    asked = client.options(CHAT, headers=headers)
    assert asked.status_code == 403
    assert "access-control-allow-origin" not in asked.headers


def test_own_pages_may_call(client: httpx.Client) -> None:
    own = str(client.base_url).rstrip("/")
    assert client.get("/v1/models", headers={"origin": own}).status_code == 200
    proxied = {"origin": "https://chat.example", "sec-fetch-site": "same-origin"}
    assert client.get("/v1/models", headers=proxied).status_code == 200


@pytest.mark.parametrize("host", ["rebound.example", "a.example:80", "localhost.example", "10.0.0.1", "[::2]:80", ""])
def test_other_names_of_this_machine_are_refused(client: httpx.Client, host: str) -> None:
    """A page's own domain that leads here would make the page one of ours."""
    answer = client.get("/v1/models", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8000", "a.localhost", "127.0.0.1:5"])
def test_names_of_this_machine(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    arguments = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    with ready_server(tmp_path, *arguments, limits={"HEADER_SECONDS": 3.0}) as server:
        assert server.url.startswith("https://")
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as silent:
            assert silent.recv(1) == b"", "a client that never begins TLS is let go"
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=certificate)) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
            assert streamed(client, CHAT, ASK)
        assert server.stop() == 0
