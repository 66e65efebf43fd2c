"""A tokenizer as SentencePiece's become in tokenizer.json: Llama 2, Mistral 7B, TinyLlama, Phi-3."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = "▁ ▁▁ ▁▁▁▁ ▁The ▁capital ▁is is ▁Paris Paris ▁true true ▁dog dog x .".split(" ")
DECODERS = {
    "strip": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "pieces": decoders.WordPiece(),
    "plain": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
}
"""Decoders by what they do with the blank that begins a text: Gemma's, the last, does nothing. "pieces" is BERT's."""


def make(decoder: str = "strip", size: int = 0) -> Tokenizer:
    """`size`: tokens of the vocabulary, of which those above are the first."""
    pieces = [*SPECIAL, *BYTES, *WORDS]
    pieces += [f"▁w{number}" if number % 3 else f"w{number}" for number in range(size - len(pieces))]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = DECODERS[decoder]
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def save(folder: Path, decoder: str = "strip", size: int = 0) -> Path:
    make(decoder, size).save(str(folder / "tokenizer.json"))
    return folder
