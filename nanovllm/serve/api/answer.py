"""Base of answers to chats and completions: from checked fields to a request in flight, and from there to the
response."""

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from nanovllm.engine.prompt import Prompt
from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api import shapes
from nanovllm.serve.api.logprobs import prompt_entries, token_formatter
from nanovllm.serve.errors import ApiError, bad_request
from nanovllm.serve.front import Front
from nanovllm.serve.http.call import Call, Client
from nanovllm.serve.parsers import Plan
from nanovllm.serve.request import Completion, Request
from nanovllm.serve.served_model import ServedModel
from nanovllm.text.stops import VisibleText

SSE = b"text/event-stream; charset=utf-8"
_SSE_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Prepared(NamedTuple):
    """A request, checked and tokenized: what its `Answer` is made of."""

    fields: api.CommonFields
    prompts: list[Prompt]
    params: dict[str, Any]
    """Fields of SamplingParams, for all prompts."""
    max_tokens: list[int]
    """Maximum output tokens for each prompt."""
    plan: Plan | None = None
    """Plan by which the answer to a chat is held to a form and read."""


class Answer(Request):
    """A request whose response follows OpenAI's schema."""

    object_name = ""
    id_prefix = ""
    needs_ids = False

    def __init__(self, front: Front, call: Call, prepared: Prepared) -> None:
        """Raises ApiError where more may be said about tokens than an answer holds."""
        fields, prompts, params, max_tokens, plan = prepared
        check_details(front.model.info["vocab_size"], params, prompts, 0 if fields.stream else sum(max_tokens))
        super().__init__(call.given_id or self.id_prefix + call.request_id, prompts, front.now())
        self.call, self.call_id, self.key = call, call.request_id, call.key
        self.fields, self.front, self.params, self.max_tokens = fields, front, params, max_tokens
        self.trace_headers = call.trace_headers if front.log.tracer is not None else {}
        self.is_streamed = bool(fields.stream)
        self.interval = front.options.stream_interval
        options = fields.stream_options
        self.usage_in_chunks = options is not None and bool(options.continuous_usage_stats)
        self.include_usage = self.usage_in_chunks or (options is not None and bool(options.include_usage))
        self.created = int(time.time())
        self.k: int | None = params.get("logprobs")
        self.show = token_formatter(front.model.tokenizer.token_bytes, bool(fields.return_tokens_as_token_ids))
        self.model = fields.model or front.model.name
        self._prompt_entries: dict[int, shapes.PromptLogprobs] = {}
        self._begin = b"data: " + msgspec.json.encode(self.common())[:-1] + b',"choices":['
        includes = params.get("include_stop_str_in_output", False)
        eos = () if params.get("ignore_eos") else front.model.info["eos_token_ids"]
        stop_ids = [*params.get("stop_token_ids", ()), *eos]
        stop = params.get("stop") or ()
        stops = [stop] if isinstance(stop, str) else stop
        skips = params.get("skip_special_tokens", True)
        tags = {} if plan is None else plan.tags_seen(skips)
        for index in range(len(prompts) * params.get("n", 1)):
            prompt_index = index // params.get("n", 1)
            detokenizer = self.detokenizer(skips, prompts[prompt_index].token_ids)
            text = VisibleText(detokenizer, stops, includes, stop_ids, tags)
            self.completions.append(self._completion(index, prompt_index, text))

    def _completion(self, index: int, prompt_index: int, text: VisibleText) -> Completion:
        completion = Completion(self, index, prompt_index, text)
        if self.fields.return_token_ids or self.needs_ids:
            completion.ids = []
        if self.k is not None:
            completion.lines = []
        completion.prefix = self._begin + self.fast_prefix(index)
        return completion

    def detokenizer(self, skip_special_tokens: bool, prompt: Sequence[int]) -> Any:
        """A detokenizer for one completion of a prompt."""
        return self.front.model.tokenizer.detokenizer(skip_special_tokens, prompt)

    def explain(self, error: ApiError) -> None:
        if error.code == "invalid_schema":
            given = (name for name in api.CONSTRAINTS if getattr(self.fields, name, None) is not None)
            error.param = next(given, error.param)
            if error.param == "tools":  # without the grammar that they were made part of
                why = error.message.rpartition(" must compile, but: ")[2]
                error.message = "tools: " + re.split(r"\s\d+ \| ", why)[0]

    # -- what differs -------------------------------------------------------------------------------------------

    def common(self) -> dict[str, Any]:
        """Fields that begin a response, and each of its chunks."""
        own = {"id": self.id, "object": self.object_name, "created": self.created, "model": self.model}
        return own | {"system_fingerprint": self.front.model.fingerprint}

    fast_suffix = b""
    """End of a chunk that holds text alone: all after the text."""

    def fast_prefix(self, index: int) -> bytes:
        """Beginning of the choice in a chunk that holds text alone: all before the text."""
        raise NotImplementedError

    def delta(self, completion: Completion, text: str) -> dict[str, Any]:
        """A chunk's choice without index and finish_reason."""
        raise NotImplementedError

    def choice(self, completion: Completion, text: str) -> dict[str, Any]:
        """A choice of an unstreamed response, likewise."""
        raise NotImplementedError

    # -- streamed -----------------------------------------------------------------------------------------------

    def begin(self) -> Client | None:
        call, front = self.call, self.front
        if call.is_gone:
            return None
        connection = call.connection
        connection.transport.set_write_buffer_limits(high=limits.WRITE_BUFFER)
        connection.on_writable = lambda: front.streams.write(self, front.now())
        call.begin(200, SSE, _SSE_HEADERS)
        return connection

    def chunk(self, completion: Completion, text: str) -> bytes:
        if (
            completion.finish_reason is None
            and completion.ids is None
            and completion.lines is None
            and completion.reader is None
            and not self.usage_in_chunks
        ):
            return completion.prefix + msgspec.json.encode(text) + self.fast_suffix
        return self._event(self._with_details(self.delta(completion, text), completion))

    def _with_details(self, choice: dict[str, Any], completion: Completion) -> dict[str, Any]:
        """A chunk's choice with its end and with what was asked for beside the text."""
        choice = self._with_end(choice, completion)
        if completion.ids:
            if self.fields.return_token_ids:
                choice["token_ids"] = completion.ids
            completion.ids = []
        if completion.lines:
            completion.lines = []
        return choice

    def _event(self, choice: Any, **about: Any) -> bytes:
        """A chunk with one choice. `about`: what it says beside that."""
        if self.fields.return_token_ids:
            choice.setdefault("token_ids", [])
        if self.usage_in_chunks:
            about["usage"] = self.usage(self.num_sent)
        end = b"]," + msgspec.json.encode(about)[1:] if about else b"]}"
        return self._begin + msgspec.json.encode(choice) + end + b"\n\n"

    def _with_end(self, choice: dict[str, Any], completion: Completion) -> dict[str, Any]:
        choice = {"index": completion.index, **choice, "finish_reason": self.finish_reason(completion)}
        if completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return choice

    def ending(self) -> bytes:
        if not self.include_usage:
            return super().ending()
        return self._begin + b'],"usage":' + msgspec.json.encode(self.usage()) + b"}\n\n" + super().ending()

    # -- unstreamed ---------------------------------------------------------------------------------------------

    def response(self) -> bytes:
        """The whole answer."""
        choices = []
        for completion in self.completions:
            choice = self._with_end(self.choice(completion, "".join(completion.pieces)), completion)
            choice["stop_reason"] = completion.stop_reason
            choice["token_ids"] = completion.ids if self.fields.return_token_ids else None
            choices.append(choice)
        return msgspec.json.encode({**self.common(), "choices": choices, "usage": self.usage(), **self.about()})

    def about(self) -> dict[str, Any]:
        """Fields of the whole answer beside its choices."""
        return {"service_tier": None, "kv_transfer_params": None}

    @property
    def size(self) -> tuple[int, int]:
        """Bytes that the answer is written from: of numbers, and about how many of text."""
        lines = [*self.prompt_lines, *(part for each in self.completions for part in (each.lines, each.kept))]
        echo = self.n * sum(len(prompt.text or "") for prompt in self.prompts)
        return sum(num_bytes(part) for part in lines if part is not None), 4 * self.num_output_tokens + echo

    def of_prompt(self, prompt_index: int) -> dict[str, Any]:
        """Fields about a prompt; null where the request does not ask for them."""
        found: dict[str, Any] = {"prompt_token_ids": None, "prompt_logprobs": None}
        if self.fields.return_token_ids:
            found["prompt_token_ids"] = self.prompts[prompt_index].token_ids
        if (k := self.fields.prompt_logprobs) is not None:
            if prompt_index not in self._prompt_entries:
                entries = prompt_entries(self.prompt_lines[prompt_index] or [], k, self.show)
                self._prompt_entries[prompt_index] = shapes.written(entries)
            found["prompt_logprobs"] = self._prompt_entries[prompt_index]
        return found

    def usage(self, output: int | None = None) -> shapes.Usage:
        """`output`: tokens of it to count; all by default."""
        given, output = self.num_prompt_tokens, self.num_output_tokens if output is None else output
        return shapes.Usage(given, output, given + output, shapes.PromptDetails(self.num_cached_tokens))


