"""Access control: keys, origins of pages, and the name by which a page's browser found the server."""

import base64
import hmac
from ipaddress import ip_address
from urllib.parse import urlsplit

from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.call import Call
from nanovllm.serve.options import ServeOptions

_WITHOUT_KEY = frozenset(("/", "/health", "/ready", "/ping", "/metrics", "/version"))
_PRIVATE = ("localhost", "local", "internal")
"""Ends of names that no public domain has, by RFC 6761, RFC 6762 and a resolution of ICANN."""
_SHOWN_HEADERS = b"x-request-id, x-ignored-fields, retry-after"


class Access:
    """Checks of requests, by their path and headers alone."""

    def __init__(self, options: ServeOptions) -> None:
        self._admin_keys = [key.encode() for key in options.admin_api_keys]
        keys = [key.encode() for key in options.api_keys]
        self._keys = [*keys, *self._admin_keys] if keys else []
        self._origins = frozenset(origin.rstrip("/").lower() for origin in options.allowed_origins)
        self._hosts = {urlsplit(origin).hostname for origin in self._origins} | {options.host.lower()}
        # With a key, a page that reaches us by another name has nothing to gain.
        self._checks_host = options.uds is None and not keys and "*" not in self._origins

    def check(self, call: Call, is_admin: bool) -> None:
        """Raises ApiError: 403 for pages that may not call, 401 without a key. `is_admin`: of the path."""
        self._check_host(call)
        self._check_origin(call)
        keys = self._admin_keys if is_admin else self._keys
        if not keys or call.path in _WITHOUT_KEY or call.method == "OPTIONS":
            return
        sent = _key_of(call)
        found = [place for place, key in enumerate(keys) if hmac.compare_digest(sent, key)]  # all: in equal time
        if not found:
            call.notes.append((b"www-authenticate", b"Bearer"))
            raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")
        call.key = found[0]

    def _check_host(self, call: Call) -> None:
        """A name of a page's own domain that leads to this machine would make the page one of ours."""
        host = call.header(b"host")
        if not self._checks_host or host is None:
            return
        name = _host_of(host)
        if name not in self._hosts and not _is_private(name):
            text = "must be an address or a private name; allow others by --allowed-origins, or set an --api-key"
            raise ApiError(403, f"host={host[:100]!r}: {text}", "forbidden_host")

    def _check_origin(self, call: Call) -> None:
        """Refuses calls of pages, but for those of our own origin and of allowed ones. Raises ApiError."""
        origin = call.header(b"origin")
        if origin is None:
            return
        if origin.lower() in self._origins or "*" in self._origins:
            call.notes += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _SHOWN_HEADERS),
                (b"vary", b"origin"),
            ]
        elif call.header(b"sec-fetch-site") != "same-origin" and origin.partition("://")[2] != call.header(b"host"):
            raise ApiError(403, f"origin={origin[:100]!r}: is not one of --allowed-origins", "forbidden_origin")

    def allowances(self, call: Call) -> list[tuple[bytes, bytes]]:
        """Headers that tell a browser what it may send, in answer to its preflight; else nothing."""
        if call.method != "OPTIONS" or not call.header(b"origin") or not call.header(b"access-control-request-method"):
            return []
        headers = call.header(b"access-control-request-headers") or "authorization, content-type"
        return [
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", headers.encode("latin-1")),
            (b"access-control-max-age", b"600"),
        ]


def _host_of(authority: str) -> str:
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_private(host: str) -> bool:
    """Whether no page of the internet can have this host: an address, a name without a dot, or a name that ends as
    those of private networks do."""
    try:
        return bool(ip_address(host))
    except ValueError:
        return bool(host) and ("." not in host or host.rpartition(".")[2] in _PRIVATE)


def _key_of(call: Call) -> bytes:
    """The key that a request brings: as a bearer's, as the password of a URL (https://any:KEY@host), in x-api-key."""
    scheme, _, given = (call.header(b"authorization") or "").partition(" ")
    given = given.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    if scheme.lower() != "bearer":
        given = (call.header(b"x-api-key") or "").strip()
    return given.encode("latin-1", "replace")
