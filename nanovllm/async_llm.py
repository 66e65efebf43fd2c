"""LLM for asyncio programs: each request is an async iterator over its text."""

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from nanovllm.adapters import LoRARequest
from nanovllm.engine.embeddings import pooling_of, stacked
from nanovllm.engine.inputs import GivenPrompt, as_chats, as_prompt, behind
from nanovllm.engine.prompt import Prompt
from nanovllm.errors import EngineAsleep, WeightsIncomplete
from nanovllm.llm import LLM
from nanovllm.logprobs import LogprobsList
from nanovllm.outputs import StepOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stops import VisibleText

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")

_LOOK_SECONDS = 0.5
_LOOK_AGAIN_SECONDS = 0.02  # between two looks at an engine that sleeps, or whose weights are being replaced


@dataclass
class TextDelta:
    """New text and tokens of one completion of a request since its last delta."""

    text: str
    """Whole characters only; text that may begin a stop string is held back. "" under skip_tokenizer_init."""
    token_ids: list[int]
    index: int = 0
    """Number of the completion, 0 to n - 1."""
    finished: bool = False
    """True in the completion's last delta."""
    finish_reason: str | None = None
    """See StepOutput.finish_reason."""
    stop_reason: int | str | None = None
    """See StepOutput.stop_reason."""
    logprobs: LogprobsList | None = field(default=None, repr=False)
    """Log-probabilities of token_ids, if the request asks for them."""
    pooled: "np.ndarray | None" = field(default=None, repr=False)
    """See StepOutput.pooled."""


