"""The user's front: text and chats in, finished requests out."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from nanovllm.adapters import Adapters, LoRARequest
from nanovllm.config import EngineConfig
from nanovllm.embedding import Embedding
from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.inputs import (
    GivenPrompt,
    as_batch,
    as_chats,
    as_params,
    as_prompt,
    as_tags,
    as_token_ids,
    as_weights,
    ids_of_texts,
)
from nanovllm.engine.prompt import Prompt
from nanovllm.engine.protocol import Engine
from nanovllm.errors import refuse
from nanovllm.model_config import ModelConfig
from nanovllm.outputs import RequestOutput, StepOutput
from nanovllm.processes.garbage import frozen_objects
from nanovllm.sampling_params import SamplingParams
from nanovllm.start import start_one, start_ranks
from nanovllm.terminal import Interrupt, ProgressBar, interrupt_between_steps
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.turns import Turns

if TYPE_CHECKING:
    import torch

    from nanovllm.executor.protocol import Weights


_PAUSE_LOOK = 0.1  # seconds between two looks of generate() at a paused engine
_MANY = 64  # requests during which a full garbage collection is likely enough


class LLM(Embedding, Adapters):
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
            refuse("data_parallel_size", config.data_parallel_size, "1 for a live module, with no backend")
        for name, wanted in (("quantization", None), ("enable_lora", False), ("lm_head_dtype", "auto")):
            if (value := getattr(config, name)) != wanted:
                refuse(name, value, f"{wanted!r} for a live module, which is shared")
        llm = cls.__new__(cls)
        model_config = config_of(module, config.hf_overrides)
        llm._take_over(start_ranks(config, model_config, Tokenizer(config, None if path else tokenizer), module))
        return llm

    def _take_over(self, engine: Engine) -> None:
        self.engine = engine
        self._turns, self._saved = Turns(engine, self), {}

    @property
    def config(self) -> EngineConfig:
        """The options, with what was left open settled; sizes that were measured are in engine_info()."""
        return self.engine.config

    @property
    def model_config(self) -> ModelConfig:
        """The checkpoint's configuration, in the form that all families share."""
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt (text or token ids); returns the finished requests in the order of the prompts.

        `sampling_params`, `lora_request`: one for all, or one for each. Everything is checked before anything is
        started: ValueError names option, value and bound. An interrupt (Ctrl-C) aborts this call's requests; the
        engine goes on.
        """
        self._turns.require_open()
        given = as_batch(prompts)
        params = as_params(sampling_params, len(given))
        batch: list[Prompt] = []
        adapters = self.adapters_of(lora_request, len(given))
        texts = ids_of_texts(given, self.engine.tokenizer)
        for index, (prompt, param, adapter, ids) in enumerate(zip(given, params, adapters, texts, strict=True)):
            try:
                batch.append(as_prompt(prompt, param, self.engine.tokenizer, adapter=adapter, ids=ids))
                self.engine.book.check(batch[-1], param)
            except (TypeError, ValueError) as error:
                kind = TypeError if isinstance(error, TypeError) else ValueError
                said = kind(f"prompts[{index}]: {str(error).removeprefix('prompt: ')}")
                raise said.with_traceback(error.__traceback__) from None
        numbers = self.engine.book.reserve_ids(params)
        begun: list[int] = []
        rows = {row for number, param in zip(numbers, params, strict=True) for row in range(number, number + param.n)}
        with interrupt_between_steps() as interrupt:
            try:
                with self._turns.step_lock:
                    self.engine.notice_new_weights()
                    for index in self._queueing_order(batch, params):
                        begun.append(self.engine.add_request(batch[index], params[index], numbers[index]))
                        if interrupt.has_come:
                            break
                    self._turns.generating |= rows
                self._run_until_finished(begun, use_tqdm, interrupt)
                if interrupt.has_come:
                    return []  # never reached by the caller: the `with` raises
                return [self.engine.book.take(number) for number in numbers]
            finally:
                # Another Ctrl-C waits too. A thread that took our last results in has handed them out by now.
                with interrupt_between_steps(), self._turns.step_lock:
                    for request_id in begun:  # where they have not been returned
                        self.engine.abort(request_id)
                        self.engine.book.forget(request_id)
                    self._turns.generating -= rows
                    self._turns.ended.difference_update(begun)

    def _queueing_order(self, prompts: list[Prompt], params: list[SamplingParams]) -> list[int]:
        """Indices of a batch in the order in which its requests are to begin.

        Most tokens to come first (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969): a step takes nearly
        as long for its last rows as for many, so none of the long ones should still run when all others have ended.
        Equal ones keep their order.
        """
        if not self.config.uses("longest_first"):
            return list(range(len(prompts)))
        limit = self.engine.book.max_total_tokens
        most = [min(param.most_tokens, limit - len(prompt)) for prompt, param in zip(prompts, params, strict=True)]
        return sorted(range(len(prompts)), key=most.__getitem__, reverse=True)

    def chat(
        self,
        messages: list[dict[str, str]] | list[list[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers a chat, or each of several: lists of {"role": ..., "content": ...}, through the chat template.

        `template_options`: add_generation_prompt, continue_final_message (the answer goes on where the last message
        ends), chat_template, tools, documents, and chat_template_kwargs, a dict of the template's variables. A variable
        that the template mentions may be a keyword too, for example enable_thinking=False; a TypeError names any other.
        The outputs' `prompt` is the text that the template made.
        """
        self._turns.require_open()
        if not (chats := as_chats(messages)):
            return []
        params, tokenizer = as_params(sampling_params, len(chats)), self.engine.tokenizer
        texts = [tokenizer.render_chat(chat, **template_options) for chat in chats]
        adapters = self.adapters_of(lora_request, len(chats))
        ids = ids_of_texts(texts, tokenizer, True)
        prompts = [as_prompt(text, param, tokenizer, True, adapter, found)
                   for text, param, adapter, found in zip(texts, params, adapters, ids, strict=True)]  # fmt: skip
        return self.generate(prompts, params, use_tqdm)

    def _run_until_finished(self, request_ids: list[int], use_tqdm: bool, interrupt: Interrupt) -> None:
        unfinished = set(request_ids)
        frozen = frozen_objects() if len(request_ids) >= _MANY else nullcontext()
        with frozen, ProgressBar(self.engine, len(request_ids), use_tqdm) as progress:
            while unfinished and not interrupt.comes():
                with self._turns.step_lock:
                    if not self.engine.has_unfinished_requests():
                        break  # another thread's generate() has taken the last results in for us
                    self._turns.dispatch(self.engine.step())
                    unfinished -= self._turns.take_ended(unfinished)
                progress.update(len(request_ids) - len(unfinished))
                if self.is_paused and unfinished:
                    self.engine.wait_for_work(_PAUSE_LOOK)

    # -- a caller's own loop ------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: GivenPrompt,
        sampling_params: SamplingParams | None = None,
        output_token_ids: Iterable[int] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Queues one request and returns its id. May be called from any thread. Raises QueueFull where
        max_queued_requests wait already.

        `output_token_ids`: the output begins with these, computed elsewhere or before, and goes on as it would have:
        max_tokens, penalties, stops and grammars count them, and tokens are sampled by seed and position.
        """
        self._turns.require_open()
        if self.engine.shares_weights:
            with self._turns.turn() as engine:
                engine.notice_new_weights()
        params = SamplingParams() if sampling_params is None else sampling_params
        known = None if output_token_ids is None else as_token_ids(list(output_token_ids), "output_token_ids")
        given = as_prompt(prompt, params, self.engine.tokenizer, adapter=self.adapter_of(lora_request))
        return self.engine.add_request(given, params, output_token_ids=known)

    def step(self) -> list[StepOutput]:
        """Runs the engine for one step: what each request of add_request gained. Finished requests are dropped from the
        engine when they are reported here. An interrupt (Ctrl-C) waits for the end of the step, and nothing is lost."""
        self._turns.require_open()
        gained: list[StepOutput] = []
        try:
            with interrupt_between_steps(), self._turns.step_lock:
                if self.engine.has_unfinished_requests():
                    self._turns.dispatch(self.engine.step())
                gained, self._turns.foreign = self._turns.foreign, gained
            return gained
        except BaseException:
            with interrupt_between_steps(), self._turns.step_lock:
                self._turns.foreign[:0] = gained  # they did not reach the caller: the next call hands them out
            raise

    def wait_for_work(self, timeout: float) -> bool:
        """Sleeps until `step` has something to do or to report; returns False after `timeout` seconds without. For a
        thread that steps for others."""
        self._turns.require_open()
        woken = bool(self._turns.foreign) or self.engine.wait_for_work(timeout, lambda: bool(self._turns.foreign))
        self._turns.require_open()
        return woken

    def stats(self) -> EngineStats:
        """Gauges of now, and counters since the start. May be called from any thread, at any time."""
        return self.engine.stats()

    def abort(self, request_id: int) -> None:
        """Ends a request early; step() reports it as finished with reason "abort". May be called from any thread."""
        self.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything left to do or to report."""
        if self.engine.has_unfinished_requests() or self._turns.foreign:
            return True
        # Another thread's step may just be handing over what is ours.
        with interrupt_between_steps(), self._turns.step_lock:
            return bool(self._turns.foreign) or self.engine.has_unfinished_requests()

    def is_finished(self) -> bool:
        """True where no request is left to step for."""
        return not self.has_unfinished_requests()

    # -- new weights --------------------------------------------------------------------------------------------

    def load_weights(
        self,
        weights: "Weights",
        in_flight: str = "recompute",
        version: int | None = None,
    ) -> None:
        """Replaces all weights in place; graphs stay valid, and the prefix cache is emptied.

        `weights`: (checkpoint name, whole tensor) pairs, on any device (a DTensor is gathered), or a folder with
        *.safetensors. `in_flight`: what becomes of requests that have begun. "recompute": they start over from their
        tokens so far, which is exact; "keep": they go on with the KV of the old weights; "wait": they end first, while
        no other begins; "abort": they end now, with what they have, and so do those that wait. `version`: of these
        weights, see CompletionOutput.weight_versions; default: one more than that of the ones before.

        Raises ValueError naming a missing, surplus or misshapen weight. Of one engine nothing is written then, and it
        goes on with the weights that it has, unless `weights` can be read but once, as a generator can: steps are then
        refused until a call succeeds, as they are after any other failure.
        """
        given = as_weights(weights)
        self._turns.call("load_weights", weights=given, in_flight=in_flight, weight_version=version)

    def begin_update(self, in_flight: str = "recompute", partial: bool = False) -> None:
        """Begins an update of the weights, which calls of `update` bring. Until finish_update succeeds, steps are
        refused, or wait where the engine is paused. `in_flight`: as in load_weights. `partial`: True where some weights
        may not come, and keep their values. Called again, it starts over."""
        self._turns.call("begin_update", in_flight=in_flight, partial=partial)

    def update(self, weights: "Weights") -> None:
        """Replaces some of the weights, as load_weights replaces all. Raises ValueError naming one that is unknown,
        misshapen or was there already; those before it are written, and a corrected call can follow."""
        self._turns.call("update", weights=as_weights(weights))

    def finish_update(self, version: int | None = None) -> None:
        """Ends an update: steps go on with the new weights. Raises ValueError naming weights that did not come, or a
        version that does not go up; more calls of `update` can follow then."""
        self._turns.call("finish_update", weight_version=version)

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next step runs with; 0 for those that the engine started with."""
        return self.engine.state.weight_version

    def weights_changed(self) -> None:
        """Tells the engine that the module of from_module was written to: requests in flight start over from their
        tokens so far, and the prefix cache is emptied. Needed after writes that torch does not count, through a
        parameter's `.data`; the next request notices all others by itself."""
        with self._turns.turn() as engine:
            engine.notice_new_weights(surely=True)

    def checksum(self) -> dict[str, str]:
        """A checksum of each checkpoint tensor as the ranks hold it (in the engine's type), the same at every number of
        ranks. Raises RuntimeError where two ranks hold different values of one tensor."""
        checksums: dict[str, str] = self._turns.call("checksum")["checksums"]
        return checksums

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache: requests that begin from here on find nothing in it. Those that run keep their
        blocks."""
        self._turns.call("reset_prefix_cache")

    # -- sleep --------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None) -> int:
        """Gives memory back to the device until wake_up; returns the bytes. Needs enable_sleep=True.

        `tags`: "weights", "kv_cache" or both, the default. `level` 1 keeps the weights in pinned host memory; 2 drops
        them: after wake_up they come anew, by load_weights or begin_update. Requests that have begun (in a pause) start
        over from their tokens so far. Asleep, steps are refused. On a CPU no memory moves. Activations and graphs
        keep theirs. Raises OutOfMemory, with nothing changed, where the host has no room for the weights.
        """
        return int(self._turns.call("sleep", level=level, mode=None, tags=as_tags(tags))["freed_bytes"])

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes the memory again, at the same addresses, so that graphs stay valid; default: of all that sleeps.
        Raises OutOfMemory, with nothing changed, while others hold it: the call may be made again."""
        self._turns.call("wake_up", tags=as_tags(tags))

    # -- pauses -------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "keep") -> None:
        """Stops computing when this returns, until `resume`. "keep": requests stop where they are, and go on later;
        "wait": those that have begun end first; "abort": all end now, with what they have. New requests wait;
        `generate` returns after `resume` only."""
        self._turns.call("pause", mode=mode)

    def resume(self) -> None:
        """Ends a pause."""
        self._turns.require_open()
        self.engine.resume()

    @property
    def is_paused(self) -> bool:
        """True between `pause` and `resume`."""
        return self.engine.state.is_paused

    def abort_all(self) -> list[int]:
        """Ends every unfinished request with what it has: step() and generate() hand it out with reason "abort".
        Returns the ids."""
        self._turns.require_open()
        return self.engine.abort_all()

    # -- the engine ---------------------------------------------------------------------------------------------

    def engine_info(self) -> dict[str, Any]:
        """Device, versions, attention backend and why, KV blocks, start-up seconds: what a benchmark should print."""
        return self.engine.info()

    def close(self) -> None:
        """Ends the workers and frees the devices; nothing remains. Harmless when called again."""
        self._turns.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_engine(config: EngineConfig) -> Engine:
    """Loads the model of `config`; returns the engine over all of its ranks, or over all of its replicas."""
    if not config.has_front:
        return start_one(config)
    from nanovllm.host.start import start_fleet

    return start_fleet(config)