def num_bytes(lines: Sequence[bytes | None]) -> int:
    """Bytes of the numbers in some lines."""
    return sum(len(line) for line in lines if line is not None)


async def answer(request: Answer) -> None:
    """Sends a request to the engine and its answer to the client."""
    front, call = request.front, request.call
    connection = call.connection
    call.require_client()  # who may have left while the prompt was tokenized
    front.submit(request)
    connection.on_disconnect = lambda: front.streams.leave(request)
    try:
        await request.done
        if request.has_left:
            return
        if request.is_streamed:
            call.end()
        else:
            await call.respond(await front.pool.write(call, request.response, *request.size))
    finally:
        connection.on_disconnect = connection.on_writable = None
        front.streams.leave(request)  # where it has not ended
        front.log.end_request(request)


def check_details(vocab: int, params: dict[str, Any], prompts: list[Prompt], max_tokens: int) -> None:
    """Raises ApiError where an answer may name more ids than it holds. `max_tokens`: of all prompts, kept up to its
    end."""
    n = params.get("n", 1)
    num_kept = min(top_k, vocab) if (top_k := params.get("top_k", 0)) > 0 else vocab
    for name, count, num_each, most in (
        ("prompt_logprobs", sum(map(len, prompts)), params.get("prompt_logprobs", -1) + 1, limits.PROMPT_LOGPROBS),
        ("logprobs", max_tokens, params.get("logprobs", -1) + 1, limits.LOGPROBS),
        ("sampling_mask", max_tokens, num_kept if params.get("sampling_mask") else 0, limits.MASK_IDS),
    ):
        if (total := n * count * num_each) > most:
            tokens = f"{count} {'prompt tokens' if name == 'prompt_logprobs' else 'tokens (max_tokens)'}"
            raise bad_request(f"{name}: {num_each} ids for each of {tokens}, n={n} times, is {total}, at most {most}")


