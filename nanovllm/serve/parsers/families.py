"""Forms of tool calls, one for each family of models, and the family that a chat template is of."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class CallForm:
    """Form of a family's calls, as texts with slots. {name}: of the function; {arguments}: a JSON object; {parameters}:
    a `parameter` for each argument, with {key} and {value}; {call}: name and arguments as one JSON object; {id}: nine
    letters and digits, and {number}: digits, which nobody needs; {blank}, {break}, {breaks}: a blank, a line break, up
    to two of them, or nothing. A reader takes any blanks around texts."""

    tags: tuple[str, ...]
    """Tags, which are single tokens of most vocabularies; the first begins calls."""
    call: str
    between: str
    """Text between two calls: the tag that begins the next one, or a separator."""
    first: str = ""
    """Text between the tag and the first call."""
    last: str = ""
    """Text after the last call, where one tag begins them all."""
    parameter: str = ""
    value_begin: str = ""
    """Text before a value that is written as it is; after an empty one, what ends the value may stand in its place."""
    arguments: str = "arguments"
    """Name of the arguments in {call}."""
    bare: str = ""
    """Text with which a call may begin without the tag."""
    is_tagged: bool = True
    """Whether the grammar asks for the tag; if not, an answer is words or calls."""


class Slot(Enum):
    """Slot of a form (see CallForm)."""

    NAME, ARGUMENTS, PARAMETERS, CALL = "name", "arguments", "parameters", "call"
    ID, NUMBER, BLANK, BREAK, BREAKS = "id", "number", "blank", "break", "breaks"


def _hy_v3(suffix: str) -> CallForm:
    """Hy3's, whose tags end with a suffix in some checkpoints."""
    calls, call, key, value = (f"{name}{suffix}>" for name in ("tool_calls", "tool_call", "arg_key", "arg_value"))
    separator = f"<tool_sep{suffix}>"
    return CallForm(
        tags=(*(begin + name for name in (calls, call, key, value) for begin in ("<", "</")), separator),
        first="{break}",
        call=f"<{call}{{name}}{separator}{{break}}{{parameters}}</{call}",
        parameter=f"<{key}{{key}}</{key}{{break}}<{value}{{value}}</{value}{{break}}",
        between="{break}",
        last=f"{{break}}</{calls}",
    )


def _listed(*tags: str, begin: str = "[", behind: str = "", **more: Any) -> CallForm:
    """Calls in a list between tags, or behind the only one."""
    form = CallForm(tags=tags, first=begin, call="{call}", between=", ", last="]" + "".join(tags[1:]) + behind)
    return replace(form, **more)


