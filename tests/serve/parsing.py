"""Models of each family of tool calls: as they write messages, and as these are read back."""

import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import strategies as st

from nanovllm import StructuredOutput
from nanovllm.engine.sampling.grammar_compiler import GrammarCompiler
from nanovllm.errors import short
from nanovllm.serve.parsers import Delta, OutputParser, Syntax, check_tools, joined
from nanovllm.text.checkpoint import CheckpointTokenizer

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo-qwen3"
DEEPSEEK = [f"<｜tool▁{each}｜>" for each in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")]
KIMI = "<|tool_calls_section_begin|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>".split()
KIMI.append("<|tool_calls_section_end|>")
TAGS = {
    "hermes": "<think> </think> <tool_call> </tool_call>".split(),
    "qwen3_coder": "<think> </think> <tool_call> </tool_call>".split(),
    "glm45": "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>".split(),
    "seed_oss": "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>".split(),
    "hy_v3": [
        *"<think> </think> <tool_calls> </tool_calls> <tool_call> </tool_call>".split(),
        *"<tool_sep> <arg_key> </arg_key> <arg_value> </arg_value>".split(),
    ],
    "hy_v3_opensource": [],
    "granite": ["<|tool_call|>"],
    "hunyuan_a13b": ["<think>", "</think>", "<tool_calls>", "</tool_calls>"],
    "minimax_m2": "<think> </think> <minimax:tool_call> </minimax:tool_call>".split(),
    "gemma4": '<|channel> <channel|> <|tool_call> <tool_call|> <|"|>'.split(),
    "lfm2": "<think> </think> <|tool_call_start|> <|tool_call_end|>".split(),
    "llama4_pythonic": ["<|python_start|>"],
    "llama3_json": ["<|python_tag|>"],
    "mistral": "[THINK] [/THINK] [TOOL_CALLS] [ARGS]".split(),
    "mistral_ids": ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    "mistral_list": ["[TOOL_CALLS]"],
    "nemotron": "<think> </think> <TOOLCALL> </TOOLCALL>".split(),
    "deepseek_v3": ["<think>", "</think>", *DEEPSEEK],
    "deepseek_v31": ["<think>", "</think>", *DEEPSEEK],
    "kimi_k2": ["<think>", "</think>", *KIMI],
    "harmony": "<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>".split(),
}
TAGS["hy_v3_opensource"] = [f"{tag[:-1]}:opensource>" for tag in TAGS["hy_v3"]]
OF_THINK = (
    "hermes", "qwen3_coder", "glm45", "minimax_m2", "nemotron", "lfm2", "deepseek_v3", "deepseek_v31", "hy_v3",
    "hunyuan_a13b", "kimi_k2",
)  # fmt: skip
REASONING = dict.fromkeys(OF_THINK, "think")
REASONING |= {"mistral": "mistral", "harmony": "harmony", "gemma4": "gemma4", "seed_oss": "seed_oss"}
REASONING["hy_v3_opensource"] = "hy_v3_opensource"
MODELS = [
    *((family, True) for family in TAGS if family != "harmony"),
    *((family, False) for family in ("hermes", "qwen3_coder", "minimax_m2")),
]
"""Families whose calls are a part of a text; False: in a tokenizer that has no tokens for their tags."""

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "where": {"$ref": "#/$defs/point"},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "now": {"type": "object"}}
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = {
    "get_weather": [
        {"city": "Paris"},
        {"city": "", "days": 3},
        {"city": 'a "b" \\ {[}\n\tü🐱', "unit": "celsius"},
        {"city": "Rome", "days": -1, "unit": "fahrenheit", "where": {"x": 1.5}},
    ],
    "now": [{}],
}
steps = st.lists(st.integers(1, 7), min_size=1, max_size=8)
words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).map(lambda t: t.strip() or "x")
calls = st.sampled_from([*ARGUMENTS]).flatmap(lambda name: st.tuples(st.just(name), st.sampled_from(ARGUMENTS[name])))


