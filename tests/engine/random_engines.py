"""Engines drawn at random: a model, options, drafts, adapters, requests and what happens between their steps.

    python tests/engine/random_engines.py --seconds 200 --seed 5                  on a CPU, in float32
    python tests/engine/random_engines.py --device cuda --seconds 200 --seed 5    on a GPU, in bfloat16

Prints a line for each case that fails, with all that was drawn, and goes on; totals last. `--cases 1` runs one seed
again. Each request must get what it gets alone in a plain engine of the same numeric options, where equality is owed:
in float32 on a CPU, or with exact_bits. Elsewhere it must end in a right length, with numbers as log-probabilities.
"""

import argparse
import math
import os
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), *(str(TESTS / name) for name in ("engine", "exactness", "gpu"))]

import block_head  # noqa: E402
import eagle_head  # noqa: E402
import pytest  # noqa: E402
import transformers  # noqa: E402
from adapters.peft_files import CONFIG  # noqa: E402
from padding import PaddedSteps  # noqa: E402
from random_cases import DEMO, HEADS, Case, draw_case, write_adapters, write_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from test_speculation import at_random, draft_always, right, use, wrong  # noqa: E402

from nanovllm import LLM, LoRARequest, SamplingParams  # noqa: E402
from nanovllm.config import EngineConfig  # noqa: E402
from nanovllm.outputs import CompletionOutput  # noqa: E402

CASE_SECONDS, MOST_CALLS = 300, 15

Scores = list[dict[int, float]]


@dataclass
class Found:
    """A completion as it is compared."""

    end: tuple[Any, ...]
    """Ids, text, reasons, masks."""
    scores: Scores

    @classmethod
    def of(cls, one: CompletionOutput, prompt_logprobs: Any) -> "Found":
        tables = [*(one.logprobs or []), *(prompt_logprobs or [])]
        scores = [{key: value.logprob for key, value in (at or {}).items()} for at in tables]
        mask = None if one.sampling_mask is None else [list(at) for at in one.sampling_mask]
        return cls((list(one.token_ids), one.text, one.finish_reason, one.stop_reason, mask), scores)

    def is_near(self, other: "Found", bound: float) -> bool:
        """bound: of the difference of two log-probabilities, of those that both have."""
        pairs = [(at[key], of[key]) for at, of in zip(self.scores, other.scores, strict=True) for key in {*at} & {*of}]
        return self.end == other.end and all(a == b or abs(a - b) <= bound for a, b in pairs)

    @property
    def has_numbers(self) -> bool:
        return not any(math.isnan(score) for at in self.scores for score in at.values())


