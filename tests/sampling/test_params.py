"""SamplingParams: what is refused, by name, value and bound; what is kept."""

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from nanovllm import SamplingParams, StructuredOutput
from nanovllm.config import EngineConfig
from nanovllm.errors import shown

BAD: list[tuple[str, Any]] = [
    ("n", 0), ("n", True), ("n", 1.5), ("n", 129),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", "1"), ("temperature", 10**400),
    ("temperature", -math.inf), ("temperature", 1e39), ("temperature", None), ("temperature", True),
    ("top_p", 0), ("top_p", 1.1), ("top_p", math.nan), ("top_p", None),
    ("top_k", -2), ("top_k", 0.5),
    ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3), ("frequency_penalty", math.inf),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf),
    ("seed", 2**63), ("seed", 1.0), ("seed", True), ("seed", "1"), ("seed", -(2**63) - 1),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", "x" * 257),
    ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("stop_token_ids", 7), ("stop_token_ids", "12"),
    ("include_stop_str_in_output", 1), ("ignore_eos", None), ("ignore_eos", 1), ("detokenize", "no"),
    ("skip_special_tokens", 0),
    ("min_tokens", -1), ("min_tokens", 17), ("max_tokens", -1), ("max_tokens", 1.0), ("max_tokens", "5"),
    ("max_tokens", True),
    ("cache_salt", ""), ("cache_salt", "x" * 129), ("cache_salt", 5),
    ("logprobs", -2), ("logprobs", True), ("prompt_logprobs", -2), ("prompt_logprobs", 1.0),
    ("logprobs_mode", "cooked"), ("sampling_mask", 1), ("prompt_logprob_start", -1),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 101}), ("logit_bias", {1: math.nan}), ("logit_bias", {"a": 1.0}),
    ("logit_bias", [1]),
    ("bad_words", [""]), ("bad_words", [3]), ("bad_words", ["x" * 257]),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", 3),
    ("structured_outputs", "json"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={shown(value)}" for name, value in BAD])
def test_refused_by_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"SamplingParams\.{name}=.*must be"):
        SamplingParams(**{name: value})


def test_bounds_themselves_are_taken() -> None:
    for name, value in (("temperature", 0), ("max_tokens", 0), ("seed", -(2**63)), ("seed", 2**63 - 1), ("n", 128)):
        assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "most", "value"),
    [("stop", 16, "a"), ("bad_words", 256, "a"), ("stop_token_ids", 1024, 5), ("allowed_token_ids", 1 << 18, 5)],
)
def test_lists_have_a_bound_and_are_not_read_beyond_it(name: str, most: int, value: Any) -> None:
    assert len(getattr(SamplingParams(**{name: [value] * most}), name)) == most
    taken: list[Any] = []
    endless = (taken.append(value) or value for _ in count())  # type: ignore[func-returns-value]
    with pytest.raises(ValueError, match=rf"SamplingParams\.{name}: must have at most {most} entries"):
        SamplingParams(**{name: endless})
    assert len(taken) == most + 1


def test_biases_have_a_bound() -> None:
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)).logit_bias) == 1024
    with pytest.raises(ValueError, match=r"logit_bias: must have at most 1024 entries"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))


LONG = "0123456789" * 100_000


