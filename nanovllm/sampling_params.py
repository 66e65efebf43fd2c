"""Sampling options of one request: frozen, checked when made, no torch.

The order in which the options act, as in vLLM: the raw logits give `logprobs`, unless logprobs_mode says otherwise;
then allowed_token_ids, bad_words, the grammar of `structured_outputs`, min_tokens, logit_bias, the penalties,
temperature, min_p, top_k, top_p, then sampling.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, NoReturn

from nanovllm.errors import (
    FLAG,
    SHARE,
    Bound,
    integer,
    is_integer,
    is_number,
    one_of,
    option,
    plain,
    refuse,
    require_known,
)  # fmt: skip

MAX_FLOAT32 = 3.4e38
MAX_BIAS = 100.0
MAX_N = 128
MAX_STOP, MAX_BAD_WORDS = 16, 256
"""Texts in such a list; each has at most MAX_TEXT characters."""
MAX_TEXT = 256
MAX_IDS = 1024
"""Entries of stop_token_ids and logit_bias."""
MAX_ALLOWED_IDS = 1 << 18
"""Entries of allowed_token_ids: more than a vocabulary has."""
MAX_SALT = 128
_NO_BOUND = 2**62  # of max_tokens


def _refuse(name: str, value: Any, bound: str) -> NoReturn:
    refuse(f"SamplingParams.{name}", value, bound)


def _items(name: str, value: Any, most: int, what: str) -> tuple[Any, ...]:
    """The items of a list that a user gave; one that is too long is not read to its end."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        _refuse(name, value, what)
    items = tuple(islice(value, most + 1))
    if len(items) > most:
        raise ValueError(f"SamplingParams.{name}: must have at most {most} entries")
    return items


