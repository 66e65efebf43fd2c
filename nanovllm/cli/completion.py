"""`nanovllm completion bash|zsh|fish`: what a shell needs to complete our options."""

from nanovllm.cli.options import Parser

SUMMARY = "print the completion script of a shell"


def make_parser() -> Parser:
    parser = Parser(
        prog="nanovllm completion",
        description="Prints the completion script of a shell; put it where the shell looks, for example "
        "nanovllm completion bash > ~/.local/share/bash-completion/completions/nanovllm",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def run(parser: Parser, arguments: list[str]) -> int:
    shell = parser.parse_args(arguments).shell
    try:
        import shtab
    except ImportError:
        raise ValueError("completion needs shtab: pip install 'nanovllm[completion]'") from None
    from nanovllm.cli.main import make_parser as all_commands

    print(shtab.complete(all_commands(), shell=shell))
    return 0
