"""The user's front: text and chats in, finished requests out."""

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.control import LLMControl
from nanovllm.engine.inputs import GivenPrompt, Prompt, as_batch, as_chats, as_params, as_token_ids, plain_prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import CompletionOutput, EngineStats, RequestOutput, StepColumns, StepOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.start import start_one, start_ranks
from nanovllm.terminal import ProgressBar, interrupt_between_steps
from nanovllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from nanovllm.engine.sequence import Sequence as Row
    from nanovllm.executor.local import Report

_PAUSE_LOOK = 0.1  # seconds between two looks of generate() at a paused engine


class LLM(LLMControl):
    """A model served on one or several ranks, all started and ended by this object.

    Options are those of EngineConfig, by name. Use it in a `with`, or call close(); the interpreter's exit does it too.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._take_over(start_engine(EngineConfig.from_options(model, **options)))

    @classmethod
    def from_module(cls, module: "torch.nn.Module", tokenizer: Any = None, **options: Any) -> "LLM":
        """An engine that computes with the parameters of a live transformers module, on one GPU or a CPU.

        The parameters are shared, not copied: what an optimizer or load_state_dict writes into them, the next request
        uses (not those in flight meanwhile). `tokenizer`: a transformers tokenizer, a folder or a hub id; None where
        skip_tokenizer_init is set. Raises ValueError naming what of the module cannot be served; a later call raises
        RuntimeError where the module has got other tensors, as by .to() or load_state_dict(assign=True).
        """
        from nanovllm.models.live_module import config_of, options_of

        name = getattr(getattr(module, "config", None), "_name_or_path", "") or type(module).__name__
        path = tokenizer if isinstance(tokenizer, str) else None
        config = EngineConfig.from_options(name, tokenizer=path, **options_of(module, options))
        if tokenizer is None and not config.skip_tokenizer_init:
            raise ValueError("tokenizer=None: must be given (or set skip_tokenizer_init)")
        if config.has_front:
            bound = "1 for a live module, with no backend"
            raise ValueError(f"data_parallel_size={config.data_parallel_size}: must be {bound}")
        if config.quantization is not None:
            raise ValueError(f"quantization={config.quantization!r}: must be None for a live module, which is shared")
        if config.lm_head_dtype != "auto":
            raise ValueError("lm_head_dtype='fp8': must be 'auto' for a live module, which is shared")
        llm = cls.__new__(cls)
        model_config = config_of(module, config.hf_overrides)
        llm._take_over(start_ranks(config, model_config, Tokenizer(config, None if path else tokenizer), module))
        return llm

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
        prompts: GivenPrompt | Sequence[GivenPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt (text or token ids); returns the finished requests in the order of the prompts.

        `sampling_params`: one for all, or one for each. Everything is checked before anything is started: ValueError
        names option, value and bound. An interrupt (Ctrl-C) aborts this call's requests; the engine goes on.
        """
        self._require_open()
        batch = as_batch(prompts)
        params = as_params(sampling_params, len(batch))
        token_ids = []
        for index, (prompt, param) in enumerate(zip(batch, params, strict=True)):
            try:
                token_ids.append(self._token_ids(prompt))
                self.engine.check_request(token_ids[-1], param)
            except ValueError as error:
                raise ValueError(f"prompts[{index}]: {error}") from None
        numbers = self.engine.reserve_ids(params)
        ids: list[int] = []
        with interrupt_between_steps() as interrupted:
            try:
                with self._step_lock:
                    self.engine.notice_new_weights()
                    for index in self._queueing_order(token_ids, params):
                        ids.append(self.engine.add_request(token_ids[index], params[index], numbers[index]))
                        if interrupted.is_set():
                            break
                    self._generating.update(ids)
                self._run_until_finished(ids, use_tqdm, interrupted)
                if interrupted.is_set():
                    return []  # never reached by the caller: the `with` raises
                texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
                return [self._finish(request_id, text) for request_id, text in zip(numbers, texts, strict=True)]
            finally:
                # Another Ctrl-C waits too. A thread that took our last results in has handed them out by now.
                with interrupt_between_steps(), self._step_lock:
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
        if not self.config.uses("longest_first"):
            return list(range(len(prompts)))
        limit = self.engine.max_total_tokens
        most = [min(param.most_tokens, limit - len(prompt)) for prompt, param in zip(prompts, params, strict=True)]
        return sorted(range(len(prompts)), key=most.__getitem__, reverse=True)

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers a chat, or each of several: lists of {"role": ..., "content": ...}, through the chat template.

        `template_options`: add_generation_prompt, continue_final_message (the answer goes on where the last message
        ends), chat_template, tools, documents, and chat_template_kwargs, a dict of the template's variables. A variable
        that the template mentions may be a keyword too, for example enable_thinking=False; a TypeError names any other.
        The outputs' `prompt` is the text that the template made.
        """
        self._require_open()
        if not (chats := as_chats(messages)):
            return []
        tokenizer = self.engine.tokenizer
        texts = [tokenizer.apply_chat_template(chat, **template_options) for chat in chats]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        outputs = self.generate(prompts, sampling_params, use_tqdm)
        for output, text in zip(outputs, texts, strict=True):
            output.prompt = text
        return outputs

    def _token_ids(self, prompt: Prompt) -> list[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

    def _run_until_finished(self, request_ids: list[int], use_tqdm: bool, interrupted: threading.Event) -> None:
        unfinished = set(request_ids)
        with ProgressBar(self.engine, len(request_ids), use_tqdm) as progress:
            while unfinished and not interrupted.is_set():
                with self._step_lock:
                    if not self.engine.has_unfinished_requests():
                        break  # another thread's generate() has taken the last results in for us
                    self._dispatch(self.engine.step())
                    unfinished -= self._ended
                progress.update(len(request_ids) - len(unfinished))
                if self.engine.is_paused and unfinished:
                    self.engine.wait_for_work(_PAUSE_LOOK)

    def _finish(self, request_id: int, prompt: str | None) -> RequestOutput:
        seqs = self.engine.forget(request_id)
        first = seqs[0]
        rows = first.sampling.prompt_logprob_rows if first.sampling is not None else None
        return RequestOutput(
            request_id, prompt, first.token_ids[: first.num_prompt_tokens], [self._completion(seq) for seq in seqs],
            num_cached_tokens=first.num_prompt_cached_tokens or 0, metrics=first.metrics,
            prompt_logprobs=None if rows is None else rows.view(),
        )  # fmt: skip

    def _completion(self, seq: "Row") -> CompletionOutput:
        rows, kept = (None, None) if seq.sampling is None else (seq.sampling.logprob_rows, seq.sampling.kept_ids)
        return CompletionOutput(
            seq.index, self._text(seq), seq.output_token_ids, seq.finish_reason, seq.stop_reason,
            None if rows is None else rows.view(), seq.metrics, sampling_mask=kept,
            weight_versions=seq.weight_versions,
        )  # fmt: skip

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

    def add_request(
        self,
        prompt: GivenPrompt,
        sampling_params: SamplingParams | None = None,
        output_token_ids: Iterable[int] | None = None,
    ) -> int:
        """Queues one request and returns its id. May be called from any thread. Raises QueueFull where
        max_queued_requests wait already.

        `output_token_ids`: the output begins with these, computed elsewhere or before, and goes on as it would have:
        max_tokens, penalties, stops and grammars count them, and tokens are sampled by seed and position.
        """
        self._require_open()
        if self.engine.executor.shares_weights:
            with self._turn() as engine:
                engine.notice_new_weights()
        return self.engine.add_request(
            self._token_ids(plain_prompt(prompt)),
            SamplingParams() if sampling_params is None else sampling_params,
            output_token_ids=None if output_token_ids is None else as_token_ids(list(output_token_ids)),
        )

    def step(self) -> list[StepOutput]:
        """Runs the engine for one step: what each request of add_request gained. Finished requests are dropped from the
        engine when they are reported here. An interrupt (Ctrl-C) waits for the end of the step, and nothing is lost."""
        self._require_open()
        gained = StepColumns()
        try:
            with interrupt_between_steps(), self._step_lock:
                if self.engine.has_unfinished_requests():
                    self._dispatch(self.engine.step())
                gained, self._foreign = self._foreign, gained
                for entry in gained.endings:  # under the lock: another thread's step may end the last of n completions
                    request_id = gained.request_ids[entry]
                    if self.engine.knows(request_id) and self.engine.is_finished(request_id):
                        self.engine.forget(request_id)
                outputs = gained.outputs()
            return outputs
        except KeyboardInterrupt:
            with interrupt_between_steps(), self._step_lock:
                gained.extend(self._foreign)  # they did not reach the caller: the next call hands them out
                self._foreign = gained
            raise

    def wait_for_work(self, timeout: float) -> bool:
        """Sleeps until `step` has something to do or to report; returns False after `timeout` seconds without. For a
        thread that steps for others."""
        self._require_open()
        woken = bool(self._foreign) or self.engine.wait_for_work(timeout, lambda: bool(self._foreign))
        self._require_open()
        return woken

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start. May be called from any thread, at any time."""
        return self.engine.stats()

    def abort(self, request_id: int) -> None:
        """Ends a request early; step() reports it as finished with reason "abort". May be called from any thread."""
        self.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to report."""
        if self.engine.has_unfinished_requests() or self._foreign:
            return True
        with interrupt_between_steps(), self._step_lock:  # another thread's step may just be handing over what is ours
            return bool(self._foreign) or self.engine.has_unfinished_requests()

    def is_finished(self) -> bool:
        return not self.has_unfinished_requests()

    # -- the engine ---------------------------------------------------------------------------------------------

    def engine_info(self) -> dict[str, Any]:
        """Device, versions, attention backend and why, KV blocks, start-up seconds: what a benchmark should print."""
        return self.engine.info()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_engine(config: EngineConfig, report: "Report | None" = None) -> LLMEngine:
    """Loads the model of `config`; returns the engine over all of its ranks, or over all of its replicas. `report`: see
    LocalExecutor; replicas report nothing."""
    if not config.has_front:
        return start_one(config, report)
    if config.data_parallel_backend == "ray":
        from nanovllm.replicas.ray_start import start_ray_replicas

        return start_ray_replicas(config)
    from nanovllm.replicas.start import start_replicas

    return start_replicas(config)

