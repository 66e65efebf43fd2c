"""Models, engines, drafts, adapters and requests that random_engines.py draws."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mtp_layer
import torch
import transformers
from adapters.peft_files import CONFIG, random_tensors
from adapters.test_adapters import linears
from exactness.family_cases import CASES, make_model, save
from programs import ROOT
from small_models import KINDS, make_checkpoint
from test_speculation import demo

DEMO = str(ROOT / "assets" / "demo-qwen3")
VOCAB, END = 1030, 7
HEADS = ("eagle3", "dflash", "dspark")
WITH_MTP = ("glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
RECURRENT = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "olmo_hybrid with rope", "lfm2", "lfm2_moe", "granite 4",
    "granite 4 without experts", "nemotron_h", "nemotron_h that ends with experts", "nemotron_h with latent experts",
)  # fmt: skip
OFTEN = (
    "demo", "qwen3", "qwen3_5", "qwen3_next", "gemma3", "gemma4", "gemma4, keys of other layers and inputs of each",
    "gpt_oss", "lfm2", "nemotron_h", "granite 4", "glm4_moe", "qwen3_moe", "laguna",
)  # fmt: skip
CALLS = (
    "nap", "deep sleep", "pause", "wait", "end all", "reset", "recompute", "keep", "load and wait", "partial", "abort",
    "others", "generate", "adapter",
)  # fmt: skip
NEW_WEIGHTS = ("deep sleep", "recompute", "keep", "load and wait", "partial")
"""A replica that was lost does nothing after these until all weights come again."""


@dataclass
class Case:
    """Engine, requests, and what happens to them."""

    seed: int
    device: str
    family: str
    options: dict[str, Any]
    drafter: str = ""
    """Drafter in place of the engine's own: "right", "half", "wrong" or "random"."""
    is_padded: bool = False
    """Whether steps on a CPU are those that graphs would capture."""
    num_adapters: int = 0
    calls: tuple[str, ...] = ()
    share: float = 0.0
    """Share of steps before which a call is made."""
    asked: list[tuple[list[int], dict[str, Any], int]] = field(default_factory=list)
    """Requests: prompt, fields of SamplingParams, adapter (0: none)."""

    @property
    def is_exact(self) -> bool:
        return self.options.get("exact_bits") is not None

    @property
    def owes_equality(self) -> bool:
        """Numbers of 8 bits are rounded from sums, and so are states."""
        rounded = {"fp8", "bfloat16"}.intersection(map(str, self.options.values()))
        return self.is_exact or (self.device == "cpu" and not rounded)


