"""Whether a step verifies drafts: where they are likely to bring more than their places cost."""

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.engine.sequence import Sequence
from nanovllm.model_config import ModelConfig
from nanovllm.speculative import METHODS, shared_lanes

_COSTS = ((16, 1.12), (64, 1.15), (128, 1.25), (256, 1.6))
"""Maximum tokens of a step of decodes, and what such a step costs in steps of one token a row, for a dense model of 8B
on an H200. Measured with 4, 64, 128 and 256 tokens, of 1, 16, 16 and 64 rows."""
_EXPERTS, _SMALL, _QUANTISED = 10.0, 4.0, 2.0
"""Factors of the cost where tokens choose experts, whose weights the step reads besides; in models
narrower than _NARROW, whose weights are soon read; and where weights are quantised. Measured with four tokens."""
_NARROW = 2048
_EXPECTED, _FORGOTTEN = 0.5, 1 / 2048
"""Share of drafts that is expected to be right when nothing is known, and how fast what is known fades in steps that
verify none: so that they are tried again now and then."""
_LEARNT = 1 / 8
"""Weight of a step's drafts in the average of the last ones."""


T = TypeVar("T")


class PlaceCost(NamedTuple):
    """Cost of places in a model."""

    factor: float = 1.0
    """Cost where texts are short, in places of a dense model of 8B."""
    num_keys: float = 100_000
    """Tokens whose keys and values take as long to read as the weights."""
    together: int = 8
    """Places of a row that read its keys and values together, once for all."""
    drafting: float = 0.0
    """Cost of a model that drafts all tokens, in steps of one token; 0: it costs next to nothing."""

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> "PlaceCost":
        found, speculation = cls._of_places(model), config.speculation
        if speculation is None or model.implementation == "transformers":  # which is served without drafts
            return found
        lanes, head_dim = 1, max(layer.head_dim for layer in model.layers)
        if config.attention_backend in ("auto", "triton"):
            lanes = shared_lanes(head_dim, config.kv_cache_dtype == "fp8", config.exact_bits is not None)
        found = found._replace(together=max(1, lanes * model.num_key_value_heads // model.num_attention_heads))
        method = METHODS[speculation.method]
        layers = method.layers_by_pass + method.layers_by_token * speculation.num_tokens
        return found._replace(drafting=layers / len(model.layers))

    @classmethod
    def _of_places(cls, model: ModelConfig) -> "PlaceCost":
        if model.implementation == "transformers":  # it has no layers of ours
            return cls()
        share = sum(layer.mixer == "attention" for layer in model.layers) / len(model.layers)
        size = model.num_key_value_heads * model.head_dim * share
        num_keys = 6 * model.hidden_size**2 / size if size else float("inf")
        if model.moe is not None:
            return cls(_EXPERTS, num_keys)
        if model.hidden_size < _NARROW:
            return cls(_SMALL, num_keys)
        return cls(_QUANTISED if any(layer.quantization is not None for layer in model.layers) else 1.0, num_keys)


def cost(num_rows: int, places: int, num_keys: int, of: PlaceCost) -> float:
    """Duration of a step of so many decodes with these places each and so many tokens before them in all, in steps
    with one place."""
    tokens = next((factor - 1 for most, factor in _COSTS if num_rows * places <= most), float("inf"))
    reads = -(-places // of.together)
    return 1 + of.factor * tokens + (reads - 1) * num_keys / (of.num_keys + num_keys)


class Drafting:
    """Drafts that were verified, how many were right, and what follows from that. A function of counts alone, so that
    a run can be repeated."""

    def __init__(self, tokens_per_step: int, most_places: int, place_cost: PlaceCost) -> None:
        """tokens_per_step: of a row, drafts included. most_places: maximum rows of a step on the device."""
        self.tokens_per_step, self.most_places, self._place_cost = tokens_per_step, most_places, place_cost
        self.num_drafts = 0
        """Number of times that a row had drafts."""
        self.num_draft_tokens = 0
        self.accepted = [0] * (tokens_per_step - 1)
        """Drafted tokens that were right, by their place after the last token."""
        self._right, self._found = _EXPECTED, tokens_per_step - 1.0

    def places(self, num_rows: int, num_waiting: int, budget: int, lengths: Iterable[int]) -> int:
        """Places of each of at most `num_rows` decodes, of these lengths, in the next step, which has room for `budget`
        tokens, and may begin `num_waiting` rows besides."""
        places, num_tokens = self.tokens_per_step, self.tokens_per_step * num_rows
        if places == 1 or num_tokens > budget or num_tokens + num_waiting > self.most_places:
            return 1
        expected = 1 + self._found * self._right
        return places if expected > cost(num_rows, places, sum(lengths), self._place_cost) else 1

    def wants_entries(self, num_rows: int, num_later: int) -> bool:
        """Whether a model that drafts is to take in what so many rows compute. It rests where drafts would not pay for
        them, were they all right, and at least as many requests wait until these have ended: else the rows that are
        left at last would have no drafts."""
        places = self.tokens_per_step
        spent = cost(num_rows, places, 0, self._place_cost) + self._place_cost.drafting
        return num_later < num_rows or (num_rows * places <= self.most_places and places > spent)

    def wants_drafts(self, rows: Collection[Sequence]) -> bool:
        """Whether a model is to draft for rows that run: the drafts that are right are likely to bring more than places
        and drafting cost."""
        places, of = self.tokens_per_step, self._place_cost
        if not of.drafting or len(rows) * places > self.most_places:
            return False
        spent = cost(len(rows), places, sum(seq.num_tokens for seq in rows), of) + of.drafting
        num_able = sum(seq.prefix.has_entries for seq in rows)
        return len(rows) + num_able * (places - 1) * self._right > spent * len(rows)

    def note_found(self, num_tokens: int, num_rows: int) -> None:
        """Notes how many tokens a step's drafter proposed for its rows."""
        self._found = num_tokens / num_rows if num_rows else 0.0

    def note_plain(self) -> None:
        """Notes a step of decodes that verified nothing."""
        self._right += (_EXPECTED - self._right) * _FORGOTTEN

    def results(
        self, rows: list[T], token_ids: list[int], num_decodes: int, places: int, num_drafted: int | None
    ) -> Iterable[tuple[T, int]]:
        """Tokens that the rows of a step gained, and whose they are (Scheduler.apply); notes how many drafts were
        right, and how many there are now."""
        if num_drafted is not None:
            self.note_found(num_drafted, len(rows))
        if places == 1:
            if self.tokens_per_step > 1:
                self.note_plain()
            return zip(rows, token_ids, strict=True)
        end = num_decodes * places
        parts = [token_ids[begin : begin + places] for begin in range(0, end, places)]
        gained = [[token for token in part if token >= 0] for part in parts]
        self.note_verified([places - 1 - part[1:].count(-2) for part in parts], [*map(len, gained)])
        found = [(row, token) for row, tokens in zip(rows, gained, strict=False) for token in tokens]
        return [*found, *zip(rows[num_decodes:], token_ids[end:], strict=True)]

    def note_verified(self, drafted: list[int], gained: list[int]) -> None:
        """Notes the number of drafts that each decode of a step had, and of tokens that it gained."""
        right = 0
        for num_drafted, num_gained in zip(drafted, gained, strict=True):
            if num_drafted:
                self.num_drafts += 1
                right += max(0, num_gained - 1)
                for place in range(num_gained - 1):
                    self.accepted[place] += 1
        if total := sum(drafted):
            self.num_draft_tokens += total
            self._right += (right / total - self._right) * _LEARNT
