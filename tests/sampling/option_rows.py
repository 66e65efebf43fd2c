"""Option rows for the kernels: random logits, and any mixture of options."""

import math
import random
from dataclasses import dataclass

import torch

from nanovllm.kernels.sampling import rows as rows_module
from nanovllm.wire.sampling import RECORD, RECORD_WORDS


@dataclass
class Rows:
    """Arguments of the option sampler's kernels, on one device."""

    logits: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    records: torch.Tensor
    temperature: torch.Tensor
    seed: torch.Tensor
    positions: torch.Tensor
    input_ids: torch.Tensor

    @property
    def filter_args(self) -> tuple[torch.Tensor, ...]:
        return self.logits, self.rows, self.slots, self.records, self.temperature

    def option_rows(self) -> "rows_module.Rows":
        """Rows as the kernels take them; no token is sampled yet."""
        tokens, last_token = (
            torch.full(sizes.shape, -7, dtype=torch.int32, device=self.logits.device)
            for sizes in (self.positions, self.temperature)
        )
        given = (self.logits, self.rows, self.slots, self.records, self.rows, self.temperature, self.seed)
        return rows_module.Rows(*given, self.positions, self.input_ids, tokens, last_token, self.logits.shape[1])


def record(
    flags: int = 0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, presence: float = 0.0,
    frequency: float = 0.0, repetition: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    log_min_p = math.log(min_p) if min_p else -math.inf
    packed = RECORD.pack(flags, top_k, top_p, log_min_p, presence, frequency, repetition)
    return torch.frombuffer(bytearray(packed), dtype=torch.int32)


def random_options(draw: random.Random, vocab: int) -> dict[str, float]:
    options: dict[str, float] = {}
    if draw.random() < 0.6:
        options["top_k"] = draw.choice([1, 2, 5, 50, vocab - 1, vocab, 2 * vocab])
    if draw.random() < 0.6:
        options["top_p"] = draw.choice([0.001, 0.1, 0.5, 0.9, 0.99, 0.999])
    if draw.random() < 0.4:
        options["min_p"] = draw.choice([0.001, 0.05, 0.5, 1.0])
    return options


def make_rows(seed: int, num_rows: int, vocab: int, device: torch.device, dtype: torch.dtype = torch.float32,
              kind: str = "normal", stride: int = 0) -> Rows:  # fmt: skip
    """`kind`: "normal" logits, "tied" ones of few values, "peaked" ones, or "masked" ones with -inf among them."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows + 3, stride or vocab, generator=generator) * draw.choice([0.5, 2.0, 5.0])
    if kind == "tied":
        logits = logits.round()
    elif kind == "peaked":
        logits[:, draw.randrange(vocab)] += 30
    elif kind == "masked":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = -math.inf
    order = list(range(num_rows + 3))
    draw.shuffle(order)
    slots = list(range(num_rows + 5))
    draw.shuffle(slots)
    records = torch.stack([record(**random_options(draw, vocab)) for _ in range(num_rows)])
    assert records.shape[1] == RECORD_WORDS
    temperature = torch.tensor([draw.choice([0.0, 0.3, 0.7, 1.0, 2.0]) for _ in slots])
    return Rows(
        logits=logits.to(device, dtype)[:, :vocab],
        rows=torch.tensor(order[:num_rows], dtype=torch.int32, device=device),
        slots=torch.tensor(slots[:num_rows], dtype=torch.int32, device=device),
        records=records.to(device),
        temperature=temperature.to(device),
        seed=torch.randint(-(2**62), 2**62, (len(slots),), generator=generator).to(device),
        positions=torch.randint(0, 5000, (num_rows + 3,), generator=generator, dtype=torch.int32).to(device),
        input_ids=torch.randint(0, min(vocab, 40), (num_rows + 3,), generator=generator, dtype=torch.int32).to(device),
    )
