"""The front process: the parts that handlers take, and what becomes of the engines' frames."""

import asyncio
from collections.abc import Callable
from typing import Any

from nanovllm.errors import ReplicaError
from nanovllm.host import wire
from nanovllm.host.engines import Engines
from nanovllm.host.handle import Lost
from nanovllm.host.pending_call import InternalError
from nanovllm.processes.garbage import freeze_objects
from nanovllm.serve import errors
from nanovllm.serve.admission import Admission
from nanovllm.serve.book import Book
from nanovllm.serve.driver import Driver
from nanovllm.serve.errors import ApiError
from nanovllm.serve.metrics import Metrics
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.output_items import OutputItems
from nanovllm.serve.request import Request
from nanovllm.serve.request_log import RequestLog
from nanovllm.serve.served_model import ServedModel
from nanovllm.serve.text_pool import TextPool


class Front:
    """Server between the HTTP connections and the engines: owns the parts that handlers take."""

    engines: Driver

    def __init__(
        self,
        path: str,
        options: ServeOptions,
        engines: Engines,
        on_progress: Callable[[str, int], None] = lambda stage, percent: None,
    ) -> None:
        """`path`: of the model, as the command names it. `on_progress`: gets stage and percent of the start."""
        self.options = options
        self.model = model = ServedModel(path, options, lambda: self.engines.state.adapters)
        self.metrics = metrics = Metrics(model.public_name, lambda: self.engines.state, lambda: self.engines.stats)
        self.pool = TextPool(metrics, len(options.api_keys))
        self.book = Book(metrics, self.pool, lambda request_id: self.engines.abort(request_id))
        self.admission = Admission(model, self.book, self.pool, metrics)
        self.engines = Driver(engines, self.book, self.on_frame, self.on_engine_end)
        self.log = RequestLog(model, metrics)
        self.output_items = OutputItems()
        self._on_progress = on_progress
        self._text: asyncio.Task[None] | None = None
        """Reads the tokenizer and what belongs to it."""
        self._loop = asyncio.get_running_loop()
        self._sweeper: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return self._loop.time()

    # -- the engines --------------------------------------------------------------------------------------------

    def on_frame(self, frame: wire.Up) -> None:
        """Takes in whatever engines say beside their steps."""
        if isinstance(frame, wire.Progress):
            self.admission.progress = (frame.stage, frame.percent)
            self._on_progress(frame.stage, frame.percent)
            if frame.folder and self._text is None:
                self._text = self._loop.create_task(self._load_text(frame.folder))
        elif isinstance(frame, wire.Ready):
            self._loop.create_task(self._become_ready(frame.info))
        elif isinstance(frame, wire.Refused):
            error = errors.server_error() if frame.message is None else errors.from_value_error(frame.message)
            self.book.refuse(frame.request_id, error)

    async def _load_text(self, folder: str) -> None:
        """Tokenizer and sampling defaults, while the engine loads; a mistake in them ends the start at once."""
        try:
            await self._loop.run_in_executor(self.pool.threads, self.model.read_text, folder)
        except Exception as error:
            self.admission.failure = Lost(str(error), type(error) if isinstance(error, (ValueError, OSError)) else None)
            self.admission.become("failed")

    async def _become_ready(self, info: dict[str, Any]) -> None:
        assert self._text is not None
        await self._text
        freeze_objects()
        try:
            for name, path in (entry.split("=", 1) for entry in self.options.lora_modules):
                await self.engines.call("load_adapter", lora_name=name, lora_path=path)
        except Exception as error:
            self.on_engine_end(Lost(f"lora_modules: {error}", ValueError))
        if self.admission.state == "loading":
            self.model.info = self.metrics.info = info
            self.admission.become("ready")

    def on_engine_end(self, lost: Lost) -> None:
        """No engine is left: nothing that runs can be completed."""
        self.admission.failure = self.admission.failure or lost
        self.fail(errors.engine_dead())
        self.admission.become("failed")

    def fail(self, error: ApiError) -> None:
        """Ends all that the engines have not answered."""
        self.book.fail_all(error)
        self.engines.fail(error)

    async def control(self, name: str, **options: Any) -> Any:
        """Runs a call of engine/calls.py and returns the engines' answer. Raises ApiError."""
        if self.admission.state != "ready":
            self.admission.admit()
        wait = self.admission.weight_wait
        wait.note_call(name, self.engines.state, self.now())
        try:
            with errors.refusing():
                return await self.engines.call(name, **options)
        except ApiError as error:
            error.rename({"version": "weight_version"})
            raise
        except ReplicaError:
            raise errors.engine_dead() from None
        except InternalError:
            raise errors.server_error() from None
        except (TypeError, OSError) as error:
            raise errors.from_value_error(str(error)) from None
        except RuntimeError as error:
            raise ApiError(409, str(error), "wrong_state") from None
        finally:
            wait.note_call(name, self.engines.state, self.now())

    # -- requests -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Hands a request to the engines, each prompt as one of its own. Raises ApiError where it cannot be taken."""
        self.admission.admit(request.key)
        fleet = self.engines.fleet
        assert fleet is not None
        ids = self.book.open(request)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(1.0, self._sweep)
        for request_id, prompt, most in zip(ids, request.prompts, request.max_tokens, strict=True):
            self.metrics.count_prompt(request.n, most)
            own = {**request.params, "max_tokens": most}
            if own.get("min_tokens", 0) > most:
                own["min_tokens"] = most
            fleet.requests.add(request_id, prompt, own)
        fleet.requests.bind()

    def _sweep(self) -> None:
        now, wait = self.now(), self.admission.weight_wait
        self.book.sweep(now, self.options.request_timeout)
        if wait.is_over(now):
            self.book.fail_all(errors.weights_incomplete(str(wait.text(now))))
        self.log.totals()
        busy = bool(self.book.requests)
        self._sweeper = self._loop.call_later(1.0, self._sweep) if busy else None
