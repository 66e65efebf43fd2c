"""POST /v1/completions."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.serve import limits
from nanovllm.serve.api import fields as api
from nanovllm.serve.api.answer import Answer, answer, check_characters, fit
from nanovllm.serve.api.logprobs import completion_logprobs
from nanovllm.serve.errors import bad_request
from nanovllm.serve.http.call import Call
from nanovllm.serve.request import Completion

if TYPE_CHECKING:
    from nanovllm.serve.front import Front

_DEFAULT_MAX_TOKENS = 16


class CompletionAnswer(Answer):
    object_name = "text_completion"
    id_prefix = "cmpl-"
    fast_suffix = b',"logprobs":null,"finish_reason":null}]}\n\n'

    fields: api.CompletionFields
    drops_tokens = False
    """max_tokens=0: one token is computed, for the prompt's log-probabilities, and not shown."""
    echoes: list[str] | None = None
    """The prompts' texts, where they are to be shown."""

    def fast_prefix(self, index: int) -> bytes:
        return b'{"index":%d,"text":' % index

    def head(self, completion: Completion) -> bytes:
        if self.echoes is None:
            return b""
        text = self.echoes[completion.prompt_index]
        completion.state = len(text)
        return self._event({"index": completion.index, "text": text, "logprobs": None, "finish_reason": None})

    def delta(self, completion: Completion, text: str) -> dict[str, Any]:
        offset = completion.state or 0
        completion.state = offset + len(text)
        logprobs = None
        if completion.lines is not None:
            logprobs = completion_logprobs(completion.lines, (), self.k or 0, self.show, offset)
        return {"text": text, "logprobs": logprobs}

    def choice(self, completion: Completion, text: str) -> dict[str, Any]:
        if self.drops_tokens:
            text, completion.lines = "", None if completion.lines is None else []
        lines: list[bytes | None] | None = None if completion.lines is None else [*completion.lines]
        if self.echoes is not None:
            text = self.echoes[completion.prompt_index] + text
            if lines is not None:
                lines = [*(self.prompt_lines[completion.prompt_index] or []), *lines]
        logprobs = None
        if lines is not None:
            ids = self.prompts[completion.prompt_index]
            logprobs = completion_logprobs(lines, ids, self.k or 0, self.show, 0)
        return {"text": text, "logprobs": logprobs, **self.of_prompt(completion.prompt_index)}

    @property
    def num_output_tokens(self) -> int:
        return 0 if self.drops_tokens else super().num_output_tokens

    def finish_reason(self, completion: Completion) -> str | None:
        return "length" if self.drops_tokens else super().finish_reason(completion)


async def _prompts(front: "Front", fields: api.CompletionFields) -> list[list[int]]:
    """The prompts as token ids. Raises ApiError."""
    given = fields.prompt
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise bad_request("prompt: must be a text, a list of token ids, or a list of such", "prompt")
    count = len(given) * (fields.n or 1)  # n is checked by now
    if count > limits.COMPLETIONS:
        raise bad_request(f"prompt: prompts x n is {count}, must be at most {limits.COMPLETIONS}", "prompt")
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    check_characters(front, sum(map(len, texts)) if len(texts) == 1 else max(map(len, texts), default=0), "prompt")
    if "" in texts:
        raise bad_request("prompt: must not be an empty text", "prompt")
    special = fields.add_special_tokens is not False
    ids: Iterator[list[int]] = iter(())
    if texts:
        size = sum(map(len, texts)) + 32 * len(texts)
        ids = iter(await front.in_pool(lambda: [front.tokenizer.encode(text, special) for text in texts], size))
    return [next(ids) if isinstance(prompt, str) else _token_ids(front, prompt) for prompt in given]


def _token_ids(front: "Front", prompt: Any) -> list[int]:
    if not isinstance(prompt, list) or not prompt or not all(type(each) is int for each in prompt):
        raise bad_request("prompt: must be texts, or lists of token ids that are not empty", "prompt")
    vocab = front.info["vocab_size"]
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise bad_request(f"prompt: token ids must be in 0..{vocab - 1}", "prompt")
    return prompt


def _check(fields: api.CompletionFields) -> None:
    if fields.echo and fields.stream and fields.logprobs is not None:
        raise bad_request("echo: not together with stream and logprobs", "echo")


async def completions(front: "Front", call: Call) -> None:
    front.admit()
    fields, ignored = api.read(api.CompletionFields, await call.json(), front.options.strict_fields)
    front.note_ignored(call, ignored)
    front.check_model(fields.model)
    _check(fields)
    asked = _DEFAULT_MAX_TOKENS if (most := api.max_tokens(fields)) is None else most
    if asked == 0 and not fields.echo:
        raise bad_request("max_tokens=0: must be >= 1, or come with echo=true", "max_tokens")
    longest = max(asked, 1, fields.min_tokens or 0)
    params = api.sampling_fields(fields, front.defaults, longest, fields.logprobs, api.structured(fields))
    if fields.echo and fields.logprobs is not None:
        params.setdefault("prompt_logprobs", fields.logprobs)
    fitted = [fit(front, prompt, fields, max(asked, 1)) for prompt in await _prompts(front, fields)]
    request = CompletionAnswer(front, call, fields, [prompt for prompt, _ in fitted], params)
    request.drops_tokens = asked == 0
    if fields.echo:
        given = fields.prompt if isinstance(fields.prompt, list) else [fields.prompt]
        request.echoes = [
            text if isinstance(text, str) else front.tokenizer.decode(prompt, False)
            for text, prompt in zip(
                given if isinstance(given[0], (str, list)) else [given], request.prompts, strict=True
            )
        ]
    await answer(call, request, params, [count for _, count in fitted])