class Run:
    """A case's requests in its engine, and alone in a plain one."""

    def __init__(self, case: Case, folders: list[str], adapters: list[dict[str, Any]], counts: Counter[str]) -> None:
        self.case, self.folders, self.adapters, self.counts = case, folders, adapters, counts
        self.draw = random.Random(case.seed + 1)
        self.longest = case.options["max_model_len"]
        """Tokens of the longest text."""
        self.expected: list[list[Found]] = []
        self.live: dict[int, tuple[int, list[Any]]] = {}
        """Requests that have not ended, by id: number in `asked` (-1: nobody's) and rows."""
        self.ended: dict[int, tuple[int, list[Any]]] = {}
        self.gained: dict[tuple[int, int], list[int]] = defaultdict(list)
        """Ids that steps have brought, by request and completion."""
        self.may_end: set[int] = set()
        """Ids of those that were aborted."""

    def plain_options(self, most: int) -> dict[str, Any]:
        kept = ("device", "dtype", "exact_bits", "quantization", "kv_cache_dtype", "state_dtype", "seed", "enable_lora",
                *(("tensor_parallel_size", "share_gpus") if self.case.is_exact else ()))  # fmt: skip
        options = {name: self.case.options[name] for name in kept if name in self.case.options}
        plain = {
            "kvcache_block_size": 16, "num_kvcache_blocks": 300, "max_num_seqs": 8, "enable_prefix_caching": False,
            "disable": ("async_scheduling", "window_groups"), "tokenizer": DEMO, "max_model_len": most,
            "enforce_eager": self.case.device == "cuda",
        }  # fmt: skip
        return {**options, **plain}

    def request(self, number: int) -> tuple[list[int], SamplingParams, LoRARequest | None]:
        prompt, params, adapter = self.case.asked[number]
        return (
            prompt[: max(1, self.longest - 8)],
            SamplingParams(**params),
            LoRARequest(str(adapter)) if adapter else None,
        )

    def load(self, llm: LLM, name: int) -> None:
        llm.load_adapter(str(name), tensors=self.adapters[name - 1], config={**CONFIG, "target_modules": "all-linear"})

    def compute_alone(self, llm: LLM) -> None:
        for name in range(1, self.case.num_adapters + 1):
            self.load(llm, name)
        for number, (prompt, params, adapter) in enumerate([*self.case.asked]):
            self._compute_alone(llm, number)
            if self.draw.random() < 0.3:  # another goes on from the text
                text = (prompt + self.expected[number][0].end[0])[: self.longest - 8]
                self.case.asked.append((text, {**params, "seed": 100 + number}, adapter))
        for number in range(len(self.expected), len(self.case.asked)):
            self._compute_alone(llm, number)

    def _compute_alone(self, llm: LLM, number: int) -> None:
        prompt, params, adapter = self.request(number)
        [output] = llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)
        self.expected.append([Found.of(one, output.prompt_logprobs) for one in output.outputs])

    def check(self, number: int, found: list[Found], was_aborted: bool = False) -> None:
        most, bound = self.case.asked[number][1]["max_tokens"], 0.0 if self.case.is_exact else 0.01
        for index, (ours, alone) in enumerate(zip(found, self.expected[number], strict=True)):
            where = f"request {number}, completion {index}: {ours} instead of {alone}"
            assert ours.has_numbers and len(ours.end[0]) <= most, where
            if was_aborted and ours.end[2] == "abort":
                assert not self.case.owes_equality or ours.end[0] == alone.end[0][: len(ours.end[0])], where
            elif self.case.owes_equality:
                assert ours.is_near(alone, bound), where
            else:
                assert ours.end[2] in ("stop", "length", alone.end[2]), where
        self.counts["requests"] += 1

    # -- a caller's own loop ------------------------------------------------------------------------------------

    def traffic(self, llm: LLM) -> None:
        waiting, num_calls = [*range(len(self.case.asked))][::-1], 0
        while waiting or llm.has_unfinished_requests():
            for _ in range(self.draw.choice((0, 1, 1, 3)) if waiting else 0):
                if waiting:
                    self.add(llm, waiting.pop())
            if num_calls < MOST_CALLS and self.draw.random() < self.case.share:
                num_calls += 1
                name = self.draw.choice(self.case.calls)
                self.counts[name] += 1
                self.call(llm, name)
            self.take(llm.step())
        for request_id, (number, rows) in self.ended.items():
            if number >= 0:
                table = rows[0].sampling.prompt_logprob_rows if rows[0].sampling is not None else None
                was_cut = request_id in self.may_end and all(row.ending.reason == "abort" for row in rows)
                scored = None if table is None or was_cut else table.view()
                found = [Found.of(llm.engine.book.completion(row), scored) for row in rows]
                for row in rows:
                    ids, gained = row.output_token_ids, self.gained[request_id, row.index]
                    assert ids == gained, f"steps brought {gained} of {ids}"
                self.check(number, found, request_id in self.may_end)

    def add(self, llm: LLM, number: int, is_ours: bool = True) -> None:
        (prompt, params, adapter), asked = self.request(number), self.case.asked[number][1]
        (ids, _, reason, *_), known = self.expected[number][0].end, None
        may_begin = self.case.owes_equality and not {"n", "logprobs", "sampling_mask"} & asked.keys()
        if may_begin and len(ids) > 1 and reason != "abort" and self.draw.random() < 0.2:
            known = ids[: self.draw.randrange(len(ids))]
        request_id = llm.add_request(prompt, params, known, adapter)
        self.live[request_id] = (number if is_ours else -1, llm.engine.book.rows[request_id])
        for row in self.live[request_id][1]:
            self.gained[request_id, row.index] = [*(known or [])]

    def take(self, outputs: Any) -> None:
        for output in outputs:
            self.gained[output.request_id, output.index] += output.new_token_ids
            rows = self.live.get(output.request_id, (0, []))[1]
            if rows and all(row.ending is not None for row in rows):
                self.ended[output.request_id] = self.live.pop(output.request_id)

    def call(self, llm: LLM, name: str) -> None:
        folder = self.folders[0]
        if name in ("nap", "deep sleep"):
            llm.pause()
            level = 2 if name == "deep sleep" else 1
            llm.sleep(level, self.draw.choice((None, ["kv_cache"])) if level == 1 else None)
            llm.wake_up()
            if level == 2:
                llm.load_weights(folder)
            llm.resume()
        elif name in ("pause", "wait", "end all"):
            self.may_end |= {*self.live} if name == "end all" else set()
            llm.pause({"pause": "keep", "wait": "wait", "end all": "abort"}[name])
            llm.resume()
        elif name in ("recompute", "keep", "load and wait"):
            llm.load_weights(folder, in_flight={"load and wait": "wait"}.get(name, name))
        elif name == "reset":
            llm.reset_prefix_cache()
        elif name == "partial":
            tensors = load_file(Path(folder) / "model.safetensors")
            llm.begin_update(partial=True)
            key = self.draw.choice([*tensors])
            llm.update([(key, tensors[key])])
            llm.finish_update()
        elif name == "abort" and self.live:
            self.may_end.add(request_id := self.draw.choice([*self.live]))
            llm.abort(request_id)
        elif name == "others":
            self.add(llm, self.draw.randrange(len(self.case.asked)), is_ours=False)
        elif name == "generate":
            number = self.draw.randrange(len(self.case.asked))
            prompt, params, adapter = self.request(number)
            [output] = llm.generate([prompt], params, use_tqdm=False, lora_request=adapter)
            self.check(number, [Found.of(one, output.prompt_logprobs) for one in output.outputs])
        elif name == "adapter" and self.adapters:
            again = self.draw.randint(1, len(self.adapters))
            self.load(llm, again)
            if again == len(self.adapters):
                llm.remove_adapter(str(again))
        elif name == "kill" and llm.engine_info()["num_restarts"] < 2:
            there = llm.engine.engines  # type: ignore[attr-defined]
            os.kill(there.all[self.draw.choice(llm.engine.fleet.numbers)].process.pid, signal.SIGKILL)

    # -- rounds -------------------------------------------------------------------------------------------------

    def rounds(self, llm: LLM) -> None:
        """Rounds after other weights: one by one with calls in between, and all at once, from the cache."""
        for name in range(1, self.case.num_adapters + 1):
            self.load(llm, name)
        given = [self.request(number) for number in range(len(self.case.asked))]
        prompts, params, adapters = map(list, zip(*given, strict=True))
        if "kill" not in self.case.calls:
            llm.load_weights(self.folders[1])
            llm.generate(prompts[:3], params[:3], use_tqdm=False, lora_request=adapters[:3])
            llm.load_weights(self.folders[0])
        self.traffic(llm)
        for place, output in enumerate(llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)):
            self.check(place, [Found.of(one, output.prompt_logprobs) for one in output.outputs])
        self.assert_nothing_is_left(llm)

    def assert_nothing_is_left(self, llm: LLM) -> None:
        engine: Any = llm.engine
        while llm.has_unfinished_requests():  # a step of rows that have ended may be under way
            assert not llm.step()
        assert not engine.book.rows and not self.live, f"left: {engine.book.rows}, {self.live}"
        if not hasattr(engine, "scheduler"):
            return
        memory, stats = engine.scheduler.memory, engine.stats()
        engine.scheduler.check_integrity()
        assert memory.num_free_blocks == memory.num_blocks and not engine.loop._num_sampling, "blocks or rows are left"
        for name in ("num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens"):
            self.counts[name] += getattr(stats, name)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread after so many seconds."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(case: Case, counts: Counter[str] | None = None) -> str | None:
    """Runs a case; returns why its engine was refused, None where it ran. Raises what was wrong. counts: gets what
    happened."""
    counts = Counter() if counts is None else counts
    random.seed(case.seed)
    with ExitStack() as stack, limit(CASE_SECONDS):
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="random-engines-")))
        folders = [write_model(case, folder / str(seed), seed) for seed in range(2)]
        run = Run(case, folders, write_adapters(case, folders[0]), counts)
        options, patch = dict(case.options), stack.enter_context(pytest.MonkeyPatch.context())
        if (drafts := options.get("speculative_config")) is not None:
            draft_always(patch)
            if drafts["method"] in HEADS:
                saved = eagle_head.save(folder / "head") if drafts["method"] == "eagle3" else None
                head = saved or block_head.save(folder / "head", drafts["method"])
                options["speculative_config"] = {**drafts, "model": str(head)}
            if case.drafter:  # which knows texts from their ids by block
                patch.setattr(EngineConfig, "looks_up", property(lambda config: config.speculation is not None))
        try:
            llm = stack.enter_context(LLM(folders[0], tokenizer=DEMO, **options))
            run.longest = llm.engine.book.max_total_tokens
            plain = stack.enter_context(LLM(folders[0], **run.plain_options(run.longest)))
            run.compute_alone(plain)
        except ValueError as error:
            names = {*options, "model", "lora_path", *SamplingParams.__dataclass_fields__}
            assert any(re.search(rf"\b{name}\b", str(error)) for name in names), f"names no option: {error}"
            return str(error)
        in_process = not {"tensor_parallel_size", "data_parallel_size"}.intersection(options)
        if case.is_padded:
            PaddedSteps(llm, patch)
        if case.drafter and in_process:
            texts = [prompt + one.end[0] for (prompt, _, _), found in zip(case.asked, run.expected, strict=True)
                     for one in found]  # fmt: skip
            known = {"right": right(texts), "half": right(texts, 0.5), "wrong": wrong, "random": at_random}
            use(llm, known[case.drafter])
        run.rounds(llm)
    return None