@pytest.mark.parametrize(
    "make",
    [
        lambda: SamplingParams(stop=LONG),
        lambda: SamplingParams(bad_words=[LONG]),
        lambda: SamplingParams(logit_bias={LONG: 1.0}),  # type: ignore[dict-item]
        lambda: SamplingParams(temperature=LONG),  # type: ignore[arg-type]
        lambda: SamplingParams(seed=10**50_000),
        lambda: SamplingParams(stop_token_ids=[LONG]),  # type: ignore[list-item]
        lambda: SamplingParams(structured_outputs=LONG),  # type: ignore[arg-type]
        lambda: StructuredOutput(choice=[[LONG]]),  # type: ignore[arg-type]
        lambda: StructuredOutput(json=[LONG] * 50),  # type: ignore[arg-type]
        lambda: EngineConfig("model", device=LONG),
        lambda: EngineConfig("model", hf_overrides=[LONG]),  # type: ignore[arg-type]
    ],
)
def test_messages_do_not_repeat_a_long_value(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert len(str(error.value)) < 400, str(error.value)[:500]


def test_numbers_of_numpy_are_numbers() -> None:
    """Lengths and settings often come out of arrays. What is kept is Python's own, which JSON and pickle know."""
    bias = {np.int64(5): np.half(1)}
    lists = {"stop_token_ids": np.array([3, 4]), "allowed_token_ids": np.arange(2), "logit_bias": bias}
    numbers = {"max_tokens": np.int64(7), "seed": np.uint8(3), "temperature": np.float32(0.5), "top_p": np.float64(0.5)}
    params = SamplingParams(**lists, **numbers)
    same = {"stop_token_ids": [3, 4], "allowed_token_ids": [0, 1], "logit_bias": {5: 1.0}}
    assert params == SamplingParams(**same, max_tokens=7, seed=3, temperature=0.5, top_p=0.5)
    assert {type(getattr(params, name)) for name in ("max_tokens", "seed")} == {int}
    assert type(params.temperature) is float
    wrong = {"max_tokens": np.int64(-1), "top_k": np.float32(2), "n": np.True_, "top_p": np.float32(2)}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"SamplingParams\.{name}=.*must be"):
            SamplingParams(**{name: value})


def test_none_leaves_a_list_empty_and_the_length_to_the_context() -> None:
    empty = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None)
    assert empty == SamplingParams()
    assert SamplingParams(max_tokens=None, min_tokens=10**6).max_tokens is None


def test_a_misspelt_field_is_named_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"SamplingParams: unknown field 'temprature'; did you mean 'temperature'\?"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"StructuredOutput: unknown field 'choices'; did you mean 'choice'\?"):
        StructuredOutput(choices=["a"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"StructuredOutput: unknown field 'jason'; did you mean 'json'\?"):
        SamplingParams(structured_outputs={"jason": "{}"})
    params = SamplingParams(temperature=0.5, stop="a")
    for copied in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), replace(params, seed=None)):
        assert copied == params


def test_a_constraint_may_be_a_dict_or_a_pydantic_model() -> None:
    schema = {"type": "object"}
    assert SamplingParams(structured_outputs={"json": schema}).structured_outputs == StructuredOutput(json=schema)
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Answer", sure=(bool, ...))
    assert StructuredOutput(json=model).json == model.model_json_schema()


def test_stop_needs_text() -> None:
    with pytest.raises(ValueError, match=r"stop=.*detokenize=False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    "fields", [{}, {"json": "{}", "regex": "a"}, {"choice": []}, {"choice": "ab"}, {"choice": 5}, {"choice": ["a", ""]},
               {"regex": ""}, {"json": 3}, {"grammar": 5}, {"json_object": 2}]
)  # fmt: skip
def test_structured_output_is_one_thing(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="StructuredOutput"):
        StructuredOutput(**fields)


def test_frozen_all_through() -> None:
    stop, bias, ids = ["a", "b"], {"5": 1}, [3, 4]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ids, allowed_token_ids=iter([1, 2]))
    stop.append("c")
    bias["6"] = 2
    ids.append(5)
    assert (params.stop, params.logit_bias, params.stop_token_ids) == (("a", "b"), {5: 1.0}, (3, 4))
    assert params.allowed_token_ids == (1, 2)
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4], allowed_token_ids=[1, 2]))
    assert SamplingParams(stop="ab").stop == ("ab",)


@pytest.mark.parametrize(
    "off", [{}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1, "min_p": 0}, {"temperature": 0, "top_k": 5}]
)
def test_what_filters_nothing(off: dict[str, Any]) -> None:
    assert not SamplingParams(**off).filters and SamplingParams(**off).is_plain
    assert SamplingParams(**{**off, "temperature": 1.0, "min_p": 0.1}).filters


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"presence_penalty": 0.1}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"stop": "a"},
                {"min_tokens": 1}, {"logit_bias": {1: 0.5}}, {"allowed_token_ids": [0]}, {"bad_words": "a"}]
)  # fmt: skip
def test_what_leaves_the_fast_path(options: dict[str, Any]) -> None:
    assert not SamplingParams(**options).is_plain
    assert SamplingParams(seed=3, temperature=0.4, stop_token_ids=[3], ignore_eos=True, n=2, max_tokens=5).is_plain
