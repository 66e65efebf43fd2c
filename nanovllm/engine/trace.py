"""EngineConfig.trace: what ran when, as a file for Perfetto (ui.perfetto.dev) and as one HTML page.

The file is a JSON array of Chrome trace events, written as things happen: a run that is killed leaves one that Perfetto
still reads. Times are microseconds since the engine's start.
"""

import json
import logging
import os
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

from nanovllm.engine.engine_stats import EngineStats
from nanovllm.engine.schedule import Schedule
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import refuse

logger = logging.getLogger("nanovllm")
_ENGINE, _REQUESTS = 1, 2  # Perfetto's processes
_BUFFER = 1 << 20  # bytes between two writes
_PAGE_EVENTS = 100_000
"""Maximum events of the HTML page; Perfetto reads more."""
_PAGE = Path(__file__).with_name("trace.html")
_MARK = "/*events*/"


class _Step(NamedTuple):
    """Step that was launched and not collected."""

    number: int
    launched: float
    num_decode_rows: int
    places: int
    chunks: list[tuple[int, int, int]]
    """(request, first position, tokens) of rows that are not decodes."""


class Trace:
    """Writes the timeline of one engine, which calls it at each step and at each request's end. One thread at a
    time."""

    def __init__(self, folder: str) -> None:
        """Raises ValueError where the folder cannot be written."""
        self._begin = time.perf_counter()
        name = f"nanovllm-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path(folder) / f"{name}.json"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            number = 1
            while self.path.exists():
                number += 1
                self.path = Path(folder) / f"{name}-{number}.json"
            self._file: IO[str] | None = open(self.path, "w", buffering=_BUFFER, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            refuse("trace", folder, f"a folder that can be written ({error.strerror})")
        self._steps: list[_Step] = []
        self._num_steps = self._num_preemptions = 0
        self._verified = 0, 0  # drafted tokens, and those of them that were right
        self._last_end = self._begin
        self._write_text("[\n")
        self._name(_ENGINE, 0, "process_name", "engine")
        self._name(_ENGINE, 1, "thread_name", "steps")
        self._name(_REQUESTS, 0, "process_name", "requests")

    def launched(self, schedule: Schedule, now: float) -> None:
        """Notes a launched step. Rows that had begun before and take a slot again were preempted in between."""
        first = schedule.num_decode_rows
        rows = zip(schedule.seqs[first:], schedule.starts[first:], schedule.counts[first:], strict=True)
        self._num_steps += 1
        chunks = [(seq.number, start, count) for seq, start, count in rows]
        self._steps.append(_Step(self._num_steps, now, first, schedule.places, chunks))
        for seq in schedule.new_slots:
            if seq.metrics.first_scheduled_time is not None:
                self._write("i", "again, after a preemption", now, _REQUESTS, seq.number, s="t")

    def collected(self, now: float, stats: EngineStats) -> None:
        """Notes that the oldest step has ended. The device began it when it had ended the one before."""
        step = self._steps.pop(0)
        begin, self._last_end = max(step.launched, self._last_end), now
        prompt = sum(count for _, _, count in step.chunks)
        name = f"{step.num_decode_rows} decodes" + (f", {prompt} prompt tokens" if prompt else "")
        chunks = [f"request {number}: {start}..{start + count - 1}" for number, start, count in step.chunks]
        args = {"step": step.number, "decode_rows": step.num_decode_rows, "prompt_tokens": prompt, "prompts": chunks}
        verified = stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens
        if step.places > 1:
            drafted, right = (after - before for after, before in zip(verified, self._verified, strict=True))
            args |= {"places": step.places, "drafted": drafted, "right": right}
        self._verified = verified
        self._write("X", name, begin, _ENGINE, 1, now, args)
        for number, start, count in step.chunks:
            self._write("X", f"{count} prompt tokens", begin, _REQUESTS, number, now, {"first": start})
        self._write("C", "requests", now, args={"running": stats.num_running, "waiting": stats.num_waiting})
        self._write("C", "KV cache %", now, args={"used": round(100 * stats.kv_cache_usage, 2)})
        if stats.num_preemptions > self._num_preemptions:
            count = stats.num_preemptions - self._num_preemptions
            self._write("i", f"{count} preempted", now, _ENGINE, 1, s="t")
            self._num_preemptions = stats.num_preemptions

    def ended(self, seq: Sequence) -> None:
        """Writes where the time of an ended request went."""
        times, number = seq.metrics, seq.number
        end = times.finished_time
        assert end is not None
        first, scheduled = times.first_token_time, times.first_scheduled_time
        self._name(_REQUESTS, number, "thread_name", f"request {number}")
        tokens = {"prompt_tokens": seq.num_prompt_tokens, "cached": seq.num_prompt_cached_tokens or 0}
        tokens |= {"output_tokens": seq.num_output_tokens}
        self._write("X", "waiting", times.arrival_time, _REQUESTS, number, scheduled or end, tokens)
        if scheduled is not None:
            self._write("X", "prefill", scheduled, _REQUESTS, number, first or end, tokens)
        if first is not None:
            args = {**tokens, "finish_reason": seq.ending and seq.ending.reason}
            self._write("X", "decode", first, _REQUESTS, number, end, args)

    def close(self) -> None:
        """Ends the file and writes the page."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(self._event("i", "end", time.perf_counter(), _ENGINE, 1, s="g")) + "\n]\n")
            self._file.close()
            self._write_page()
        except OSError as error:
            logger.warning("trace: %s: %s", self.path, error.strerror)
        self._file = None

    def _write_page(self) -> None:
        events: list[str] = []
        with open(self.path, encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("{") and len(events) < _PAGE_EVENTS:
                    events.append(line.rstrip(",\n").replace("<", "\\u003c"))
        page = _PAGE.read_text(encoding="utf-8").replace(_MARK, ",\n".join(events))
        self.path.with_suffix(".html").write_text(page, encoding="utf-8")

    def _name(self, process: int, thread: int, kind: str, name: str) -> None:
        self._write("M", kind, self._begin, process, thread, args={"name": name})

    def _event(
        self, kind: str, name: str, begin: float, process: int = _ENGINE, thread: int = 0, end: float | None = None,
        args: dict[str, Any] | None = None, **more: str,
    ) -> dict[str, Any]:  # fmt: skip
        event: dict[str, Any] = {"ph": kind, "name": name, "ts": round((begin - self._begin) * 1e6, 1)}
        event |= {"pid": process, "tid": thread, **more}
        if end is not None:
            event["dur"] = round((end - begin) * 1e6, 1)
        return event if args is None else event | {"args": args}

    def _write(self, *arguments: Any, **options: Any) -> None:
        self._write_text(json.dumps(self._event(*arguments, **options)) + ",\n")

    def _write_text(self, text: str) -> None:
        """Writes to the file. A full disk ends the trace, not the engine."""
        if self._file is None:
            return
        try:
            self._file.write(text)
        except OSError as error:
            logger.warning("trace: %s: %s; the rest is not traced", self.path, error.strerror)
            self._file = None
