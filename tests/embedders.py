"""The demo checkpoint as embedders and rerankers are published: files of sentence-transformers around a decoder."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import FILE, read_json, write_json
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).resolve().parents[1] / "assets" / "demo-qwen3"
END = 1021
"""<|endoftext|>, which the post-processor puts behind a text."""
QUERY = "Instruct: find the answer\nQuery:"
MODULES = ("Transformer", "Pooling", "Normalize")
OLD_POOLING = {"word_embedding_dimension": 192, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
NEW_POOLING = {"embedding_dimension": 192, "pooling_mode": "lasttoken", "include_prompt": True}


def write_modules(folder: Path, kinds: tuple[str, ...] = MODULES, pooling: dict[str, Any] | None = None) -> None:
    """Writes modules.json and the Pooling's file."""
    paths = {"Transformer": "", **{kind: f"{index}_{kind}" for index, kind in enumerate(kinds) if index}}
    modules = [
        {"idx": index, "name": str(index), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    write_json(folder / "1_Pooling" / "config.json", OLD_POOLING if pooling is None else pooling)


def rename_tensors(folder: Path, prefix: str, head: bool) -> None:
    """Writes the demo's tensors with `prefix` in place of "model.", and with a head of other numbers."""
    tensors = {prefix + name.removeprefix("model."): one for name, one in load_file(DEMO / FILE).items()}
    if head:
        tensors["lm_head.weight"] = torch.zeros_like(tensors[f"{prefix}embed_tokens.weight"])
    save_file(tensors, folder / FILE, {"format": "pt"})


def make_embedder(folder: Path, prefix: str = "", head: bool = False, tied: bool = True) -> Path:
    """Writes the demo checkpoint to `folder` as Qwen3-Embedding is published."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    rename_tensors(folder, prefix, head)
    write_json(folder / "config.json", {**read_json(DEMO / "config.json"), "tie_word_embeddings": tied})
    tokenizer = read_json(DEMO / "tokenizer.json")
    text, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [END], "tokens": ["<|endoftext|>"]}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [text, end], "pair": [text, end], "special_tokens": special,
    }  # fmt: skip
    write_json(folder / "tokenizer.json", tokenizer)
    write_modules(folder)
    prompts = {"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None}
    write_json(folder / "config_sentence_transformers.json", prompts)
    return folder


def make_reranker(folder: Path) -> Path:
    """Writes the demo checkpoint to `folder` with a tokenizer that has "yes" and "no"."""
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    tokenizer = read_json(DEMO / "tokenizer.json")
    for token, word in zip(tokenizer["added_tokens"][-2:], ("yes", "no"), strict=True):
        token["content"] = word
    write_json(folder / "tokenizer.json", tokenizer)
    return folder
