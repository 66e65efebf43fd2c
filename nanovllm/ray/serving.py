"""The server as an application of Ray Serve: any number of servers behind Serve's proxy, routed by what they hold."""

import os
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.ray.server_loads import prefix_of
from nanovllm.startup.child import end

_ENGINE = "Engine"  # the deployment's name
_HOP_HEADERS = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))
_AUTOSCALING = {"min_replicas": 1, "max_replicas": 8, "target_ongoing_requests": 128}


def app(
    model: str,
    autoscaling_config: dict[str, Any] | None = None,
    serve_options: dict[str, Any] | None = None,
    num_ingresses: int = 1,
    **engine_options: Any,
) -> Any:
    """An application for `serve.run`: each of its replicas is a server as `nanovllm serve` starts it.

    `autoscaling_config`: Ray Serve's, default 1 to 8 servers with 128 requests each. `serve_options`: of ServeOptions.
    `num_ingresses`: processes that read requests. `engine_options`: of LLM. Raises ImportError without Ray Serve, and
    ValueError for an option that is out of bounds.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise ImportError(f"nanovllm.ray.app: needs Ray Serve: pip install 'nanovllm[ray,serve]' ({error})") from None
    from nanovllm.ray.serve_router import PrefixRouter
    from nanovllm.serve.options import ServeOptions

    config = EngineConfig.from_options(model, **engine_options)
    if config.data_parallel_backend == "ray":
        raise ValueError("data_parallel_backend='ray': must be None or 'local' here: Ray Serve has the replicas")
    ServeOptions(**(serve_options or {}))
    num_ranks = config.tensor_parallel_size * config.data_parallel_size
    resources = {"num_cpus": 1} if config.device == "cpu" else {"num_cpus": 1, "num_gpus": num_ranks}
    engine = serve.deployment(Engine).options(
        name=_ENGINE,
        autoscaling_config={**_AUTOSCALING, **(autoscaling_config or {})},
        max_ongoing_requests=4 * config.max_num_seqs,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    )
    ingress = serve.deployment(serve.ingress(Relay())(Ingress)).options(
        num_replicas=num_ingresses, max_ongoing_requests=10_000
    )
    return ingress.bind(engine.bind(model, engine_options, serve_options or {}))


class Engine:
    """A server on a Unix socket, in an actor of Ray Serve, beside its engine's process."""

    async def __init__(self, model: str, engine_options: dict[str, Any], serve_options: dict[str, Any]) -> None:  # type: ignore[misc]
        import asyncio

        import aiohttp

        from nanovllm.serve.front import Front
        from nanovllm.serve.http.server import HttpServer
        from nanovllm.serve.lifecycle import bind
        from nanovllm.serve.link import EngineChild
        from nanovllm.serve.options import ServeOptions

        self._folder = tempfile.TemporaryDirectory(prefix="nanovllm-")
        path = os.path.join(self._folder.name, "socket")
        options = ServeOptions(**{**serve_options, "uds": path})
        listener = bind(options)
        self._child = EngineChild(model, engine_options)
        self._front = front = Front(model, options)
        await asyncio.get_running_loop().create_unix_connection(lambda: front.link, sock=self._child.socket)
        self._http = HttpServer(front.app, options, listener)
        await self._http.start()
        while front.state == "loading":
            await front.changed.wait()
            front.changed.clear()
        self.check_health()
        self._client = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0), auto_decompress=False, timeout=aiohttp.ClientTimeout()
        )

    def check_health(self) -> None:
        """Ray Serve starts a server again where this raises."""
        if self._front.state == "failed":
            failure = self._front.failure
            raise RuntimeError("the engine has failed" if failure is None else failure.message)

    async def answer(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes, prefix: list[bytes]
    ) -> AsyncIterator[Any]:
        """Status and headers, then the body as it comes. `prefix`: for the router."""
        from yarl import URL

        url = URL("http://server" + target, encoded=True)
        async with self._client.request(method, url, headers=headers, data=body, allow_redirects=False) as response:
            yield response.status, [(name, value) for name, value in response.raw_headers if _passes(name)]
            async for piece in response.content.iter_any():
                yield piece

    def __del__(self) -> None:
        child = getattr(self, "_child", None)
        if child is not None:
            end(child.process, 0.0)
            self._folder.cleanup()


class Ingress:
    """Reads requests, and lets the router see how their prompts begin."""

    def __init__(self, engine: Any) -> None:
        """`engine`: so that it is deployed too."""


def _passes(name: bytes | str) -> bool:
    return (name if isinstance(name, str) else name.decode("latin-1")).lower() not in _HOP_HEADERS


class Relay:
    """The ASGI application of Ingress."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from ray import serve

        if scope["type"] == "lifespan":
            while (await receive())["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        pieces, more = [], True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(pieces)
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        headers = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in scope["headers"] if _passes(name)]
        engine = serve.get_deployment_handle(_ENGINE, app_name=serve.get_replica_context().app_name)
        answer = engine.options(stream=True).answer.remote(
            scope["method"], f"{path}?{query}" if query else path, headers, body, prefix_of(body)
        )
        status, answered = await anext(answer)
        await send({"type": "http.response.start", "status": status, "headers": answered})
        async for piece in answer:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
