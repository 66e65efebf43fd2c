"""The front process: what its handlers share, and where it is in its life (see lifecycle.py)."""

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import nanovllm
from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.handle import Lost
from nanovllm.host.pending import InternalError
from nanovllm.processes.child import freeze_objects
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve import errors, limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.routes import ADMIN_ROUTES, ROUTES
from nanovllm.serve.engines import Engines, Launch
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http.app import App
from nanovllm.serve.http.call import Call
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.parsers import OutputParser
from nanovllm.serve.streams import Streams
from nanovllm.serve.weight_wait import WeightWait
from nanovllm.text.checkpoint import CheckpointTokenizer, read_json
from nanovllm.text.no_tokenizer import NoTokenizer

if TYPE_CHECKING:
    from nanovllm.serve.api.answer import Answer
    from nanovllm.serve.tracing import RequestTracer

logger = logging.getLogger("nanovllm.serve")
Result = TypeVar("Result")
State = Literal["loading", "ready", "draining", "failed"]
_SHORT = 512  # characters whose tokenizing takes less than a hand-over to a thread and back
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Front:
    """Everything between the HTTP connections and the link to the engine."""

    def __init__(self, model: str, options: ServeOptions, launch: Launch) -> None:
        self.model, self.options = model, options
        self.names = options.served_model_name or (model,)
        self.created = int(time.time())
        self.fingerprint = f"nanovllm-{nanovllm.__version__}"
        self.metrics = Metrics(self.name)
        self.tracer: RequestTracer | None = None
        if options.otlp_traces_endpoint is not None:
            from nanovllm.serve import tracing

            self.tracer = tracing.RequestTracer(options.otlp_traces_endpoint)
        self.streams = Streams(self.metrics, lambda request_id: self.engines.abort(request_id))
        self.state: State = "loading"
        self.progress: tuple[str, int] = ("starting", 0)
        self.on_progress: Callable[[str, int], None] = lambda stage, percent: None
        self.failure: Lost | None = None
        self.info: dict[str, Any] = {}
        """Facts about the engines (host/program.py), once they and the tokenizer are there."""
        self.defaults: dict[str, Any] = {}
        """Sampling defaults for what requests leave open."""
        self.default_max_tokens: int | None = None
        self.engines = Engines(launch, self.streams, self.on_frame, self.on_engine_end)
        self.weight_wait = WeightWait(options.weight_update_timeout)
        self.changed = asyncio.Event()
        """Set whenever `state` changes."""
        self._text: asyncio.Task[None] | None = None
        """Reads the tokenizer and what belongs to it."""
        self._pool = ThreadPoolExecutor(2, "nanovllm-text")
        self._preparing: Counter[int | None] = Counter()
        """Requests of each API key that the pool works on or has waiting."""
        self._preparing_bytes = 0
        """The size of their texts."""
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None
        self._last_totals = (self.now(), 0, 0)
        operations = ROUTES | ADMIN_ROUTES if options.admin_api_keys else ROUTES
        self.app = App(self, operations, options, self.metrics)

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return self._loop.time()

    @property
    def name(self) -> str:
        return self.names[0]

    # -- the engine ---------------------------------------------------------------------------------------------

    def set_state(self, state: State) -> None:
        self.state = state
        self.changed.set()

    def on_frame(self, frame: wire.Up) -> None:
        """Whatever engines say beside their steps."""
        if isinstance(frame, wire.Progress):
            self.progress = (frame.stage, frame.percent)
            self.on_progress(frame.stage, frame.percent)
            if frame.folder and self._text is None:
                self._text = self._loop.create_task(self._load_text(frame.folder))
        elif isinstance(frame, wire.Ready):
            self._loop.create_task(self._become_ready(frame.info))
        elif isinstance(frame, wire.Refused):
            error = errors.server_error() if frame.message is None else errors.from_value_error(frame.message)
            self.streams.refuse(frame.request_id, error)

    async def _load_text(self, folder: str) -> None:
        """Tokenizer and sampling defaults, while the engine loads; a mistake in them ends the start at once."""
        try:
            await self._loop.run_in_executor(self._pool, self._read_text, folder)
        except Exception as error:
            self.failure = Lost(str(error), type(error) if isinstance(error, (ValueError, OSError)) else None)
            self.set_state("failed")

    def _read_text(self, folder: str) -> None:
        self._read_defaults(folder)
        has_text = not self.options.skip_tokenizer_init
        self.tokenizer = CheckpointTokenizer(folder, self.options.chat_template) if has_text else NoTokenizer()
        _ = self.tokenizer.longest_token
        self.parser = OutputParser(self.tokenizer, self.options.tool_call_parser, self.options.reasoning_parser)

    def _read_defaults(self, folder: str) -> None:
        wanted = self.options.generation_config
        path = Path(folder if wanted == "auto" else wanted) / "generation_config.json"
        found = ({} if wanted == "vllm" else read_json(path)) | self.options.override_generation_config
        self.defaults = {name: found[name] for name in _DEFAULTS if found.get(name) is not None}
        self.default_max_tokens = found.get("max_new_tokens")
        try:
            SamplingParams(**self.defaults, max_tokens=1 if (most := self.default_max_tokens) is None else most)
        except ValueError as error:
            raise ValueError(f"generation_config={wanted!r}, override_generation_config: {error}") from None

    async def _become_ready(self, info: dict[str, Any]) -> None:
        assert self._text is not None
        await self._text
        freeze_objects()
        if self.state == "loading":
            self.info = self.metrics.info = info
            self.set_state("ready")

    def on_engine_end(self, lost: Lost) -> None:
        """No engine is left: nothing that runs can be completed."""
        self.failure = self.failure or lost
        self.fail(errors.engine_dead())
        self.set_state("failed")

    def fail(self, error: ApiError) -> None:
        """Ends all that the engine has not answered."""
        for request in list(self.streams.requests):
            self.streams.fail(request, error)
        self.engines.fail(error)

    async def control(self, name: str, **options: Any) -> Any:
        """Runs a call of engine/calls.py and returns the engines' answer. Raises ApiError."""
        if self.state != "ready":
            self.admit()
        self.weight_wait.hear(name, self.engines.state, self.now())
        try:
            with errors.refusing():
                return await self.engines.call(name, **options)
        except ReplicaError:
            raise errors.engine_dead() from None
        except InternalError:
            raise errors.server_error() from None
        except (TypeError, OSError) as error:
            raise errors.from_value_error(str(error)) from None
        except RuntimeError as error:
            raise ApiError(409, str(error), "wrong_state") from None
        finally:
            self.metrics.control = self.engines.state
            self.weight_wait.hear(name, self.engines.state, self.now())

    def close(self) -> None:
        if self.tracer is not None:
            self.tracer.close()

    # -- for handlers -------------------------------------------------------------------------------------------

    def admit(self, key: int | None = None) -> None:
        """Raises ApiError where no request can be taken now. `key`: which of the API keys it came with."""
        if self.state == "ready":
            if self.weight_wait.is_over(now := self.now()):
                raise errors.weights_incomplete(str(self.weight_wait.text(now)))
            rows: int = self.info["max_num_seqs"]
            most = self.options.max_num_queued_reqs or 4 * rows + 512
            if self.streams.num_rows + self._preparing.total() >= most:
                self.metrics.rejected["queue_full"] += 1
                message = f"the server is full: {most} requests are in flight (--max-num-queued-reqs)"
                raise ApiError(503, message, "server_overloaded")
            if key is None or (share := self._share(most - rows)) is None:
                return
            if self.streams.rows_by_key[key] + self._preparing[key] >= rows + share:
                self.metrics.rejected["key_full"] += 1
                message = f"this API key has {rows + share} requests in flight: {share} more than can run at once"
                raise ApiError(429, f"{message} (--max-waiting-per-key)", "rate_limit_exceeded")
            return
        if self.state == "loading":
            self.metrics.rejected["loading"] += 1
            stage, percent = self.progress
            raise ApiError(503, f"the model is loading: {stage} ({percent} %)", "model_loading")
        if self.state == "draining":
            self.metrics.rejected["draining"] += 1
            raise errors.shutting_down()
        raise errors.engine_dead()

    def _share(self, places: int) -> int | None:
        """Most waiting places that one key may take, of so many; None: all."""
        if (given := self.options.max_waiting_per_key) is not None:
            return given
        return max(0, places) // 2 if len(self.options.api_keys) > 1 else None

    def require_tokenizer(self) -> None:
        if not self.info:
            self.admit()
        if self.options.skip_tokenizer_init:
            raise errors.bad_request("skip_tokenizer_init: the server has no tokenizer")

    async def json(self, call: Call, or_empty: bool = False) -> dict[str, Any]:
        """The object in a request's body, or an empty one where there may be no body. A large one is read in the pool.
        Raises ApiError."""
        body = await call.body(or_empty)
        if or_empty and not body:
            return {}
        if len(body) <= limits.SMALL_BODY:
            return limits.parse_json(body)
        return await self.in_pool(call, lambda: limits.parse_json(body), len(body))

    def read(self, call: Call, kind: type[api.Given], body: dict[str, Any]) -> api.Given:
        """The fields of a request; those that mean nothing here are named in a header. Raises ApiError."""
        fields, ignored = api.read(kind, body)
        self.note_ignored(call, ignored)
        self.check_model(fields.model)
        return fields

    def note_ignored(self, call: Call, ignored: list[str]) -> None:
        """Names in a header what of a request nothing is done with. Raises ApiError under --strict-fields."""
        if ignored and self.options.strict_fields:
            raise errors.bad_request(f"{ignored[0]}: unknown field (--strict-fields)", ignored[0], "unknown_field")
        if ignored:
            text = "".join(each if " " <= each <= "~" else "?" for each in ", ".join(ignored)[:500])
            logger.debug("request %s: ignored fields: %s", call.request_id, text)
            call.notes.append((b"x-ignored-fields", text.encode()))

    def check_model(self, name: Any) -> None:
        """Raises ApiError (404) where a request asks for another model."""
        if name is not None and name not in self.names:
            shown = str(name)[:200]
            text = f"The model `{shown}` does not exist; this server has `{self.names[0]}`"
            raise ApiError(404, text, "model_not_found", "model")

    async def in_pool(self, call: Call, work: Callable[[], Result], size: int, is_short: bool = True) -> Result:
        """Runs what may take long in one of two threads; on a text of few bytes or characters (`size`) at once, which
        costs less, unless `is_short` is False. Raises ApiError (503) where too much waits for the threads."""
        if is_short and size <= _SHORT:
            return work()
        if self._preparing_bytes + size > limits.PREPARING_BYTES:
            self.metrics.rejected["queue_full"] += 1
            raise ApiError(503, "too many large requests wait to be read and tokenized", "server_overloaded")
        self._preparing[call.key] += 1
        self._preparing_bytes += size
        try:
            return await self._loop.run_in_executor(self._pool, work)
        finally:
            self._preparing[call.key] -= 1
            self._preparing_bytes -= size

    def submit(self, request: "Answer") -> None:
        """Hands a request to the engine, each prompt as one of its own. Raises ApiError where it cannot be taken."""
        self.admit(request.key)
        self.metrics.count_request(request.n, max(request.max_tokens))
        ids = self.streams.add(request)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(1.0, self._sweep)
        for request_id, prompt, most in zip(ids, request.prompts, request.max_tokens, strict=True):
            own = {**request.params, "max_tokens": most}
            if own.get("min_tokens", 0) > most:
                own["min_tokens"] = most
            self.engines.add(request_id, array("i", prompt).tobytes(), own)
        self.engines.bind()

    def _sweep(self) -> None:
        now = self.now()
        self.streams.sweep(now, self.options.request_timeout)
        if self.weight_wait.is_over(now):
            for request in list(self.streams.requests):
                self.streams.fail(request, errors.weights_incomplete(str(self.weight_wait.text(now))))
        if not self.options.disable_log_stats:
            self._log_totals()
        busy = bool(self.streams.requests)
        self._sweeper = self._loop.call_later(1.0, self._sweep) if busy else None

    # -- the log ------------------------------------------------------------------------------------------------

    def log_request(self, request: "Answer") -> None:
        """One line when a request is over, and its span."""
        if self.tracer is not None:
            self.tracer.record(request, self.now())
        if not logger.isEnabledFor(logging.INFO):
            return
        seconds = max(self.now() - request.arrival, 1e-9)
        first = (request.first_token or self.now()) - request.arrival
        tokens = request.num_output_tokens
        if self.options.log_prompts:
            for prompt in request.prompts:
                logger.info("%s: prompt %r", request.id, self.tokenizer.decode(prompt, False))
        reasons = {each.finish_reason or "abort" for each in request.completions}
        reason = request.error.code if request.error is not None else "/".join(sorted(reasons))
        logger.info(
            "%s: %d tokens in (%d cached), %d out, queued %.3f s, first token %.3f s, %.1f tok/s, %s",
            *(request.id, request.num_prompt_tokens, request.num_cached_tokens, tokens, request.queued, first),
            *(tokens / seconds, reason),
        )

    def _log_totals(self) -> None:
        """One line every 10 s while there is work."""
        then, prompts, outputs = self._last_totals
        seconds = self.now() - then
        if seconds < 10:
            return
        stats = self.metrics.engine
        if seconds < 20:  # else there was no work in between
            logger.info(
                "%d running, %d waiting, KV cache %.1f %%, %.1f prompt tok/s, %.1f output tok/s",
                *(stats.num_running, stats.num_waiting, 100 * stats.kv_cache_usage),
                *((stats.prompt_tokens - prompts) / seconds, (stats.generation_tokens - outputs) / seconds),
            )
        self._last_totals = (self.now(), stats.prompt_tokens, stats.generation_tokens)