def fit(
    model: ServedModel, token_ids: list[int], fields: api.CommonFields, asked: int | None, k: int | None,
    name: str = "prompt",
) -> tuple[Prompt, int]:  # fmt: skip
    """The prompt of these ids, cut where the request says so, and the most tokens that it can be continued by. Raises
    ApiError. `k`: likeliest ids of each token that the answer names, None where it names none. If no number of tokens
    is asked for, the most is as many as one answer may name them of. `name`: of the prompt's field, unless it is a
    chat."""
    limit = model.info["max_model_len"]
    if (keep := fields.truncate_prompt_tokens) is not None:
        token_ids = token_ids[-(limit - 1 if keep == -1 else max(1, keep)) :]
    if not token_ids:
        raise bad_request("the prompt is empty", name)
    if len(token_ids) + (asked != 0) > limit:
        more = "at least 1" if asked is None else asked
        what = f"{len(token_ids)} tokens in the prompt and asks for {more} in the completion"
        raise _too_long(limit, what, "messages" if isinstance(fields, api.ChatFields) else name, len(token_ids))
    room = limit - len(token_ids)
    if asked is None and k is not None and not fields.stream:
        asked = max(1, limits.LOGPROBS // ((k + 1) * (fields.n or 1)))
    prompt = Prompt.of(token_ids, fields.cache_salt, model.adapter_of(fields.model))
    return prompt, room if asked is None else min(asked, room)


def check_size(model: ServedModel, size: int, name: str) -> None:
    """Raises ApiError where a body of `size` bytes is longer than the context is worth, before anything is made of
    it."""
    limit = model.info["max_model_len"]
    most = limits.TEXT_BYTES + limits.TEXT_BYTES_PER_TOKEN * limit
    if size > most:
        what = f"{size} bytes of text, tools and template variables, at most {most} are taken"
        raise _too_long(limit, what, name, size // limits.TEXT_BYTES_PER_TOKEN)


def check_characters(model: ServedModel, count: int, name: str) -> None:
    """Raises ApiError where a text of so many characters cannot fit, before it is tokenized."""
    limit = model.info["max_model_len"]
    most = limits.TEXT_BYTES + limits.TEXT_BYTES_PER_TOKEN * limit
    if count > most:
        what = f"{count} characters, at most {most} are taken"
        raise _too_long(limit, what, name, count // limits.TEXT_BYTES_PER_TOKEN)
    if count > limit * model.tokenizer.longest_token:
        what = f"{count} characters, which are more than {limit} tokens"
        raise _too_long(limit, what, name, count // model.tokenizer.longest_token)


def _too_long(limit: int, what: str, name: str, count: int) -> ApiError:
    """`count`: tokens of the prompt, at least."""
    text = f"This model's maximum context length is {limit} tokens. However, your request has {what}."
    error = bad_request(f"{text} Please reduce the length of the prompt.", name, "context_length_exceeded")
    error.excess = count, limit - 1
    return error
