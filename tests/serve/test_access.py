"""Access to a server: keys, types of content, origins, names of hosts, TLS."""

import json
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from front import InProcess
from serving import ASK, CHAT, JSON, MESSAGES, OPENING, ready_server, refusal, streamed

from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.access import Access
from nanovllm.serve.http.server import HttpServer
from nanovllm.serve.options import ServeOptions

KEYS = ("sesame", "from-file", "from-environment")
OWN_HOSTS = (
    *("localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8000", "a.localhost", "127.0.0.1:5", "10.0.0.1", "[::2]:80"),
    *("gpu", "nanovllm:8000", "host.docker.internal", "llm.default.svc.cluster.local."),
)
OTHER_HOSTS = ("rebound.example", "a.example:80", "localhost.example", "local.example.", "1.2.3.4.example", "")


def test_each_key_opens_and_none_is_logged(impatient: InProcess) -> None:
    for key in KEYS:
        with impatient.client(key) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
    assert not any(key in impatient.log for key in KEYS)


@pytest.mark.parametrize(
    "value", [None, "Bearer ", "Bearer sesam", "Bearer sesame2", "sesame", "Basic sesame", "Bearer é"]
)
@pytest.mark.parametrize(
    "path", ["/v1/models", "/tokenize", "/load", "/v1/nothing", "//v1/models", "/health/../v1/models"]
)
def test_no_way_past_the_key(impatient: InProcess, path: str, value: str | None) -> None:
    key = b"" if value is None else b"authorization: " + value.encode() + b"\r\n"
    for host in (b"a", b"a/health", b"a/health?x="):
        request = b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n%s\r\n" % (path.encode(), host, key)
        status, error = refusal(impatient.send(request))
        assert (status, error["code"]) == (401, "invalid_api_key")


def test_refused_before_the_body_is_read(impatient: InProcess) -> None:
    """In the form of the endpoint, and once: another answer, to a body that never comes, would be taken for another
    request's."""
    error = httpx.post(impatient.url + MESSAGES, json={}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
    with impatient.connect() as connection:
        connection.sendall(OPENING + b"content-length: 1000000\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 401"
        rest = b""
        while data := connection.recv(1 << 16):
            rest += data
    assert b"HTTP/1.1" not in rest


def test_open_paths(impatient: InProcess) -> None:
    for path in ("/health", "/ping", "/ready", "/metrics", "/version", "/"):
        assert httpx.get(impatient.url + path).status_code == 200, path


def test_what_is_not_said_to_be_plain_json_is_refused(client: httpx.Client) -> None:
    """A page of another origin can send the other types without asking."""
    content = json.dumps(ASK).encode()
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json"):
        assert client.post(CHAT, content=content, headers={"content-type": kind}).status_code == 200
    kinds = ("text/plain", "application/x-www-form-urlencoded", "a/json; application/json")
    for headers in ({}, {**JSON, "content-encoding": "gzip"}, *({"content-type": kind} for kind in kinds)):
        answer = client.post(CHAT, content=content, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), headers


def test_pages_of_other_origins_may_not_call(client: httpx.Client) -> None:
    other = "https://elsewhere.example"
    for path in ("/v1/models", "/health", "/"):
        for origin in (other, "null", "http://localhost:1", "http://["):
            answer = client.get(path, headers={"origin": origin})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_origin")
    asked = client.options(CHAT, headers={"origin": other, "access-control-request-method": "POST"})
    assert asked.status_code == 403 and "access-control-allow-origin" not in asked.headers
    for own in ({"origin": str(client.base_url).rstrip("/")}, {"origin": other, "sec-fetch-site": "same-origin"}):
        assert client.get("/v1/models", headers=own).status_code == 200


def test_a_name_that_may_be_a_pages_own_is_refused(client: httpx.Client) -> None:
    """Such a domain that leads here would make the page one of ours."""
    for host in OWN_HOSTS:
        assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
    for host in OTHER_HOSTS:
        answer = client.get("/v1/models", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host"), host


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "10.0.0.1", "gpu.example"])
def test_names_are_checked_whatever_is_listened_on(host: str) -> None:
    """A container listens on 0.0.0.0 behind a port of localhost. With a key there is nothing to gain."""

    def check(name: str, **options: Any) -> None:
        call = Mock(path="/health", header=lambda header: name if header == b"host" else None)
        Access(ServeOptions(host=host, **options)).check(call, is_admin=False)

    for name in (*OWN_HOSTS, host if host != "::" else "[::]:80"):
        check(name)
    for name in OTHER_HOSTS:
        with pytest.raises(ApiError, match="must be an address or a private name"):
            check(name)
        for options in ({"api_keys": ("k",)}, {"uds": "/a"}, {"allowed_origins": ("*",)}):
            check(name, **options)
    check("a.example:80", allowed_origins=("https://a.example",))


def test_files_that_are_no_certificate_are_named() -> None:
    options = ServeOptions(ssl_certfile=__file__, ssl_keyfile=__file__)
    with pytest.raises(ValueError, match=r"ssl_certfile=.*test_access\.py', ssl_keyfile=.*: must be a certificate"):
        HttpServer(Mock(), options, Mock())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost".split()
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*made, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    arguments = ("--ssl-keyfile", key, "--ssl-certfile", certificate)
    with ready_server(tmp_path, *arguments, limits={"HEADER_SECONDS": 3.0}) as server:
        assert server.url.startswith("https://")
        with server.connect() as silent:
            assert silent.recv(1) == b"", "a client that never begins TLS is let go"
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=certificate)) as client:
            assert client.post(CHAT, json=ASK).status_code == 200
            assert streamed(client, CHAT, ASK)
        assert server.stop() == 0
