"""Trains the small Qwen3 checkpoint that ships in assets/demo-qwen3, tokenizer included, on text that is made here.

    python scripts/train_demo_model.py --out assets/demo-qwen3      # 90 s on one H200; hours on a CPU
    python scripts/train_demo_model.py --out /tmp/try --start-from assets/demo-qwen3 --steps 1600 --tokens-per-step 4096
    python scripts/train_demo_model.py --out /tmp/try --steps 160 --tokens-per-step 4096 --documents 20000   # a look

The second goes on from a checkpoint, with its tokenizer: it learns new kinds of text in 15 minutes on an idle core. The
weights that ship learnt tools and reasoning so, in runs with a --chat-share of 0.3, 0.6, 0.5 and 0.15. The text, the
tokenizer, the first weights and the order of the batches follow from the seed. What is saved is bfloat16; the report at
the end is made from the saved files, so it tells what a user gets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from demo_chats import TEMPLATE_FILE, chat_documents, known_chats
from demo_text import END_OF_TEXT, IM_END, IM_START, documents, known_continuations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 1030
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
THINK = "<think>"
MARKS = (THINK, "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")  # not special
TOKENS_PER_STEP = 32768
# Short rows show many documents at position 0, where prompts start; long rows teach the rotary angles up to 1024.
ROW_LENGTHS = (128, 256, 512, 1024)
# Words with the space before them, single digits, runs of punctuation, line ends: a prompt may stop after any of these
# without changing how it is split from what follows.
WORD_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"
NOT_LEARNT = -100  # cross_entropy's mark for a token that does not count


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE without a normalizer: any UTF-8 text comes back as it was. The special ids are the last ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = itertools.islice(documents(seed), 20_000)
    # Special tokens are no text to learn merges from.
    tokenizer.train_from_iterator((t.replace(IM_START, "\n").replace(IM_END, "\n") for t in texts), trainer)
    return with_added_tokens(tokenizer)


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the text gives a vocabulary of {tokenizer.get_vocab_size()}, not {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
    }
    (folder / "chat_template.jinja").write_text(TEMPLATE_FILE.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def model_config(tokenizer: Tokenizer) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
        dtype="bfloat16",
    )


def first_model(config: Qwen3Config, start_from: Path | None) -> Qwen3ForCausalLM:
    """A model with random weights, or with those of a checkpoint of the same shape; tokens that it does not know begin
    near the average one."""
    model = Qwen3ForCausalLM(config).float()
    if start_from is not None:
        before = AutoModelForCausalLM.from_pretrained(start_from, dtype=torch.float32).state_dict()
        embedding = before["model.embed_tokens.weight"]
        new = embedding.mean(0) + 0.02 * torch.randn(VOCAB_SIZE - len(embedding), embedding.shape[1])
        embedding = torch.cat([embedding, new])
        model.load_state_dict(before | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding})
    return model


def all_documents(seed: int, chat_share: float) -> Iterator[str]:
    rng = random.Random(seed)
    plain, chats = documents(seed), chat_documents(seed)
    while True:
        yield next(chats if rng.random() < chat_share else plain)


def learnt(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """int64, as long as ids: the ids that the model is to learn, NOT_LEARNT elsewhere. Of chats that is what the
    assistant says; that it is to reason is said by the prompt."""
    start, end, think = (tokenizer.token_to_id(token) for token in (IM_START, IM_END, THINK))
    if ids[0] != start:
        return ids
    out = np.full_like(ids, NOT_LEARNT)
    opening = np.array(tokenizer.encode(f"{IM_START}assistant\n").ids)
    for at in np.flatnonzero(ids == start):
        if np.array_equal(ids[at : at + len(opening)], opening):
            first, last = at + len(opening), at + int(np.argmax(ids[at:] == end))
            out[first : last + 1] = ids[first : last + 1]
    out[-1] = ids[-1]
    out[out == think] = NOT_LEARNT
    return out


def encode_pool(tokenizer: Tokenizer, seed: int, size: int, chat_share: float) -> list[np.ndarray]:
    """`size` documents as int64 [2, length] arrays, ids and what of them is learnt; the end-of-text id closes each."""
    pool: list[np.ndarray] = []
    stream = all_documents(seed, chat_share)
    closing = tokenizer.token_to_id(END_OF_TEXT)
    with tqdm(total=size, desc="tokenize", unit="doc") as bar:
        while len(pool) < size:
            texts = list(itertools.islice(stream, min(10_000, size - len(pool))))
            rows = [np.array([*encoding.ids, closing]) for encoding in tokenizer.encode_batch(texts)]
            pool += [np.stack([ids, learnt(ids, tokenizer)]) for ids in rows]
            bar.update(len(texts))
    return pool


def batches(pool: list[np.ndarray], seed: int, tokens_per_step: int) -> Iterator[torch.Tensor]:
    """Endless int64 [rows, 2, length + 1] batches. A row is filled with whole documents drawn at random, so every kind
    of document starts rows, and the last one is cut."""
    rng = np.random.default_rng(seed)
    for length in itertools.cycle(ROW_LENGTHS):
        rows = []
        for _ in range(max(1, tokens_per_step // length)):
            row: list[np.ndarray] = []
            filled = 0
            while filled <= length:
                row.append(pool[rng.integers(len(pool))])
                filled += row[-1].shape[1]
            rows.append(np.concatenate(row, axis=1)[:, : length + 1])
        yield torch.from_numpy(np.stack(rows))


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup = max(1, min(100, steps // 10))
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(model: Qwen3ForCausalLM, pool: list[np.ndarray], args: argparse.Namespace) -> None:
    """AdamW on next-token cross entropy, cosine to zero; products in TF32 on a GPU, in bfloat16 on a CPU."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=args.device == "cuda")
    model.train()
    average = torch.zeros((), device=args.device)
    with tqdm(total=args.steps, desc="train", unit="step", mininterval=2) as bar:
        for step, batch in enumerate(itertools.islice(batches(pool, args.seed, args.tokens_per_step), args.steps)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            batch = batch.to(args.device, non_blocking=True)
            with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cpu"):
                logits = model(input_ids=batch[:, 0, :-1], use_cache=False).logits.float()
            wanted = batch[:, 1, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=NOT_LEARNT)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average.lerp_(loss.detach(), 1.0 if step == 0 else 0.02)
            if step % 50 == 0 or step == args.steps - 1:
                bar.set_postfix(loss=f"{average.item():.4f}")
            bar.update()


def save_model(model: Qwen3ForCausalLM, folder: Path) -> None:
    # Two ends of text, as Qwen's own chat checkpoints have: the end of a turn and the end of a document.
    model.generation_config = GenerationConfig(
        eos_token_id=[model.config.eos_token_id, model.config.pad_token_id], pad_token_id=model.config.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


@torch.inference_mode()
def report(folder: Path, device: str, dtype: torch.dtype) -> None:
    """Feeds every known prompt with its continuation to the saved model and compares the most likely tokens with it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    cases = known_continuations() + known_chats()
    right, margins = 0, []
    for start in range(0, len(cases), 64):
        chunk = cases[start : start + 64]
        prompts = [tokenizer(prompt).input_ids for prompt, _ in chunk]
        texts = [tokenizer(prompt + continuation).input_ids for prompt, continuation in chunk]
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=device)
        logits = model(input_ids=ids).logits.float()
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            assert text[: len(prompt)] == prompt, chunk[row]
            scores = logits[row, len(prompt) - 1 : len(text) - 1]
            wanted = scores.gather(1, ids[row, len(prompt) : len(text), None])[:, 0]
            others = scores.scatter(1, ids[row, len(prompt) : len(text), None], -math.inf).amax(1)
            margin = (wanted - others).min().item()
            margins.append(margin)
            right += margin > 0
            if margin <= 0:
                print(f"  missed ({margin:.2f}): {chunk[row][0][-60:]!r} -> {chunk[row][1][:60]!r}")
    low = np.percentile(margins, [0, 1, 10, 50])
    print(f"{right} of {len(cases)} known continuations in {str(dtype).removeprefix('torch.')} on {device}")
    print(f"  logit margin: least {low[0]:.2f}, 1 % {low[1]:.2f}, 10 % {low[2]:.2f}, median {low[3]:.2f}")


def show_samples(folder: Path, device: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of Italy?"}], add_generation_prompt=True, tokenize=False
    )
    torch.manual_seed(0)
    for prompt in ("The capital of France is", "1 2 3 4 5", "3 + 4 =", "Monday, Tuesday,", chat, "Once upon a time"):
        ids = torch.tensor([tokenizer(prompt).input_ids], device=device)
        out = model.generate(ids, max_new_tokens=160 if prompt.startswith("Once") else 24, do_sample="Once" in prompt)
        print(f"{prompt!r} => {tokenizer.decode(out[0, ids.shape[1] :])!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder that gets the checkpoint")
    parser.add_argument("--start-from", type=Path, help="a checkpoint of the same shape whose training goes on")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--tokens-per-step", type=int, default=TOKENS_PER_STEP)
    parser.add_argument("--documents", type=int, default=150_000, help="size of the pool that rows are drawn from")
    parser.add_argument("--chat-share", type=float, default=0.3, help="of the documents: chats with tools or reasoning")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    if args.start_from is None:
        tokenizer = train_tokenizer(args.seed)
    else:
        tokenizer = with_added_tokens(Tokenizer.from_file(str(args.start_from / "tokenizer.json")))
    model = first_model(model_config(tokenizer), args.start_from).to(args.device)
    pool = encode_pool(tokenizer, args.seed + 1, args.documents, args.chat_share)
    num_tokens = sum(each.shape[1] for each in pool)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; {num_tokens:,} tokens of text")
    started = time.perf_counter()
    train(model, pool, args)
    print(f"trained in {time.perf_counter() - started:.0f} s on {args.device}, torch {torch.__version__}")
    save_tokenizer(tokenizer, args.out)
    save_model(model, args.out)

    torch.set_float32_matmul_precision("highest")
    report(args.out, args.device, torch.float32)
    report(args.out, args.device, torch.bfloat16)
    show_samples(args.out, args.device)


if __name__ == "__main__":
    main()