def _deepseek(call: str) -> CallForm:
    return CallForm(
        tags=tuple(f"<｜tool▁{each}｜>" for each in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
        call=f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>",
        between="{breaks}",
        last="<｜tool▁calls▁end｜>",
    )


_PYTHONIC = {"call": "{name}{arguments}", "between": ",{blank}"}
"""Arguments as in Python, see pythonic.py."""
FORMS = {
    "qwen3_coder": CallForm(  # Qwen3.5 and Nemotron 3, too
        tags=("<tool_call>", "</tool_call>"),
        call="\n<function={name}>\n{parameters}</function>\n</tool_call>",
        parameter="<parameter={key}>{value}\n</parameter>\n",
        value_begin="\n",
        between="{breaks}<tool_call>",
        bare="<function=",
    ),
    "seed_oss": CallForm(
        tags=("<seed:tool_call>", "</seed:tool_call>"),
        call="\n<function={name}>\n{parameters}</function>\n</seed:tool_call>",
        parameter="<parameter={key}>{value}</parameter>\n",
        between="{breaks}<seed:tool_call>",
        bare="<function=",
    ),
    "glm45": CallForm(
        tags=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        call="{name}{break}{parameters}</tool_call>",
        parameter="<arg_key>{key}</arg_key>{break}<arg_value>{value}</arg_value>{break}",
        between="{breaks}<tool_call>",
    ),
    "hy_v3": _hy_v3(""),
    "hy_v3_opensource": _hy_v3(":opensource"),
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "minimax_m2": CallForm(
        tags=("<minimax:tool_call>", "</minimax:tool_call>"),
        first="{break}",
        call='<invoke name="{name}">{break}{parameters}</invoke>',
        parameter='<parameter name="{key}">{value}</parameter>{break}',
        between="{break}",
        last="{break}</minimax:tool_call>",
    ),
    "hermes": CallForm(  # Qwen2.5 and Qwen3, too; EXAONE without line breaks
        tags=("<tool_call>", "</tool_call>"),
        call="{break}{call}{break}</tool_call>",
        between="{breaks}<tool_call>",
    ),
    "mistral": CallForm(
        tags=("[TOOL_CALLS]", "[ARGS]"),
        call="{name}[ARGS]{arguments}",
        between="[TOOL_CALLS]",
    ),
    "mistral_ids": CallForm(  # Mistral Small 3.2
        tags=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        call="{name}[CALL_ID]{id}[ARGS]{arguments}",
        between="[TOOL_CALLS]",
    ),
    "mistral_list": _listed("[TOOL_CALLS]", begin="{blank}["),  # older models of theirs
    "granite": _listed("<|tool_call|>", begin="{blank}["),  # Granite 3
    "gemma4": CallForm(  # arguments in a notation of their own, see bare_keys.py
        tags=("<|tool_call>", "<tool_call|>", '<|"|>'),
        call="call:{name}{arguments}<tool_call|>",
        between="<|tool_call>",
    ),
    "lfm2": _listed("<|tool_call_start|>", "<|tool_call_end|>", **_PYTHONIC),
    "llama4_pythonic": _listed(  # Llama 4 with a template that asks for it
        "<|python_start|>", bare="[", is_tagged=False, **_PYTHONIC
    ),
    "nemotron": _listed("<TOOLCALL>", "</TOOLCALL>", behind="{break}"),  # Nemotron Nano 2
    "deepseek_v31": _deepseek("{name}<｜tool▁sep｜>{arguments}"),
    "deepseek_v3": _deepseek("function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"),  # and R1
    "kimi_k2": CallForm(
        tags=(
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
            "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
        ),
        call="<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        between="{breaks}",
        last="<|tool_calls_section_end|>",
    ),
    "llama3_json": CallForm(
        tags=("<|python_tag|>",),
        call="{call}",
        arguments="parameters",
        between="; ",
        bare="{",
        is_tagged=False,
    ),
}
HARMONY = "harmony"
"""Tools and reasoning of gpt-oss, which are one."""
_MARKS = (  # the first whose text is in a template
    ("<|channel|>", HARMONY),
    ("<seed:tool_call>", "seed_oss"),
    ("<function=", "qwen3_coder"),
    (":opensource", "hy_v3_opensource"),
    ("<tool_sep>", "hy_v3"),
    ("<arg_key>", "glm45"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|tool_call_start|>", "lfm2"),
    ("[func_name1(", "llama4_pythonic"),
    ("<tool_call>", "hermes"),
    ("<tool_calls>[", "hunyuan_a13b"),
    ("<|tool_call|>", "granite"),
    ("<TOOLCALL>", "nemotron"),
    ("[CALL_ID]", "mistral_ids"),
    ("+ '<｜tool▁sep｜>' + tool['function']['name']", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_list"),
    ("<|python_tag|>", "llama3_json"),
    ("List of tools: ", "lfm2"),  # and its first template, which shows calls as words
    ('{"name": function name, "parameters": ', "llama3_json"),
)
REASONING_TAGS = {
    "think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]"), "gemma4": ("<|channel>", "<channel|>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "hy_v3_opensource": ("<think:opensource>", "</think:opensource>"),
}  # fmt: skip
REASONING_LABELS = {"gemma4": "thought\n"}
"""Text behind the tag that opens reasoning."""

_ANSWER_TAGS = (("<response>", "</response>"), ("<answer>", "</answer>"))
"""Tags around an answer's words, of ERNIE 4.5, Granite 3.3 and Hunyuan."""


def tool_family_of(template: str) -> str | None:
    """The family whose calls a chat template writes."""
    return next((family for mark, family in _MARKS if mark in template), None)


def reasoning_of(template: str) -> str | None:
    """The kind of reasoning that a chat template knows."""
    family = tool_family_of(template)
    if family in (HARMONY, "hy_v3_opensource"):  # whose template may put its tags together
        return family
    return next((kind for kind, (_, closing) in REASONING_TAGS.items() if closing in template), None)


def answer_tags_of(template: str) -> tuple[str, ...]:
    """The tags in which a chat template has the words behind reasoning, if any."""
    if reasoning_of(template) != "think":
        return ()
    return next((pair for pair in _ANSWER_TAGS if all(tag in template for tag in pair)), ())