@dataclass(frozen=True)
class StructuredOutput:
    """Form that an output must have; exactly one field is given. Needs the optional extra "structured" (llguidance)."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as a dict or as text, or a pydantic model: the output is JSON that it admits."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF (`root ::= ...`)."""
    json_object: bool = False
    """True: any JSON object."""

    def __new__(cls, *_: Any, **options: Any) -> "StructuredOutput":
        require_known("StructuredOutput", "field", options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if callable(schema_of := getattr(self.json, "model_json_schema", None)):
            object.__setattr__(self, "json", schema_of())
        given = self.given
        if len(given) != 1:
            raise ValueError(f"StructuredOutput: must be given exactly one of its fields, found {[*given] or 'none'}")
        if self.json is not None and not isinstance(self.json, (str, Mapping)):
            refuse("StructuredOutput.json", self.json, "a JSON schema, as a dict or as text, or a pydantic model")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                refuse(f"StructuredOutput.{name}", value, "a text that is not empty")
        if self.choice is not None:
            several = isinstance(self.choice, Iterable) and not isinstance(self.choice, str)
            choices = tuple(self.choice) if several else ()
            if not choices or not all(isinstance(one, str) and one for one in choices):
                refuse("StructuredOutput.choice", self.choice, "texts, at least one, none empty")
            object.__setattr__(self, "choice", choices)
        if not isinstance(self.json_object, bool):
            refuse("StructuredOutput.json_object", self.json_object, "True or False")

    @property
    def given(self) -> dict[str, Any]:
        """The one field that is given, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, False)}


def _number(low: float, high: float, bound: str) -> Bound:
    return lambda value: is_number(value) and low <= value <= high, bound


def wrap_seed(seed: int) -> int:
    """Any integer as one of 64 bits, so that seeds can be counted up past the largest."""
    return (seed + 2**63) % 2**64 - 2**63


_COUNT = integer(0)
_LOGPROBS: Bound = (integer(-1)[0], "None or an integer >= -1 (-1: the whole vocabulary)")
_PENALTY = _number(-2, 2, "a number in [-2, 2]")
_FORM: Bound = (
    lambda value: isinstance(value, (StructuredOutput, Mapping)), "None, a StructuredOutput or a dict of its fields",
)  # fmt: skip
_SALT: Bound = (
    lambda value: isinstance(value, str) and 0 < len(value) <= MAX_SALT, f"None or a text of 1..{MAX_SALT} characters",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; their meaning follows vLLM's, so that they carry over. Types are those of the values
    that are kept: None is taken for an empty list, a dict for structured_outputs."""

    n: int = option(1, integer(1, MAX_N))
    """1..128 completions of the prompt; they share its KV blocks. Greedy ones are all the same."""
    temperature: float = option(1.0, _number(0, MAX_FLOAT32, "a finite number >= 0 (of float32's range)"))
    """Divides the logits; 0 is greedy (ties go to the lowest token id)."""
    top_p: float = option(1.0, SHARE)
    """Sample from the fewest most likely tokens whose probabilities add up to this much, in (0, 1]. Tokens as likely as
    the last of them stay too. 1 is off."""
    top_k: int = option(0, integer(-1))
    """Sample from the k most likely tokens; tokens as likely as the k-th stay too. 0 and -1 are off."""
    min_p: float = option(0.0, _number(0, 1, "a number in [0, 1]"))
    """Drop tokens less likely than this share, in [0, 1], of the likeliest token's probability. 0 is off."""
    presence_penalty: float = option(0.0, _PENALTY)
    """Subtracted, in [-2, 2], from the logits of tokens that the output has."""
    frequency_penalty: float = option(0.0, _PENALTY)
    """Subtracted, in [-2, 2], from a token's logit as many times as the output has it."""
    repetition_penalty: float = option(1.0, _number(1e-6, 1e6, "a number > 0 (in [1e-6, 1e6])"))
    """Divides positive logits, multiplies negative ones, of tokens that prompt or output have; above 0. 1 is off."""
    seed: int | None = option(None, (integer(-(2**63), 2**63 - 1)[0], "None or a 64-bit integer"))
    """Keys this request's sampling; completion i of n has seed + i. Default: derived from the engine's seed and the
    request's number."""
    stop: str | Iterable[str] = ()
    """Texts, at most 16, that end the output where they appear, also across tokens. The output text ends before them.
    If a token completes several, the one that begins first counts."""
    include_stop_str_in_output: bool = False
    """True: the output text ends after the stop string instead."""
    stop_token_ids: Iterable[int] = ()
    """Token ids, at most 1,024, that end the output; the token itself stays part of it."""
    ignore_eos: bool = False
    """True: end-of-text tokens do not end the output."""
    min_tokens: int = option(0, _COUNT)
    """Least number of output tokens: until then end-of-text and stop_token_ids cannot be sampled, and `stop` is not
    looked for."""
    max_tokens: int | None = option(16, (lambda value: value is None or _COUNT[0](value), "None or an integer >= 0"))
    """Maximum tokens to generate; fewer where max_model_len or the KV cache ends first. None: up to there. 0: the
    prompt is computed, for its log-probabilities say, and the output is empty."""
    logprobs: int | None = option(None, _LOGPROBS)
    """Log-probabilities of that many likeliest tokens and of the sampled one, for each token; -1: of the whole
    vocabulary. Bounded by the engine's max_logprobs."""
    logprobs_mode: str | None = option(None, (one_of("raw", "processed")[0], "None, 'raw' or 'processed'"))
    """Distribution of `logprobs`: "raw", the logits as the model gives them; "processed", what the token is sampled
    from: after bias, penalties, grammar and temperature, among the tokens that the filters keep (temperature 0 divides
    and filters nothing). None: as the engine's option says."""
    sampling_mask: bool = False
    """True: the completion's `sampling_mask` has, for each token, the ids that it was sampled from."""
    prompt_logprobs: int | None = option(None, _LOGPROBS)
    """Likeliest tokens whose log-probabilities are returned, as by `logprobs`, for each prompt token but the first;
    always of the raw logits."""
    prompt_logprob_start: int = option(0, _COUNT)
    """First position of the prompt whose log-probability is wanted: those before it may come from the prefix cache."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of at most 1,024 token ids; each bias in [-100, 100]."""
    bad_words: Iterable[str] = ()
    """Texts, at most 256, that the output must not hold, each as the tokenizer writes it at the start of a text and
    after a blank."""
    allowed_token_ids: Iterable[int] | None = None
    """Only these can be sampled."""
    structured_outputs: StructuredOutput | None = option(None, _FORM, hash=False)
    """Constrains the output to a JSON schema, a regular expression, a choice or a grammar; a dict has its fields."""
    detokenize: bool = True
    """False: the output's text stays empty."""
    skip_special_tokens: bool = True
    """False: special tokens are part of the text."""
    cache_salt: str | None = option(None, _SALT)
    """Text of at most 128 characters: prompts share cached KV blocks only with requests of the same salt, so that the
    time to a first token tells nothing about the prompts of others (CVE-2025-46570)."""

    def __new__(cls, *_: Any, **options: Any) -> "SamplingParams":
        require_known("SamplingParams", "field", options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        defaults = SamplingParams.__dict__
        given = {name: value for name, value in vars(self).items() if value is not defaults.get(name)}
        for name, value in given.items():
            if (number := plain(value)) is not value:
                object.__setattr__(self, name, number)
            holds, bound = _BOUNDS.get(name, (None, ""))
            if holds is not None and not holds(number):
                _refuse(name, number, bound)
        self._check_lists(given)
        if isinstance(self.structured_outputs, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutput(**self.structured_outputs))
        if self.min_tokens > self.most_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "empty with detokenize=False: stop strings are looked for in the text")

    def _check_lists(self, given: Collection[str]) -> None:
        """Lists become tuples: a frozen object whose lists can change is not frozen. `given`: fields that are not the
        default."""
        for name, most in (("stop", MAX_STOP), ("bad_words", MAX_BAD_WORDS)):
            if name in given:
                value = () if (found := getattr(self, name)) is None else found
                bound = f"a text or a list of texts, none of them empty or of more than {MAX_TEXT} characters"
                texts = (value,) if isinstance(value, str) else _items(name, value, most, bound)
                if not all(isinstance(text, str) and 0 < len(text) <= MAX_TEXT for text in texts):
                    _refuse(name, value, bound)
                object.__setattr__(self, name, texts)
        if "stop_token_ids" in given:
            object.__setattr__(self, "stop_token_ids", self._ids("stop_token_ids", MAX_IDS))
        if self.allowed_token_ids is not None:
            ids = self._ids("allowed_token_ids", MAX_ALLOWED_IDS)
            if not ids:
                _refuse("allowed_token_ids", ids, "a list of token ids, not empty")
            object.__setattr__(self, "allowed_token_ids", ids)
        object.__setattr__(self, "logit_bias", {} if self.logit_bias == {} else self._bias())

    def _ids(self, name: str, most: int) -> tuple[int, ...]:
        bound = "a list of token ids"
        given = getattr(self, name)
        ids = () if given is None else _items(name, given, most, bound)
        if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:  # in a fraction of the time of the rest
            return ids
        ids = tuple(map(plain, ids))
        if not all(is_integer(one) and one >= 0 for one in ids):
            _refuse(name, ids, bound)
        return ids

    def _bias(self) -> dict[int, float]:
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            _refuse("logit_bias", bias, "a dict of token id: bias")
        copy: dict[int, float] = {}
        for token_id in _items("logit_bias", bias, MAX_IDS, "a dict"):
            in_json = isinstance(token_id, str) and token_id.isdecimal() and len(token_id) < 20
            number, value = int(token_id) if in_json else plain(token_id), plain(bias[token_id])
            if not is_integer(number) or number < 0:
                _refuse("logit_bias", {token_id: value}, "a dict whose keys are token ids")
            if not is_number(value) or abs(value) > MAX_BIAS:
                _refuse("logit_bias", {token_id: value}, f"a dict of numbers in [-{MAX_BIAS}, {MAX_BIAS}]")
            copy[number] = float(value)
        return copy

    @property
    def most_tokens(self) -> int:
        """`max_tokens` as a number, also where there is no bound."""
        return _NO_BOUND if self.max_tokens is None else self.max_tokens

    @property
    def is_plain(self) -> bool:
        """Whether greedy or temperature is all there is to it: such a row stays on the fast path throughout."""
        lists = self.stop or self.logit_bias or self.bad_words or self.allowed_token_ids or self.structured_outputs
        counts = self.logprobs is not None or self.prompt_logprobs is not None or self.min_tokens > 0
        counts = counts or self.sampling_mask
        return not (lists or counts or self.filters or self.penalizes)

    @property
    def filters(self) -> bool:
        """Whether sampling is limited to the likeliest tokens; a greedy choice is not changed by that."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


_BOUNDS: dict[str, Bound] = {
    each.name: each.metadata.get("bound", FLAG) for each in fields(SamplingParams) if each.metadata or each.type is bool
}
"""Bounds of the fields that are no lists."""
