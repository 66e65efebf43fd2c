"""Reasoning and tool calls: held to by a grammar, read from the text as it comes. `families.py` says how they are
written."""

from nanovllm.serve.parsers.output import OutputParser
from nanovllm.serve.parsers.reader import Delta, Reader, joined
from nanovllm.serve.parsers.syntax import Syntax
from nanovllm.serve.parsers.tools import ToolChoice, check_schema, check_tools

__all__ = ["Delta", "OutputParser", "Reader", "Syntax", "ToolChoice", "check_schema", "check_tools", "joined"]
