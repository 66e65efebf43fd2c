"""Versions of the weights that a completion's tokens come from."""

VersionStarts = list[tuple[int, int]]
"""(version, number of its first token), ascending."""


def note_version(starts: VersionStarts, version: int, num_tokens: int) -> None:
    """Notes that the tokens after the first `num_tokens` come from weights of this version."""
    if starts and starts[-1][1] == num_tokens:
        starts.pop()
    if not starts or starts[-1][0] != version:
        starts.append((version, num_tokens))


def version_spans(starts: VersionStarts, num_tokens: int) -> list[tuple[int, int, int]]:
    """(version, first token, end) of the first `num_tokens`: CompletionOutput.weight_versions."""
    ends = [*(start for _, start in starts[1:]), num_tokens][: len(starts)]
    return [(version, start, end) for (version, start), end in zip(starts, ends, strict=True) if end > start]