def save_tokenizer(folder: Path, new: Iterable[tuple[str, bool]]) -> None:
    """Writes the demo's tokenizer with more tokens: texts, and whether they are special. Only special ones of its own
    are kept."""
    content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = content["added_tokens"] = [token for token in content["added_tokens"] if token["special"]]
    known, first = {token["content"] for token in tokens}, 1 + max(token["id"] for token in tokens)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [(text, special) for text, special in new if text not in known]
    tokens += [{"id": first + i, "content": text, "special": one, **flags} for i, (text, one) in enumerate(added)]
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


_TAG = re.compile(r"</?(?:tool_calls?|tool_sep|arg_key|arg_value)(?=>)")


class Model:
    """A family's tokenizer, parser and grammar engine."""

    def __init__(self, family: str, has_tokens: bool, folder: Path) -> None:
        self.family = family
        has_special = family.startswith("mistral") or family in ("harmony", "gemma4", "lfm2", "llama4_pythonic")
        save_tokenizer(folder, [(tag, has_special) for tag in TAGS[family] if has_tokens])
        self.tokenizer = CheckpointTokenizer(folder)  # without a template reasoning is left to the model
        self.parser = OutputParser(self.tokenizer, family, REASONING.get(family, "none"))
        backend = self.tokenizer.backend_tokenizer
        self.eos = backend.token_to_id("<|return|>" if family == "harmony" else "<|im_end|>")
        self.library = llguidance.LLTokenizer(backend.to_str(), n_vocab=len(self.tokenizer), eos_token=self.eos)
        self.compiler = GrammarCompiler(backend.to_str(), len(self.tokenizer), [self.eos])
        closed = {"mistral": "[/THINK]", "gemma4": "<|channel>thought\n<channel|>", "seed_oss": "</seed:think>"}
        closed["hy_v3_opensource"] = "<think:opensource></think:opensource>"
        self.closed = closed.get(family, "<think>\n\n</think>")
        """End of a prompt after which the model does not reason."""
        self._matchers: dict[str, Any] = {}
        own = {"gemma4": ('<|"|>',), "lfm2": ("'", ")"), "llama4_pythonic": ("'", ")")}.get(family, ())
        own = ("</arg_value:opensource>",) if family == "hy_v3_opensource" else own
        self.endings = [self.tokenizer.encode(text) for text in (*_ENDINGS, *own)]
        """Tokens of texts by which a value or a call may end."""

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def read(self, syntax: Syntax, text: str, cuts: Sequence[int] | None = None) -> list[Delta]:
        """`read` of a text's tokens."""
        return read(syntax, self.ids(text), cuts)

    def reader(self, syntax: Syntax, ids: Sequence[int]) -> Any:
        """A reader that has been given an output."""
        reader = syntax.reader()
        assert reader is not None
        reader.push("".join(map(syntax.detokenizer().push, ids)))
        return reader

    def syntax(self, prompt: str = "", choice: Any = "auto", structured: Any = None, **options: Any) -> Syntax:
        tools = options.get("tools", TOOLS)
        allowed = None if tools is None else check_tools(tools, choice, options.get("parallel"))
        return self.parser.syntax(prompt, allowed, structured)

    def matcher(self, syntax: Syntax) -> Any:
        assert syntax.structured is not None and syntax.structured.grammar is not None
        grammar = syntax.structured.grammar
        if grammar not in self._matchers:
            made = llguidance.LLMatcher(self.library, llguidance.LLMatcher.grammar_from_lark(grammar))
            assert not made.is_error(), made.get_error()
            self._matchers[grammar] = made
        return self._matchers[grammar].deep_copy()

    def check_blame(self, prompt: str = "") -> None:
        """Has the compiler refuse the schema of one tool among others, and of an answer: the syntax says which."""
        wrong = {"type": "object", "properties": {"a_number": {"type": "integer", "minimum": "x"}}}
        for name in ("first", "get_it", "last"):
            tools = [
                {"type": "function", "function": {"name": each, "parameters": wrong if each == name else WEATHER}}
                for each in ("first", "get_it", "last")
            ]
            said = self.refused(self.syntax(prompt, tools=tools))
            found, why = self.syntax(prompt, tools=tools).blame(said)
            assert found == name and why.endswith("Expected f64 for 'minimum', got \"x\""), (said, why)
        syntax = self.syntax(prompt, structured=StructuredOutput(json=wrong))
        assert syntax.blame(self.refused(syntax))[0] is None

    def refused(self, syntax: Syntax) -> str:
        """The engine's words for a grammar that does not compile."""
        assert syntax.structured is not None and syntax.structured.grammar is not None
        with pytest.raises(ValueError) as error:
            self.compiler.compile("grammar", syntax.structured.grammar)
        return short(error.value)

    def admits(self, syntax: Syntax, text: str) -> bool:
        """Whether an engine, which asks for each token what may come next, could write a text (the beginning of a long
        one)."""
        matcher, ids = self.matcher(syntax), self.ids(text)
        for token in ids[:200]:
            if not _next_bits(self, matcher)[token >> 3] >> (token & 7) & 1:
                return False
            matcher.consume_token(token)
        return matcher.try_consume_tokens(ids[200:]) == len(ids[200:]) and matcher.is_accepting()

    def write(self, message: "Message", prompt_opens: bool = False) -> str:
        """A message as the family's models write it."""
        tags = {"mistral": ("[THINK]", "[/THINK]"), "gemma4": ("<|channel>thought\n", "\n<channel|>")}
        tags["seed_oss"] = "<seed:think>", "</seed:think>\n"
        tags["hy_v3_opensource"] = "<think:opensource>", "</think:opensource>"
        opening, closing = tags.get(self.family, ("<think>\n", "\n</think>\n\n"))
        text = "" if prompt_opens or message.reasoning is None else opening
        text += "" if message.reasoning is None else message.reasoning + closing
        text += message.content
        if message.calls and message.content and self.family != "mistral":
            text += "\n"
        return text + self.calls_text(message.calls)

    def calls_text(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
        named = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        if not calls:
            return ""
        if self.family == "hermes":
            one = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
            return "\n".join(one.format(*each) for each in named)
        if self.family == "mistral_ids":
            return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4{len(name) % 10}[ARGS]{text}" for name, text in named)
        if self.family == "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in named)
        around = {"mistral_list": ("[TOOL_CALLS]", ""), "nemotron": ("<TOOLCALL>", "</TOOLCALL>")}
        around |= {"hunyuan_a13b": ("<tool_calls>", "</tool_calls>"), "granite": ("<|tool_call|>", "")}
        if self.family in around:
            listed = ", ".join('{{"name": "{}", "arguments": {}}}'.format(*one) for one in named)
            return f"[{listed}]".join(around[self.family])
        if self.family == "llama3_json":
            return "; ".join('{{"name": "{}", "parameters": {}}}'.format(*one) for one in named)
        if self.family == "gemma4":
            return "".join(f"<|tool_call>call:{name}{_bare(arguments)}<tool_call|>" for name, arguments in calls)
        if self.family in ("lfm2", "llama4_pythonic"):
            made = [f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})" for name, arguments in calls]
            whole = f"[{', '.join(made)}]"
            return whole if self.family != "lfm2" else f"<|tool_call_start|>{whole}<|tool_call_end|>"
        if self.family == "minimax_m2":
            pair = '<parameter name="{}">{}</parameter>\n'
            pairs = ["".join(pair.format(k, _shown(v)) for k, v in arguments.items()) for _, arguments in calls]
            made = [f'<invoke name="{name}">\n{one}</invoke>\n' for (name, _), one in zip(calls, pairs, strict=True)]
            return f"<minimax:tool_call>\n{''.join(made)}</minimax:tool_call>"
        if self.family == "kimi_k2":
            opening, begin, sep, end, closing = KIMI
            made = [f"{begin}functions.{name}:{i}{sep}{text}{end}" for i, (name, text) in enumerate(named)]
            return opening + "".join(made) + closing
        if self.family.startswith("deepseek"):
            opening, begin, sep, end, closing = DEEPSEEK
            form = f"{begin}{{}}{sep}{{}}{end}"
            if self.family == "deepseek_v3":
                form = f"{begin}function{sep}{{}}\n```json\n{{}}\n```{end}"
            return opening + "\n".join(form.format(*each) for each in named) + closing
        if self.family in ("glm45", "hy_v3", "hy_v3_opensource"):
            pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            pairs = ["".join(pair.format(k, _shown(v)) for k, v in arguments.items()) for _, arguments in calls]
            names = [name for name, _ in calls]
            if self.family != "glm45":
                pieces = zip(names, pairs, strict=True)
                whole = "".join(f"<tool_call>{name}<tool_sep>\n{one}</tool_call>\n" for name, one in pieces)
                whole = f"<tool_calls>\n{whole}</tool_calls>"
                return whole if self.family == "hy_v3" else _TAG.sub(r"\g<0>:opensource", whole)
            return "\n".join(f"<tool_call>{name}\n{one}</tool_call>" for name, one in zip(names, pairs, strict=True))
        blocks, tag, line = [], "tool_call", "\n"
        if self.family == "seed_oss":
            tag, line = "seed:tool_call", ""
        for name, arguments in calls:
            values = {k: _shown(v) for k, v in arguments.items()}
            lines = "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in values.items())
            blocks.append(f"<{tag}>\n<function={name}>\n{lines}</function>\n</{tag}>")
        return "\n".join(blocks)


