"""The user's front: text and chats in, finished requests out."""

import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.fair_lock import FairLock
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import shown
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import CompletionOutput, RequestOutput, StepOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.sequence import Sequence as Row

Prompt = str | list[int]

_CLOSE_PATIENCE = 5.0  # seconds that close() lets another thread's step take to end


class LLM:
    """A model served on one or several ranks, all started and ended by this object.

    Options are those of EngineConfig, by name. Use it in a `with`, or call close(); the interpreter's exit does it too.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = LLMEngine(EngineConfig.from_options(model, **options))
        self._step_lock = FairLock()
        self._foreign_outputs: list[StepOutput] = []
        """What requests of add_request gained while generate() was stepping; handed out by the next step()."""
        self._generating: set[int] = set()
        self._ended: set[int] = set()
        """Those of them with all completions ended, until their generate() returns."""
        # Interpreter exit must not depend on when this object is collected, nor keep it alive until then.
        self._close_at_exit = weakref.finalize(self, _close, self.engine, self._step_lock)
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
        """A transformers tokenizer for you to use: what is set on it (truncation, padding) does not reach the engine.
        Only a chat template that is set here is used by `chat`."""
        return self.engine.tokenizer.of_user

    # -- whole batches ------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt (text or token ids); returns the finished requests in the order of the prompts.

        `sampling_params`: one for all, or one for each. Everything is checked before anything is started: ValueError
        names option, value and bound. An interrupt (Ctrl-C) aborts this call's requests; the engine goes on.
        """
        self._require_open()
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        if not self.config.skip_tokenizer_init:
            _ = self.engine.tokenizer.hf  # raises now where it cannot be loaded, not when the tokens are there
        token_ids = []
        for index, (prompt, param) in enumerate(zip(batch, params, strict=True)):
            try:
                token_ids.append(self._token_ids(prompt))
                self.engine.check_request(token_ids[-1], param)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
        numbers = self.engine.reserve_ids(params)
        ids: list[int] = []
        with _interrupt_between_steps() as interrupted:
            try:
                with self._step_lock:
                    for index in self._queueing_order(token_ids, params):
                        ids.append(self.engine.add_request(token_ids[index], params[index], numbers[index]))
                        if interrupted.is_set():
                            break
                    self._generating.update(ids)
                self._run_until_finished(ids, use_tqdm, interrupted)
                if interrupted.is_set():
                    return []  # to nobody: the `with` raises
                texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
                return [self._finish(request_id, text) for request_id, text in zip(numbers, texts, strict=True)]
            finally:
                with self._step_lock:  # whoever took our last results in has handed them out, and knows them as ours
                    for request_id in ids:  # where they have not been returned
                        self.engine.abort(request_id)
                        self.engine.forget(request_id)
                    self._generating.difference_update(ids)
                    self._ended.difference_update(ids)

    def _queueing_order(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[int]:
        """Indices of a batch in the order in which its requests are to begin.

        Most tokens to come first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969): a step takes nearly
        as long for its last rows as for many, so none of the long ones should still run when all others have ended.
        Equal ones keep their order.
        """
        if not self.config.longest_first:
            return list(range(len(prompts)))
        limit = self.engine.max_total_tokens
        most = [min(param.max_tokens, limit - len(prompt)) for prompt, param in zip(prompts, params, strict=True)]
        return sorted(range(len(prompts)), key=most.__getitem__, reverse=True)

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers a chat, or each of several: lists of {"role": ..., "content": ...}, through the chat template.

        `template_options` go to the template, for example enable_thinking=False; continue_final_message=True lets the
        answer go on where the last message ends. The outputs' `prompt` is the text that the template made.
        """
        self._require_open()
        if not (chats := _as_chats(messages)):
            return []
        tokenizer = self.engine.tokenizer
        texts = [tokenizer.apply_chat_template(chat, **template_options) for chat in chats]
        outputs = self.generate([tokenizer.encode_plain(text) for text in texts], sampling_params, use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.engine.tokenizer.encode(prompt)
        if not isinstance(prompt, (list, tuple)):
            raise TypeError(f"prompt: must be a str or a list of token ids, found {type(prompt).__name__}")
        kinds = set(map(type, prompt))
        if kinds <= {int}:
            return list(prompt)
        for kind in kinds:
            if not issubclass(kind, (int, np.integer)) or kind is bool:
                bad = next(token_id for token_id in prompt if type(token_id) is kind)
                raise ValueError(f"prompt: token id {shown(bad)} must be an integer, found {kind.__name__}")
        return [int(token_id) for token_id in prompt]

    def _run_until_finished(self, request_ids: list[int], use_tqdm: bool, interrupted: threading.Event) -> None:
        unfinished = set(request_ids)
        with _Progress(self.engine, len(request_ids), use_tqdm) as progress:
            while unfinished and not interrupted.is_set():
                with self._step_lock:
                    if not self.engine.has_unfinished_requests():
                        break  # another thread's generate() has taken the last results in for us
                    self._dispatch(self.engine.step())
                    unfinished -= self._ended
                progress.update(len(request_ids) - len(unfinished))

    def _dispatch(self, outputs: list[StepOutput]) -> None:
        """Keeps what belongs to add_request's callers for step(), and notes which requests of generate() have ended,
        whichever thread's they are."""
        for output in outputs:
            request_id = output.request_id
            if not self.engine.knows(request_id):
                continue  # its generate() was interrupted
            if request_id not in self._generating:
                self._foreign_outputs.append(output)
            elif output.finished and self.engine.is_finished(request_id):
                self._ended.add(request_id)

    def _finish(self, request_id: int, prompt: str | None) -> RequestOutput:
        seqs = self.engine.forget(request_id)
        first = seqs[0]
        rows = first.sampling.prompt_logprob_rows if first.sampling is not None else None
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[self._completion(seq) for seq in seqs],
            num_cached_tokens=first.num_prompt_cached_tokens or 0,
            metrics=first.metrics,
            prompt_logprobs=None if rows is None else rows.view(),
        )

    def _completion(self, seq: "Row") -> CompletionOutput:
        ids, logprobs = seq.output_token_ids, self.engine.logprobs(seq)
        return CompletionOutput(
            seq.index, self._text(seq), ids, seq.finish_reason, seq.stop_reason, logprobs, seq.metrics
        )

    def _text(self, seq: "Row") -> str:
        """The output's text: up to a stop string, and without the token of stop_token_ids or end of text that ended it,
        unless include_stop_str_in_output asks for them."""
        params, ids = seq.params, seq.output_token_ids
        if not params.detokenize:
            return ""
        text = seq.sampling.text if seq.sampling is not None else None
        by_token = seq.finish_reason == "stop" and ids[-1] in seq.stop_token_ids
        if text is not None:
            if by_token and params.include_stop_str_in_output:
                text.push(ids[-1], watch=False)
            return text.finish()
        if by_token and not params.include_stop_str_in_output:
            ids = ids[:-1]
        return self.engine.tokenizer.decode(ids, params.skip_special_tokens)

    # -- a caller's own loop ------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one request and returns its id. May be called from any thread."""
        self._require_open()
        return self.engine.add_request(
            self._token_ids(prompt), SamplingParams() if sampling_params is None else sampling_params
        )

    def step(self) -> list[StepOutput]:
        """One turn of the engine: what each request of add_request gained. Finished requests are dropped from the
        engine when they are reported here. An interrupt (Ctrl-C) waits for the end of the turn, and nothing is lost."""
        self._require_open()
        outputs: list[StepOutput] = []
        try:
            with _interrupt_between_steps(), self._step_lock:
                if self.engine.has_unfinished_requests():
                    self._dispatch(self.engine.step())
                outputs, self._foreign_outputs = self._foreign_outputs, []
                for output in outputs:  # in the same turn: in another thread's the last of n completions may just end
                    request_id = output.request_id
                    if output.finished and self.engine.knows(request_id) and self.engine.is_finished(request_id):
                        self.engine.forget(request_id)
            return outputs
        except KeyboardInterrupt:
            with _interrupt_between_steps(), self._step_lock:
                self._foreign_outputs[:0] = outputs  # they reach nobody now: the next call hands them out
            raise

    def abort(self, request_id: int) -> None:
        """Ends a request early; step() reports it as finished with reason "abort". May be called from any thread."""
        self.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to report."""
        if self.engine.has_unfinished_requests() or self._foreign_outputs:
            return True
        with _interrupt_between_steps(), self._step_lock:  # another thread's turn may just be handing over what is ours
            return bool(self._foreign_outputs) or self.engine.has_unfinished_requests()

    def is_finished(self) -> bool:
        return not self.has_unfinished_requests()

    # -- the engine ---------------------------------------------------------------------------------------------

    def load_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
        """Replaces all weights in place: (checkpoint name, whole tensor) pairs, on any device. Graphs stay valid; the
        prefix cache is emptied; requests in flight go on under the new weights."""
        self._require_open()
        with self._step_lock:
            self.engine.load_weights(weights)

    def engine_info(self) -> dict[str, Any]:
        """Device, versions, attention backend and why, KV blocks, start-up seconds: what a benchmark should print."""
        return self.engine.info()

    def close(self) -> None:
        """Ends the workers and frees the devices; nothing stays behind. Harmless when called again."""
        self._close_at_exit()

    def _require_open(self) -> None:
        if not self._close_at_exit.alive:
            raise RuntimeError("this engine is closed")
        if os.getpid() != (owner := self.engine.executor.owner):  # waiting for what is the owner's would never end
            raise RuntimeError(f"this engine is process {owner}'s: a fork of it cannot use it")

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(engine: LLMEngine, step_lock: "FairLock") -> None:
    """Closes between two steps of other threads; but a step that hangs does not keep us."""
    with step_lock.within(_CLOSE_PATIENCE):
        engine.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray, Mapping, Set)):
        found = type(prompts).__name__
        raise TypeError(f"prompts: must be a str, a list of token ids or a list of such, found {found}")
    batch = list(prompts)
    if batch and all(isinstance(item, (int, np.integer)) for item in batch):
        return [batch]  # type: ignore[list-item]
    for index, prompt in enumerate(batch):
        if not isinstance(prompt, (str, list, tuple)):
            raise TypeError(f"prompts[{index}]: must be a str or a list of token ids, found {type(prompt).__name__}")
    return batch  # type: ignore[return-value]


def _as_chats(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """One chat or several as a list of chats."""
    if not isinstance(messages, (list, tuple)):
        found = type(messages).__name__
        raise TypeError(f"messages: must be a list of {{'role': ..., 'content': ...}} or a list of such, found {found}")
    several = any(isinstance(item, (list, tuple)) for item in messages)
    chats = list(messages) if several else [messages] if messages else []
    for number, chat in enumerate(chats):
        name = f"messages[{number}]" if several else "messages"
        if not isinstance(chat, (list, tuple)) or not chat:
            raise ValueError(
                f"{name}: must be a list of at least one message where others are lists, found {shown(chat)}"
            )
        for index, message in enumerate(chat):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f"{name}[{index}]: must be a dict with a 'role', found {shown(message)}")
    return chats


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(param, SamplingParams) for param in params):
        raise TypeError(f"sampling_params={shown(params)}: must be SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} given, must be one or as many as prompts ({count})")
    return list(params)


@contextmanager
def _interrupt_between_steps() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step is never cut in half, and interrupts when the `with` ends; a second Ctrl-C
    interrupts at once."""
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
    if interrupted.is_set():
        raise KeyboardInterrupt


class _Progress:
    """A tqdm bar over requests, with prefill and decode tokens/s since it was opened."""

    _INTERVAL = 0.1

    def __init__(self, engine: LLMEngine, total: int, enabled: bool) -> None:
        self._engine = engine
        hidden = not enabled or sys.stderr is None  # as in a program whose standard error is closed
        self._bar = tqdm(total=total, desc="Generating", unit="req", disable=hidden, dynamic_ncols=True)
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