class AsyncLLM:
    """A model shared by asyncio tasks. A thread steps the engine; starting, tokenizing and chat templates run in
    threads too, so that the event loop never waits for them.

    Use it in an `async with`, or call close(). Requests may come from several event loops. It lets go of its LLM
    where nobody has it, or an iterator of it, any more.
    """

    def __init__(self, llm: LLM) -> None:
        """Takes over an LLM, which nobody else may step from now on. `start` makes one."""
        self.llm = llm
        """The LLM, for its other methods: stats(), and by asyncio.to_thread load_weights(), pause(), sleep() and so
        on."""
        self._streams: dict[int, _Stream] = {}
        self._num_adding = 0
        """Requests that are being added, so that their numbers are not known yet."""
        self._early: dict[int, list[StepOutput]] = {}
        """Outputs of requests without a stream, kept while requests are being added."""
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._pool = ThreadPoolExecutor(thread_name_prefix="nanovllm-async")
        """Threads besides the event loop's own, where a caller's work may wait for requests."""
        run = partial(_step_until_closed, llm, weakref.ref(self))
        self._thread = threading.Thread(target=run, name="nanovllm-async", daemon=True)
        self._thread.start()

    @classmethod
    async def start(cls, model: str, **options: Any) -> Self:
        """Loads a model, with the options of LLM."""
        return cls(await asyncio.to_thread(LLM, model, **options))

    async def generate(
        self,
        prompt: GivenPrompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[TextDelta, None]:
        """Continues a prompt (text or token ids). Leaving the loop or cancelling its task aborts the request, at once
        if the iterator is closed (contextlib.aclosing). Raises ValueError naming option, value and bound; QueueFull;
        RuntimeError if the engine has failed or is closed."""
        params = SamplingParams() if sampling_params is None else sampling_params
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        add = partial(self._add, prompt, params, stream, lora_request)
        number, given = await self._in_thread(add, lambda made: self._drop(made[0]))
        texts = [self._text(params, given) for _ in range(params.n)]
        running = params.n
        try:
            while running:
                gained = await stream.outputs.get()
                if isinstance(gained, BaseException):
                    raise RuntimeError(f"the engine has ended: {gained}") from gained
                yield self._delta(gained, texts[gained.index])
                running -= gained.finished
        finally:
            self._drop(number)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[TextDelta, None]:
        """Answers a chat; see LLM.chat for the options, `generate` for the rest."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if len(chats := as_chats(messages)) != 1:
            raise ValueError(f"messages: must be one chat, found {len(chats)}")

        def rendered() -> Prompt:
            tokenizer = self.llm.engine.tokenizer
            text, adapter = tokenizer.render_chat(chats[0], **template_options), self.llm.adapter_of(lora_request)
            return as_prompt(text, params, tokenizer, is_chat=True, adapter=adapter)

        async with aclosing(self.generate(await self._in_thread(rendered), params)) as deltas:
            async for delta in deltas:
                yield delta

    async def embed(
        self, prompt: GivenPrompt, dimensions: int | None = None, prompt_name: str | None = None
    ) -> "np.ndarray":
        """Embedding of a prompt, float32 [dimensions]; see LLM.embed."""
        before = pooling_of(self.llm.model_config, dimensions).prompt(prompt_name)
        [last] = [delta async for delta in self.generate(behind(before, prompt), SamplingParams(max_tokens=0))]
        return stacked([last.pooled], dimensions, self.llm.model_config)[0]

    async def close(self) -> None:
        """Ends the engine; requests that are unfinished raise RuntimeError. Harmless when called again."""

        def end() -> None:
            self.llm.close()
            self._thread.join()

        await self._in_thread(end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _in_thread(self, work: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
        """Runs `work` in a thread and returns its result. If the caller is cancelled meanwhile, `undo` gets the
        result."""
        task = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else undo(done.result()))
            raise

    def _add(
        self, prompt: GivenPrompt, params: SamplingParams, stream: "_Stream", lora_request: LoRARequest | None
    ) -> tuple[int, Prompt]:
        prompt = as_prompt(prompt, params, self.llm.engine.tokenizer, adapter=self.llm.adapter_of(lora_request))
        with self._lock:
            self._require_engine()
            self._num_adding += 1
        number = None
        try:
            number = self.llm.add_request(prompt, params)  # may take long: a grammar is compiled in it
            return number, prompt
        finally:
            with self._lock:
                self._num_adding -= 1
                if number is not None:
                    self._require_engine()
                    self._streams[number] = stream
                    _call(stream.loop, _deliver, [(stream, output) for output in self._early.pop(number, [])])

    def _require_engine(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has ended: {self._failure}") from self._failure

    def _drop(self, number: int) -> None:
        """Aborts a request that nobody listens to any more; unknown ones are ignored."""
        with self._lock:
            stream = self._streams.pop(number, None)
            if stream is not None and self._failure is None:
                self.llm.abort(number)

    def _fail(self, error: BaseException) -> None:
        """Lets every request raise the error by which the engine ended."""
        with self._lock:
            self._failure = error
            for stream in self._streams.values():
                _call(stream.loop, stream.outputs.put_nowait, error)

    def _hand_out(self, step: list[StepOutput]) -> None:
        """Hands outputs to their streams, with one callback for each event loop."""
        gained: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, StepOutput]]] = {}
        with self._lock:
            if not self._num_adding:
                self._early.clear()
            for output in step:
                if (stream := self._streams.get(output.request_id)) is not None:
                    gained.setdefault(stream.loop, []).append((stream, output))
                elif self._num_adding:
                    self._early.setdefault(output.request_id, []).append(output)
        for loop, outputs in gained.items():
            if not _call(loop, _deliver, outputs):
                for _, output in outputs:
                    self._drop(output.request_id)

    def _text(self, params: SamplingParams, prompt: Prompt) -> VisibleText | None:
        tokenizer = self.llm.engine.tokenizer
        if not params.detokenize or not tokenizer.is_there:
            return None
        eos = () if params.ignore_eos else self.llm.model_config.eos_token_ids
        detokenizer = tokenizer.own.detokenizer(params.skip_special_tokens, prompt.token_ids)
        return VisibleText(
            detokenizer, [*params.stop], params.include_stop_str_in_output, [*eos, *params.stop_token_ids]
        )

    def _delta(self, gained: StepOutput, text: VisibleText | None) -> TextDelta:
        ids, pieces = gained.new_token_ids, []
        if text is not None:
            pieces = [text.push(token_id) for token_id in (ids[:-1] if gained.finished else ids)]
            if gained.finished:
                last = ids[-1] if ids else None
                pieces.append(text.end(last, gained.finish_reason or "abort", gained.stop_reason))
        return TextDelta(
            "".join(pieces), ids, gained.index, gained.finished, gained.finish_reason, gained.stop_reason,
            gained.logprobs, gained.pooled,
        )  # fmt: skip


class _Stream(NamedTuple):
    """Outputs on their way to one request's task."""

    loop: asyncio.AbstractEventLoop
    """The task's. Its thread alone may touch the queue."""
    outputs: "asyncio.Queue[StepOutput | BaseException]"
    """Last of all the error that ended the engine, if one did."""


def _deliver(outputs: list[tuple[_Stream, StepOutput]]) -> None:
    for stream, output in outputs:
        stream.outputs.put_nowait(output)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: Any) -> bool:
    """Calls a function in the thread of an event loop. From any thread. Returns False where the loop is closed: nobody
    listens."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True


def _step_until_closed(llm: LLM, owner_of: "weakref.ref[AsyncLLM]") -> None:
    """Steps for an AsyncLLM, which it does not keep alive."""
    try:
        while True:
            has_work = llm.wait_for_work(_LOOK_SECONDS)
            if (owner := owner_of()) is None:
                return
            if has_work:
                try:
                    owner._hand_out(llm.step())
                except (EngineAsleep, WeightsIncomplete):  # requests wait
                    time.sleep(_LOOK_AGAIN_SECONDS)
            del owner
    except BaseException as error:  # of a failed or closed engine: every request raises it
        if (owner := owner_of()) is not None:
            owner._fail(error)
        llm.close()
