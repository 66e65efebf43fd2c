"""The server of tests/serve, for commands that talk to one."""

from serve.serving import server  # noqa: F401
