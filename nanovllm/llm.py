"""The user's front: text and chats in, finished requests out."""

import signal
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.outputs import CompletionOutput, RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

Prompt = str | list[int]


class LLM:
    """A model served on one or several ranks, all started and ended by this object.

    Options are those of EngineConfig, by name. Use it in a `with`, or call close(); at interpreter exit it closes itself.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_options(model, **options))
        self._step_lock = threading.Lock()
        self._foreign_outputs: list[StepOutput] = []
        """What requests of add_request gained while generate() was stepping; handed out by the next step()."""
        self._generating: set[int] = set()
        # Interpreter exit must not depend on when this object is collected, nor keep it alive until then.
        self._close_at_exit = weakref.finalize(self, LLMEngine.close, self.engine)
        self._close_at_exit.atexit = True

    @property
    def config(self) -> EngineConfig:
        """The options, with everything that was left open settled."""
        return self.engine.config

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.engine.tokenizer.hf

    # -- whole batches ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt (text or token ids); returns the finished requests in the order of the prompts.

        `sampling_params`: one for all, or one for each. Everything is checked before anything is started: ValueError names
        the option, the value and the bound. An interrupt (Ctrl-C) aborts this call's requests and leaves the engine usable.
        """
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        token_ids = [self._token_ids(prompt) for prompt in batch]
        for index, (ids, param) in enumerate(zip(token_ids, params, strict=True)):
            try:
                self.engine.check_request(ids, param)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
        with self._step_lock:
            ids = [self.engine.add_request(tokens, param) for tokens, param in zip(token_ids, params, strict=True)]
            self._generating.update(ids)
        try:
            self._run_until_finished(ids, use_tqdm)
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
                self.engine.forget(request_id)
            raise
        finally:
            self._generating.difference_update(ids)
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return [self._finish(request_id, text) for request_id, text in zip(ids, texts, strict=True)]

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers a chat, or each of several: lists of {"role": ..., "content": ...}, through the chat template.

        `template_options` go to the template, for example enable_thinking=False.
        """
        chats = messages if messages and isinstance(messages[0], list) else [messages]
        prompts = [self.engine.tokenizer.apply_chat_template(chat, **template_options) for chat in chats]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run_until_finished(self, request_ids: list[int], use_tqdm: bool) -> None:
        unfinished = set(request_ids)
        with _Progress(self.engine, len(request_ids), use_tqdm) as progress, _interrupt_between_steps() as interrupted:
            while unfinished:
                with self._step_lock:
                    if not self.engine.has_unfinished_requests():
                        break  # another thread's generate() has taken the last results in for us
                    done = self._dispatch(self.engine.step()) & unfinished
                unfinished = {i for i in unfinished - done if self.engine.sequence(i).finish_reason is None}
                progress.update(len(request_ids) - len(unfinished))
                if interrupted.is_set():
                    raise KeyboardInterrupt

    def _dispatch(self, outputs: list[StepOutput]) -> set[int]:
        """Keeps what belongs to add_request's callers for step(); returns the ids that finished."""
        for output in outputs:
            if output.request_id not in self._generating and self.engine.knows(output.request_id):
                self._foreign_outputs.append(output)
        return {output.request_id for output in outputs if output.finished}

    def _finish(self, request_id: int, prompt: str | None) -> RequestOutput:
        seq = self.engine.forget(request_id)
        assert seq is not None
        output_ids = seq.output_token_ids
        text = self.engine.tokenizer.decode(output_ids)
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            outputs=[CompletionOutput(0, text, output_ids, seq.finish_reason)],
            num_cached_tokens=seq.num_prompt_cached_tokens or 0,
            metrics=seq.metrics,
        )

    # -- a caller's own loop ------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its id. May be called from any thread."""
        return self.engine.add_request(self._token_ids(prompt), sampling_params or SamplingParams())

    def step(self) -> list[StepOutput]:
        """One turn of the engine: what each request of add_request gained. Finished requests are dropped from the engine
        when they have been reported here."""
        with self._step_lock:
            if self.engine.has_unfinished_requests():
                self._dispatch(self.engine.step())
            outputs, self._foreign_outputs = self._foreign_outputs, []
        for output in outputs:
            if output.finished:
                self.engine.forget(output.request_id)
        return outputs

    def abort(self, request_id: int) -> None:
        """Ends a request early; step() reports it as finished with reason "abort". May be called from any thread."""
        self.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to report."""
        return bool(self._foreign_outputs) or self.engine.has_unfinished_requests()

    def is_finished(self) -> bool:
        return not self.has_unfinished_requests()

    # -- the engine ---------------------------------------------------------------------------------------------

    def load_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Replaces all weights in place: (checkpoint name, whole tensor) pairs, on any device. Graphs stay valid; the
        prefix cache is emptied; requests in flight go on under the new weights."""
        with self._step_lock:
            self.engine.load_weights(weights)

    def engine_info(self) -> dict[str, Any]:
        """Device, versions, attention backend and why, KV blocks, start-up seconds: what a benchmark should print."""
        return self.engine.info()

    def close(self) -> None:
        """Ends the workers and frees the devices; nothing stays behind. Harmless when called again."""
        self._close_at_exit()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, int) for item in batch):
        return [batch]  # type: ignore[list-item]
    for index, prompt in enumerate(batch):
        if not isinstance(prompt, (str, list, tuple)):
            raise TypeError(f"prompts[{index}]: must be a str or a list of token ids, found {type(prompt).__name__}")
    return batch  # type: ignore[return-value]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} given, must be one or as many as prompts ({count})")
    return list(params)


@contextmanager
def _interrupt_between_steps() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step is never cut in half; a second one interrupts at once."""
    interrupted = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupted
        return

    def note(number: int, frame: Any) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Progress:
    """A tqdm bar over requests, with prefill and decode tokens/s since it was opened."""

    _INTERVAL = 0.1

    def __init__(self, engine: LLMEngine, total: int, enabled: bool) -> None:
        self._engine = engine
        self._bar = tqdm(total=total, desc="Generating", unit="req", disable=not enabled, dynamic_ncols=True)
        self._prefill, self._decode = engine.num_prefill_tokens, engine.num_decode_tokens

    def update(self, finished: int) -> None:
        if self._bar.disable:
            return
        seconds = max(self._bar.format_dict["elapsed"], 1e-9)
        if finished > self._bar.n or seconds - getattr(self, "_shown", 0.0) > self._INTERVAL:
            self._shown = seconds
            prefill = (self._engine.num_prefill_tokens - self._prefill) / seconds
            decode = (self._engine.num_decode_tokens - self._decode) / seconds
            self._bar.set_postfix_str(f"prefill {prefill:.0f} tok/s, decode {decode:.0f} tok/s", refresh=False)
            self._bar.update(finished - self._bar.n)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
