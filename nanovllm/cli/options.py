"""Options on the command line, made from the fields of the dataclasses that own them and from the texts below those."""

import argparse
import ast
import difflib
import inspect
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from functools import cache
from typing import Any, NoReturn

from nanovllm.vllm_options import RENAMED

SHORT = {"tensor_parallel_size": "-tp", "data_parallel_size": "-dp"}
_MOST_HELP = 76  # characters of an option's help that fit a line
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Parser(argparse.ArgumentParser):
    """Names the nearest option beside an unknown one; takes --max_model_len for --max-model-len."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = [_with_dashes(each) for each in (sys.argv[1:] if args is None else args)]
        given, rest = super().parse_known_args(args, namespace)
        if rest:
            self.refuse_unknown(rest[0])
        return given, rest

    def refuse_unknown(self, argument: str, place: str = "") -> NoReturn:
        """Ends with an error that names the nearest option."""
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{place}{argument[:100]!r}: one argument too many")
        known = [*self._option_string_actions]
        near = [option for option in known if option.startswith(name)] or difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"
        self.error(f"{place}unknown option {name[:100]}{hint}")

    def action(self, option: str) -> argparse.Action | None:
        """The action of an option such as --port; None for an unknown one."""
        return self._option_string_actions.get(option)


def _with_dashes(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") and " " not in name else argument


class HelpFormatter(argparse.HelpFormatter):
    """A line or two an option, in columns wide enough for the names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44)

    def add_argument(self, action: argparse.Action) -> None:
        self._indent()  # argparse forgets it where the column of commands gets its width
        super().add_argument(action)
        self._dedent()

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        if usage is None and len(actions) > 12:
            places = [action for action in actions if not action.option_strings]
            words = [f"[{one.dest.upper()}]" if one.nargs == "?" else str(one.metavar) for one in places]
            usage = " ".join(["%(prog)s", *words, "[options]"])
        return super()._format_usage(usage, actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{names[0].removeprefix('--')}"
        if not names or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(names)} {self._format_args(action, self._get_default_metavar_for_optional(action))}"


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The text below each field of a dataclass."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for before, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(before.target, ast.Name)
            found[before.target.id] = " ".join(str(after.value.value).split())
    return found


def add_fields(
    parser: argparse._ActionsContainer,
    kind: type,
    groups: Mapping[str, str] | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """An option for each field of a dataclass. `groups`: heading of the group that begins with a field; None: the help
    has none of them. A namespace has only those that were given, so that the dataclass owns the defaults."""
    docs = field_docs(kind)
    group: Any = parser
    for option in fields(kind):
        if groups and option.name in groups:
            group = parser.add_argument_group(groups[option.name])
        if option.name not in leave_out and has_text(option):
            how: Any = {"dest": option.name, "default": argparse.SUPPRESS, **_how(option)}
            names = [SHORT.get(option.name), dashed(option.name)]
            text = _help(option, docs.get(option.name, "")) if groups else argparse.SUPPRESS
            group.add_argument(*filter(None, names), help=text, **how)
            for other in (theirs for theirs, ours in RENAMED.items() if ours == option.name):
                group.add_argument(dashed(other), help=argparse.SUPPRESS, **how)


def add_fixed(parser: argparse.ArgumentParser, fixed: Mapping[str, tuple[tuple[str, ...], str]]) -> None:
    """vLLM's options that are none here; a namespace has those that were given."""
    for name, (accepted, _) in fixed.items():
        flag: Any = {"action": argparse.BooleanOptionalAction} if {*accepted} & {"true", "false"} else {}
        parser.add_argument(dashed(name), help=argparse.SUPPRESS, default=argparse.SUPPRESS, **flag)


def dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def has_text(option: "Field[Any]") -> bool:
    """Whether a text can say its value; functions are for Python alone."""
    return "Callable" not in str(option.type)


def _help(option: "Field[Any]", text: str) -> str:
    """The first sentence, less what a long one adds after a semicolon, and the default where that is a plain value."""
    sentence = text.partition(". ")[0].removesuffix(".").replace("%", "%%")
    head, _, more = sentence.partition("; ")
    if len(sentence) > _MOST_HELP and not more.startswith('"'):  # else: another of the values
        sentence = head
    if type(option.default) in (int, float, str) and option.default != "":
        sentence += f" [{option.default}]"
    return sentence


def _how(option: "Field[Any]") -> dict[str, Any]:
    """Arguments of add_argument that read a field's values."""
    kind = str(option.type)
    if option.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if "dict" in kind:
        return {"type": json_object, "metavar": "JSON"}
    if "tuple" in kind:
        return {"nargs": "+", "metavar": "X"}
    if "int" in kind:
        return {"type": count, "metavar": "N"}
    return {"type": float, "metavar": "N"} if "float" in kind else {"metavar": "X"}


def chosen(given: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of a dataclass that were given."""
    values = vars(given)
    names = [option.name for option in fields(kind) if option.name in values]
    return {name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in names}


def count(text: str) -> int:
    """An integer. As in vLLM, 32k is 32,000 and 32K is 32,768; the same for m, M, g and G."""
    try:
        if (scale := _SCALES.get(text[-1:])) is not None:
            return int(float(text[:-1]) * scale)
        return int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not an integer such as 4096, 4k or 4K") from None


def number(text: str) -> float:
    """A number that JSON can say."""
    try:
        return float(json.dumps(float(text), allow_nan=False))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not a finite number") from None


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")