def _bare(value: Any) -> str:
    """Gemma 4's notation."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_bare, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass
class Message:
    reasoning: str | None = None
    content: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def read(syntax: Syntax, ids: Sequence[int], cuts: Sequence[int] | None = None) -> list[Delta]:
    """Deltas of an output for a client, in steps of as many tokens as `cuts` says, over and over; None: at once."""
    reader, detokenizer = syntax.reader(), syntax.detokenizer()
    assert reader is not None
    deltas: list[Delta] = []
    at = step = 0
    while at < len(ids):
        width = len(ids) if cuts is None else cuts[step % len(cuts)]
        deltas += reader.push("".join(map(detokenizer.push, ids[at : at + width])))
        at, step = at + width, step + 1
    deltas += reader.push(detokenizer.flush())
    found = joined(deltas + reader.finish())
    return [one._replace(id=f"call_{one.call_index}") if one.kind == "call" else one for one in found]


def message_of(deltas: list[Delta]) -> Message:
    texts = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")}
    names = [delta.name for delta in deltas if delta.kind == "call"]
    pieces = [[d.text for d in deltas if d.kind == "arguments" and d.call_index == i] for i in range(len(names))]
    calls = [(name, json.loads("".join(texts))) for name, texts in zip(names, pieces, strict=True)]
    return Message(texts["reasoning"] or None, texts["content"], calls)


def _next_bits(model: Model, matcher: Any) -> np.ndarray:
    """A bit for each token, the lowest of a byte first: whether it may come next. An engine that cannot find them out
    ends the answer with an error."""
    mask = np.zeros((len(model.tokenizer) + 31) // 32, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    assert not matcher.is_error(), matcher.get_error()
    return mask.view(np.uint8)


def next_ids(model: Model, matcher: Any) -> np.ndarray:
    """Tokens that may come next."""
    return np.flatnonzero(np.unpackbits(_next_bits(model, matcher), bitorder="little")[: len(model.tokenizer)])


_ENDINGS = ('"', "}", "]", "\n</parameter>\n", "</parameter>", "</arg_value>", "</invoke>")


def random_output(model: Model, syntax: Syntax, seed: int, most: int = 400) -> tuple[list[int], bool]:
    """Tokens that a model of no sense writes under a grammar, and whether it came to an end."""
    rng = random.Random(seed)
    matcher, ids = model.matcher(syntax), []
    while len(ids) < most:
        allowed = next_ids(model, matcher)
        if matcher.is_stopped() or (model.eos in allowed and rng.random() < 0.5):
            return ids, True
        tokens = rng.choice(model.endings) if rng.random() < 0.4 else [int(rng.choice(allowed[allowed != model.eos]))]
        ids += tokens[: matcher.try_consume_tokens(tokens)]
    return ids, False
