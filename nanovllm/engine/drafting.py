"""Whether a step verifies drafts: where they are likely to bring more than their places cost."""

_COSTS = ((16, 1.15), (64, 1.25), (128, 1.5), (256, 2.0))
"""Maximum tokens of a step of decodes, and what such a step costs in steps of one token a row, for a dense model of 8B
on an H200. Measured with four tokens in all; beyond 16 a guess."""
_EXPERTS_COST = 3.0
"""How many times as much the places cost where tokens choose experts, whose weights the step reads besides."""
_EXPECTED, _FORGOTTEN = 0.5, 1 / 256
"""Share of drafts that is expected to be right when nothing is known, and how fast what is known fades in steps that
verify none: so that they are tried again now and then."""
_LEARNT = 1 / 8
"""Weight of a step's drafts in the average of the last ones."""


def cost(num_tokens: int, is_dense: bool) -> float:
    """Duration of a step of decodes with so many tokens in all, where drafts have a part of them; in steps without
    drafts."""
    found = next((factor for most, factor in _COSTS if num_tokens <= most), float("inf"))
    return found if is_dense else 1 + (found - 1) * _EXPERTS_COST


class Drafting:
    """Drafts that were verified, how many were right, and what follows from that. A function of counts alone, so that
    a run can be repeated."""

    def __init__(self, tokens_per_step: int, most_places: int, is_dense: bool) -> None:
        """tokens_per_step: of a row, drafts included. most_places: maximum rows of a step on the device."""
        self.tokens_per_step, self._most_places, self._is_dense = tokens_per_step, most_places, is_dense
        self.num_drafts = 0
        """Number of times that a row had drafts."""
        self.num_draft_tokens = 0
        self.accepted = [0] * (tokens_per_step - 1)
        """Drafted tokens that were right, by their place after the last token."""
        self._right, self._found = _EXPECTED, tokens_per_step - 1.0

    def places(self, num_rows: int, num_waiting: int, budget: int) -> int:
        """Places of each of at most `num_rows` decodes in the next step, which has room for `budget` tokens, and may
        begin `num_waiting` rows besides."""
        places, num_tokens = self.tokens_per_step, self.tokens_per_step * num_rows
        if places == 1 or num_tokens > budget or num_tokens + num_waiting > self._most_places:
            return 1
        return places if 1 + self._found * self._right > cost(num_tokens, self._is_dense) else 1

    def note_found(self, num_tokens: int, num_rows: int) -> None:
        """Notes how many tokens a step's drafter proposed for its rows."""
        self._found = num_tokens / num_rows if num_rows else 0.0

    def note_plain(self) -> None:
        """Notes a step of decodes that verified nothing."""
        self._right += (_EXPECTED - self._right) * _FORGOTTEN

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