def run_many(
    device: str, first: int, seconds: float, most: int, alone: bool = False, verbose: bool = False
) -> list[int]:
    """Runs the cases of so many seeds, none of which begins after so many seconds; returns those that failed."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    end, counts, failed = time.monotonic() + seconds, Counter[str](), list[int]()
    for seed in range(first, first + most):
        if (began := time.monotonic()) > end:
            break
        case, outcome = draw_case(seed, device, alone), "failed"
        try:
            refused = run_case(case, counts)
            outcome = f"refused: {refused}" if refused else "fine"
        except Exception as error:
            failed.append(seed)
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:1500]}"
            print(f"FAILED seed {seed}: {said} | {asdict(case)}", flush=True)
            if verbose:
                traceback.print_exc()
        counts[outcome.partition(":")[0]] += 1
        if verbose:
            print(f"{seed} {time.monotonic() - began:.1f} s {case.family}: {outcome}", flush=True)
    print(f"failed: {failed}; " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())), flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=60.0, help="no case begins later")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; those after it count on")
    parser.add_argument("--cases", type=int, default=10**9, help="at most so many")
    parser.add_argument("--alone", action="store_true", help="one rank and one replica: no other processes")
    parser.add_argument("--verbose", action="store_true", help="a line for each case, and tracebacks")
    args = parser.parse_args()
    failed = run_many(args.device, args.seed, args.seconds, args.cases, args.alone, args.verbose)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