def draw_case(seed: int, device: str = "cpu", alone: bool = False) -> Case:
    """`alone`: without other processes."""
    draw = random.Random(seed)
    families = sorted({*KINDS, *WITH_MTP, "demo"}) if device == "cuda" else [*CASES, "demo"]
    family = draw.choice([one for one in OFTEN if one in families] if draw.random() < 0.6 else families)
    is_tight = draw.random() < 0.4  # rows are preempted
    block, longest = draw.choice((16, 16, 32, 48, 64)), draw.choice((64, 96, 150, 200))
    rows = draw.choice((5, 8) if is_tight else (1, 2, 3, 5, 8))
    num_blocks = draw.randint(2, 8) + longest // block * draw.choice((0, 0, 1, 2, 4, 16))
    options: dict[str, Any] = {
        "device": device, "max_model_len": longest, "kvcache_block_size": block, "max_num_seqs": rows,
        "num_kvcache_blocks": longest // block + draw.randint(1, 3) if is_tight else num_blocks,
        "max_num_batched_tokens": draw.choice((rows, rows + 1, 9, 16, 33, 64, 128, 256)),
        "enable_sleep": True, "seed": draw.randrange(9),
    }  # fmt: skip
    options["max_num_batched_tokens"] = max(options["max_num_batched_tokens"], rows)
    names = ("lookahead", "lookahead", "async_scheduling", "window_groups", "longest_first")
    disabled = (name for name in names if draw.random() < 0.3 or (is_tight and name == "lookahead"))
    options["disable"] = tuple(dict.fromkeys(disabled))
    case = Case(seed, device, family, options)
    _draw_numbers(case, draw)
    _draw_drafts(case, draw)
    if draw.random() < 0.2:
        options["enable_prefix_caching"] = False
    if family in RECURRENT and draw.random() < 0.7:
        options["num_state_lines"] = draw.choice((1, 2, 3, 4, 8))
    if draw.random() < 0.35 and (family == "demo" or CASES[family].written is None):  # transformers reads it again
        case.num_adapters = draw.randint(1, 3)
        options |= {"enable_lora": True, "max_loras": draw.randint(1, 3)}
    if not alone and draw.random() < 0.2:
        options[draw.choice(("tensor_parallel_size", "data_parallel_size"))] = 2
        options["share_gpus"] = device == "cuda" and torch.cuda.device_count() < 2
    elif device == "cpu" and not case.is_exact and draw.random() < 0.3:
        case.is_padded, options["max_num_batched_tokens"] = True, max(options["max_num_batched_tokens"], 64)
    if device == "cuda" and draw.random() < 0.4:
        options["enforce_eager"] = True
    case.calls = tuple(name for name in CALLS if draw.random() < 0.4)
    if "data_parallel_size" in options and draw.random() < 0.5:
        case.calls = (*(name for name in case.calls if name not in NEW_WEIGHTS), "kill")
    case.share = draw.choice((0.05, 0.15, 0.3, 0.5)) if case.calls else 0.0
    shared = [draw.randrange(10, 1000) for _ in range(longest)]
    most = 10 if device == "cuda" else 3 if case.is_exact else 7
    for number in range(draw.randint(most // 2 if is_tight else 1, most)):
        kept = shared[: draw.choice((0, 0, block, 2 * block, 2 * block + 3))]
        prompt = [*kept, *(draw.randrange(10, 1000) for _ in range(draw.choice((1, 2, 5, 17, 40))))][: longest - 8]
        lengths = (40, 60) if is_tight else (1, 2, 5, 12, 25, 60)
        case.asked.append((prompt, _params(draw, number, draw.choice(lengths)), draw.randint(0, case.num_adapters)))
    return case


def _draw_numbers(case: Case, draw: random.Random) -> None:
    options, cuda = case.options, case.device == "cuda"
    options["dtype"] = "bfloat16" if cuda else "float32"
    if case.family == "gpt_oss" and draw.random() < 0.3:
        options["quantization"] = "mxfp4"
    elif case.family not in RECURRENT and draw.random() < (0.5 if cuda else 0.15):
        options["exact_bits"] = "batch"
        options["dtype"] = draw.choice(("bfloat16", "float32")) if not cuda else "bfloat16"
    elif case.family != "gpt_oss" and draw.random() < 0.25:
        options["quantization"] = draw.choice(("int4", "fp8"))
    if "exact_bits" not in options and draw.random() < 0.08:
        options["kv_cache_dtype"] = "fp8"
    if case.family in RECURRENT and not case.family.startswith("lfm2") and draw.random() < 0.1:
        options["state_dtype"] = "bfloat16"


def _draw_drafts(case: Case, draw: random.Random) -> None:
    if draw.random() < 0.4:
        return
    method, more = "ngram", {"prompt_lookup_min": 1}
    if case.family in WITH_MTP and draw.random() < 0.7:
        method, more = "mtp", {}
    elif case.family == "demo" and draw.random() < 0.7:
        method, more = draw.choice(HEADS), {}
    count = draw.choice((1, 2, 3, 3, 5, 7))
    case.options["speculative_config"] = {"method": method, "num_speculative_tokens": count, **more}
    if case.device == "cpu":
        case.drafter = draw.choice(("", "right", "half", "half", "wrong", "random"))


def _params(draw: random.Random, seed: int, most: int) -> dict[str, Any]:
    found: dict[str, Any] = {"max_tokens": most, "seed": seed, "temperature": draw.choice((0.0, 0.0, 0.6, 1.0))}
    several = tuple(draw.sample(range(1000), 150))
    choices: dict[str, tuple[Any, ...]] = {
        "n": (2, 4), "top_p": (0.7, 0.95), "top_k": (1, 5), "min_p": (0.1,), "presence_penalty": (0.9, -0.5),
        "frequency_penalty": (1.5,), "repetition_penalty": (1.3,), "stop": (["e"], ["th", "a"], [" t", "on", "xyz"]),
        "stop_token_ids": (several[:60], several), "ignore_eos": (True,), "min_tokens": (most // 2, most),
        "logprobs": (0, 2), "prompt_logprobs": (0, 2), "logprobs_mode": ("processed",), "sampling_mask": (True,),
        "logit_bias": ({END: 8.0}, {5: 3.0, 9: -2.0}), "bad_words": (["e", "the"],), "cache_salt": ("a", "b"),
        "allowed_token_ids": (several,), "include_stop_str_in_output": (True,), "skip_special_tokens": (False,),
        "structured_outputs": ({"regex": "[a-c]{3,20}"}, {"json_object": True}, {"choice": ["one two", "one"]},
                               {"json": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
                                         "required": ["a"], "additionalProperties": False}}),
    }  # fmt: skip
    for name, values in choices.items():
        if draw.random() < 0.12:
            found[name] = draw.choice(values)
    return found


def write_model(case: Case, folder: Path, seed: int) -> str:
    """A checkpoint; of the demo model, the package's own."""
    entries = {"vocab_size": VOCAB, "eos_token_id": END}
    if case.family == "demo":
        return DEMO
    if case.options.get("speculative_config", {}).get("method") == "mtp":
        torch.manual_seed(seed)
        mtp_layer.saved(case.family, folder, **entries)
        return str(folder)
    if case.device == "cuda":
        return make_checkpoint(case.family, folder, **entries)
    family = CASES[case.family]
    if "vocab_size_per_layer_input" in family.entries:
        entries["vocab_size_per_layer_input"] = VOCAB
    if case.options.get("quantization") == "mxfp4":
        entries |= {"hidden_size": 64, "intermediate_size": 96}
    family = replace(family, entries={**family.entries, **entries})
    return str(save(make_model(family, seed), family, folder))


def write_adapters(case: Case, folder: str) -> list[dict[str, Any]]:
    """Tensors by PEFT's names, of each adapter."""
    if not case.num_adapters:
        return []
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = demo() if case.family == "demo" else load(folder, dtype=torch.float32)
    return [random_tensors(model, linears(model), CONFIG, seed) for seed in range(case.num_adapters + 1)]
