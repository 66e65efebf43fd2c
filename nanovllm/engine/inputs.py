"""Prompts, chats, parameters and weights of a user, brought into one form; errors name what is wrong. No torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.engine.prompt import Prompt
from nanovllm.errors import TEXT_ALONE, shown
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.executor.protocol import Weights

GivenPrompt = str | list[int] | Mapping[str, str | list[int]] | Prompt
"""Prompt as a user may give it, vLLM's forms included: {"prompt": text} or {"prompt_token_ids": ids}; or one that was
read already."""


_AT_A_TIME = 256
"""Texts that are tokenized together, during which no Ctrl-C is noticed."""


def ids_of_texts(
    given: Sequence[GivenPrompt], tokenizer: Tokenizer, is_chat: bool = False
) -> Iterator[list[int] | None]:
    """Token ids of each prompt that is a text, as as_prompt takes them, by a thread for each core; None for others, and
    beside one that as_prompt refuses."""
    for first in range(0, len(given), _AT_A_TIME):
        some = given[first : first + _AT_A_TIME]
        texts = [each for each in some if isinstance(each, str)]
        try:
            found = iter(tokenizer.own.encode_all(texts, not is_chat) if len(texts) > 1 else [])
        except ValueError:
            found = iter([])
        yield from (next(found, None) if isinstance(each, str) else None for each in some)


def as_prompt(
    given: GivenPrompt, params: SamplingParams, tokenizer: Tokenizer, is_chat: bool = False, adapter: str | None = None,
    ids: list[int] | None = None,
) -> Prompt:  # fmt: skip
    """Reads a prompt. `is_chat`: a template made the text, so it contains its special tokens. `adapter`: digest of its
    adapter. `ids`: of the text, where they are known. Raises ValueError and TypeError."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params: must be SamplingParams, found {type(params).__name__}")
    if isinstance(given, Prompt):
        return given
    if not isinstance(given, (str, list)) and isinstance(given, Mapping):  # which takes longer to find out
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1 or not given.keys() <= {"prompt", "prompt_token_ids"}:
            more = f"; {TEXT_ALONE}" if "multi_modal_data" in given else ""
            raise ValueError(f"prompt={shown(given)}: must have one entry, 'prompt' or 'prompt_token_ids'{more}")
        [given] = given.values()
    if isinstance(given, str):
        ids = tokenizer.own.encode(given, not is_chat) if ids is None else ids
        return Prompt.of(ids, params.cache_salt, adapter, given)
    return Prompt.of(as_token_ids(given), params.cache_salt, adapter)


def as_token_ids(given: list[int], name: str = "prompt") -> list[int]:
    """Token ids as plain integers. Raises ValueError and TypeError that name the argument, `name`."""
    if isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{name}: must be a str or a list of token ids, found {type(given).__name__}")
    kinds = set(map(type, given))
    if kinds <= {int}:
        return list(given)
    for kind in kinds:
        if not issubclass(kind, (int, np.integer)) or kind is bool:
            bad = next(token_id for token_id in given if type(token_id) is kind)
            raise ValueError(f"{name}: token id {shown(bad)} must be an integer, found {kind.__name__}")
    return [int(token_id) for token_id in given]


def as_batch(prompts: GivenPrompt | Sequence[GivenPrompt]) -> list[GivenPrompt]:
    if isinstance(prompts, (str, Mapping, Prompt)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, bytearray, Set)):
        found = type(prompts).__name__
        raise TypeError(f"prompts: must be a str, a list of token ids or a list of such, found {found}")
    batch: list[Any] = list(prompts)
    return [batch] if batch and all(isinstance(item, (int, np.integer)) for item in batch) else batch


def behind(before: str, given: GivenPrompt) -> GivenPrompt:
    """A prompt with a text before its own, if it has one."""
    if isinstance(given, Mapping) and isinstance(text := given.get("prompt"), str):
        return {**given, "prompt": before + text}
    return before + given if isinstance(given, str) else given


def as_chats(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
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
        chats[number] = [_with_text(message, f"{name}[{index}]") for index, message in enumerate(chat)]
    return chats


def _with_text(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Joins the texts of a message whose content is a list of OpenAI's parts; other messages stay as they are. Raises
    ValueError for a part that is not text."""
    parts = message.get("content")
    if not isinstance(parts, (list, tuple)):
        return message
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text or any(part.get(name) is not None for name in ("image", "image_url", "video", "audio")):
            bound = f"content must be a text, or parts of type 'text', found {shown(part)}"
            raise ValueError(f"{name}: {bound}; {TEXT_ALONE}")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(param, SamplingParams) for param in params):
        raise TypeError(f"sampling_params={shown(params)}: must be SamplingParams, or a list of them")
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} given, must be one or as many as prompts ({count})")
    return list(params)


def as_weights(given: "Weights") -> "Weights":
    """New weights as they are. Raises TypeError for what is none, before anything of an engine changes."""
    if not isinstance(given, (str, Path, Iterable)):
        raise TypeError(f"weights: must be a folder or (name, tensor) pairs, found {type(given).__name__}")
    return given


def as_tags(tags: Iterable[str] | None) -> list[str] | None:
    """Tags as a list, which can be read again and sent to replicas."""
    return tags if tags is None else [tags] if isinstance(tags, str) else list(tags)
