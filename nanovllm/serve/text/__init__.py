"""Text for the front process: tokenizing, detokenizing and chat templates, without torch and transformers."""

from nanovllm.serve.text.template import ChatTemplate
from nanovllm.serve.text.tokenizer import FrontTokenizer

__all__ = ["ChatTemplate", "FrontTokenizer"]
