"""Random traffic against one engine for as long as asked, with every answer checked. Fails on any violation.

    python scripts/soak.py --minutes 10 --tensor-parallel-size 2                 the demo checkpoint, on GPUs or a CPU
    python scripts/soak.py --minutes 5 --tensor-parallel-size 2 --model 0.6B     random weights of a published shape

Rounds of traffic follow each other. A round first asks the idle engine some twenty questions, one alone at a time with
an empty prefix cache, and keeps the answers. Then it asks one of them for each row of the engine at once, so that rows
are preempted however fast the machine is. Then several threads ask the same questions in bursts (cut to other lengths,
or until a token of the answer appears), abort what waits, runs or has just ended, call generate() and load_weights, on
a KV cache that is too small for them. Every answer must equal the one that was given alone, token by token. Where two
answers part, both tokens are scored alone: only a near tie excuses the engine.
"""

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from soak_ledger import (  # noqa: E402
    COUNTED,
    NEAR_TIE,
    Asked,
    Ledger,
    Parting,
    Question,
    Watch,
    Weights,
    children,
    resident_mib,
)
from soak_questions import DrawnQuestions, variant  # noqa: E402

from nanovllm import LLM, SamplingParams  # noqa: E402
from nanovllm.kernels.sampling.rng import gumbel_noise_reference, random_words_reference, row_key_reference  # noqa: E402
from nanovllm.models.published import PUBLISHED_SHAPES  # noqa: E402

ROUND_SECONDS = 25.0
NUM_QUESTIONS = 20
OF_CROWD = 0
"""The question that is asked for all rows at once: alone it fits, and all together outgrow the KV cache."""
NUM_CLIENTS = 2
LOADING = -1
DRAIN_SECONDS = 120.0


class Soak:
    """One run: an engine, the threads that ask, and the ledger that they share."""

    def __init__(self, llm: LLM, seed: int = 0, show: Callable[[str], None] = lambda text: None) -> None:
        """`show`: called now and then with the state of things."""
        self.llm = llm
        self.version = 0
        config, model = llm.config, llm.model_config
        self.ledger = Ledger(frozenset(model.eos_token_ids), config.dtype)
        self.watch = Watch(llm, self.ledger.counts)
        self.weights = Weights(llm)
        self.draw = random.Random(seed)
        assert config.kvcache_block_size
        self.unit = config.kvcache_block_size
        self.drawn = DrawnQuestions(self.draw, model.vocab_size, self.unit)
        self.questions: list[Question] = []
        self._asking = threading.Event()
        self._stepping = threading.Event()
        self._show_text = show
        self.mib_at_first = 0.0

    # -- questions ----------------------------------------------------------------------------------------------

    def ask_alone(self) -> None:
        """A new round's questions, and their answers from an engine that has nothing else to do."""
        shared = self.drawn.tokens(6 * self.unit)
        self.questions = []
        for number in range(NUM_QUESTIONS):
            params = self.drawn.params(max(1, round(3 * self.unit * self.draw.random() ** 2)))
            if number == OF_CROWD:
                params = replace(params, max_tokens=3 * self.unit)
            longest = self.llm.engine.book.max_total_tokens - params.max_tokens - 1
            of_crowd = number == OF_CROWD
            prompt = self.drawn.tokens(self.unit) if of_crowd else self.drawn.prompt(shared, longest)[:longest]
            question = Question(prompt, params)
            if params.seed is not None:
                self.llm.engine.scheduler.reset_prefix_cache()
                (output,) = self.llm.generate([question.prompt], params, use_tqdm=False)
                question.answers = [completion.token_ids for completion in output.outputs]
            self.questions.append(question)
            self._show()

    def _variant(self, draw: random.Random) -> tuple[Question, SamplingParams]:
        question = draw.choice(self.questions)
        return question, variant(question, draw)

    # -- threads ------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[..., None], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)
            except BaseException as error:
                self.ledger.violation(f"{work.__name__}: {type(error).__name__}: {error}")
                self._asking.clear()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _step_on(self) -> None:
        """The serving loop: every output of add_request's callers passes here."""
        while self._stepping.is_set():
            if self.llm.has_unfinished_requests():
                self.ledger.take(self.llm.step())
            else:
                time.sleep(0.002)

    def _ask(self, question: Question, params: SamplingParams) -> int:
        with self.ledger.lock:  # or its first output would come before we know its number
            request_id = self.llm.add_request(question.prompt, params)
            n = params.n
            self.ledger.open[request_id] = Asked(question, params, self.version, [[] for _ in range(n)], [None] * n)
        return request_id

    def _crowd(self) -> None:
        """Asks one question for every row at once, and steps until one of them has lost its blocks."""
        question, before = self.questions[OF_CROWD], self.llm.stats().num_preemptions
        for _ in range(self.llm.config.max_num_seqs):
            self._ask(question, question.params)
        while self.ledger.open and self.llm.stats().num_preemptions == before:
            self.ledger.take(self.llm.step())

    def _abort(self, request_id: int) -> None:
        with self.ledger.lock:
            asked = self.ledger.open.get(request_id)
            if asked is not None:
                asked.aborted = True
        self.ledger.counts["aborts"] += 1
        self.llm.abort(request_id)

    def _client(self, draw: random.Random) -> None:
        """Bursts, pauses and second thoughts."""
        most_open = 3 * self.llm.config.max_num_seqs
        while self._asking.is_set():
            with self.ledger.lock:
                open_ids, ended = list(self.ledger.open), list(self.ledger.ended)
            kind = draw.random()
            if len(open_ids) < most_open and kind < 0.3:
                for _ in range(draw.choice((1, 1, 2, 3, 5, self.llm.config.max_num_seqs))):
                    self._ask(*self._variant(draw))
            elif len(open_ids) < most_open and kind < 0.33:
                self._abort(self._ask(*self._variant(draw)))  # while it waits
            elif kind > 0.98 and ended:
                self._abort(draw.choice(ended[-3:]))
            elif kind > 0.93 and open_ids:
                self._abort(draw.choice(open_ids))
            else:
                time.sleep(min(2.0, draw.expovariate(8.0)))

    def _generator(self, draw: random.Random) -> None:
        """Whole batches in between, by a thread that steps as well."""
        while self._asking.is_set():
            batch, version = [self._variant(draw) for _ in range(draw.randint(1, 5))], self.version
            outputs = self.llm.generate([q.prompt for q, _ in batch], [p for _, p in batch], use_tqdm=False)
            with self.ledger.lock:
                for (question, params), output in zip(batch, outputs, strict=True):
                    if version == LOADING or version != self.version:
                        question = replace(question, answers=None)  # under which weights was it?
                    tokens = [one.token_ids for one in output.outputs]
                    reasons = [one.finish_reason for one in output.outputs]
                    asked = Asked(question, params, version, tokens, reasons)
                    self.ledger.check(asked, f"generate {output.request_id}")
            time.sleep(draw.random())

    # -- rounds -------------------------------------------------------------------------------------------------

    def round(self, seconds: float) -> None:
        self._stepping.clear()
        self.ask_alone()
        self._crowd()
        self._stepping.set()
        self._asking.set()
        stepper = self._guarded(self._step_on)
        seeds = [random.Random(self.draw.random()) for _ in range(NUM_CLIENTS + 1)]
        generator = self._guarded(self._generator, seeds[0])
        clients = [self._guarded(self._client, seed) for seed in seeds[1:]]
        end, reload = time.monotonic() + seconds, time.monotonic() + seconds * self.draw.random()
        while self._asking.is_set() and time.monotonic() < end:
            time.sleep(0.1)
            self._show()
            if time.monotonic() > reload:
                self._load(self.version)  # the same again: no answer may change
                reload = float("inf")
        self._asking.clear()
        for client in clients:
            client.join(DRAIN_SECONDS)
        if self.draw.random() < 0.6 and not self.ledger.violations:
            with self.ledger.lock:
                for asked in self.ledger.open.values():
                    asked.sure = [len(tokens) for tokens in asked.tokens]
            self._load(1 - self.version)
        generator.join(DRAIN_SECONDS)
        self._drain(stepper)
        if not self.ledger.violations:
            self._settle_partings()
            self._check_idle()

    def _load(self, version: int) -> None:
        if version != self.version:
            self.version = LOADING  # the same weights again are no news
        self.llm.load_weights(self.weights.tensors(version))
        self.version = version
        self.ledger.counts["weight loads"] += 1

    def _drain(self, stepper: threading.Thread) -> None:
        end = time.monotonic() + DRAIN_SECONDS
        while stepper.is_alive() and (self.ledger.open or self.llm.has_unfinished_requests()):
            if time.monotonic() > end:
                self.ledger.violation(f"unfinished after {DRAIN_SECONDS} s: {sorted(self.ledger.open)}")
                break
            time.sleep(0.01)
            self._show()
        self._stepping.clear()
        stepper.join(DRAIN_SECONDS)

    def _settle_partings(self) -> None:
        for parting in self.ledger.partings:
            if parting.asked.version != self.version:
                self._load(parting.asked.version)
            gap = self._gap(parting)
            if not gap < NEAR_TIE[self.llm.config.dtype]:
                prompt, params = parting.asked.question.prompt, parting.asked.params
                self.ledger.violation(
                    f"completion {parting.index} of a prompt of {len(prompt)} tokens, {params}: token "
                    f"{parting.position} is {parting.found}, alone it was {parting.wanted[parting.position]}; "
                    f"their scores differ by {gap:.4f}"
                )
        self.ledger.partings.clear()
        if self.ledger.too_many_near_ties():
            counts = self.ledger.counts
            self.ledger.violation(f"answers part {counts['partings']} times in {counts['compared']} tokens")

    def _gap(self, parting: Parting) -> float:
        """Difference of the two tokens' scores, each scored alone after the reference's text. With top_k, the
        distance of either from the least likely token that may be drawn counts too."""
        params, before = parting.asked.params, parting.wanted[: parting.position]
        prefix, pair = parting.asked.question.prompt + before, [parting.wanted[parting.position], parting.found]
        alone = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
        outputs = self.llm.generate([[*prefix, token] for token in pair], alone, use_tqdm=False)
        rows = [output.prompt_logprobs[-1] for output in outputs if output.prompt_logprobs]
        logprobs = torch.tensor([row[token].logprob for row, token in zip(rows, pair, strict=True) if row])
        times = torch.tensor([before.count(token) for token in pair])
        scores = logprobs - params.presence_penalty * (times > 0) - params.frequency_penalty * times
        if params.temperature:
            assert params.seed is not None
            position = torch.tensor([len(prefix)])
            keys = row_key_reference(torch.tensor([params.seed + parting.index]), position)
            noise = gumbel_noise_reference(random_words_reference(*keys, torch.tensor(pair)))
            scores = scores / params.temperature + noise
        gaps = [abs(float(scores[0] - scores[1]))]
        if params.top_k and params.temperature and rows[0]:
            edge = sorted((one.logprob for one in rows[0].values()), reverse=True)[params.top_k - 1]
            gaps += (logprobs - edge).abs().tolist()
        return min(gaps)

    def _check_idle(self) -> None:
        """Nothing is left in the engine but the prefix cache."""
        engine, scheduler = self.llm.engine, self.llm.engine.scheduler
        scheduler.check_integrity()
        memory = scheduler.memory
        left = {
            "unfinished": self.llm.has_unfinished_requests(),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "blocks": memory.num_blocks - memory.num_free_blocks,
            "known requests": len(engine.book.rows),
            "sampling rows": engine.loop._num_sampling,
        }
        if any(left.values()):
            self.ledger.violation(f"left in an idle engine: {left}")

    def _show(self) -> None:
        counts = self.ledger.counts
        names = ("requests", "tokens", "preemptions", "aborts", "partings")
        self._show_text(", ".join(f"{counts[name]} {name}" for name in names))

    def run(self, seconds: float) -> None:
        """Rounds until the time is over, or something is wrong."""
        self._load(0)
        end = time.monotonic() + seconds
        while not self.ledger.violations and (remaining := end - time.monotonic()) > 0:
            self.round(min(ROUND_SECONDS, remaining))
            self.ledger.counts["rounds"] += 1
            self.mib_at_first = self.mib_at_first or resident_mib()


# -- the command ------------------------------------------------------------------------------------------------


def start(model: str, device: str, tensor_parallel_size: int, seed: int, **options: Any) -> LLM:
    """An engine whose KV cache holds a few of its requests only, though these share what they begin with."""
    if not Path(model).is_dir() and f"Qwen3-{model}" in PUBLISHED_SHAPES:
        options = {"load_format": "dummy", **options}
        model = f"Qwen3-{model}"
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    unit, rows, blocks = (128, 48, 80) if on_gpu else (16, 12, 36)
    largest, beside = (20, 17) if on_gpu else (8, 5)  # on GPUs there are steps that several ranks run in halves
    small = {
        "kvcache_block_size": unit,
        "num_kvcache_blocks": blocks,
        "disable": ("lookahead",),  # or there were few preemptions
        "max_model_len": 16 * unit,
        "max_num_seqs": rows,
        "max_num_batched_tokens": largest * unit,
        "max_num_prefill_tokens_with_decodes": beside * unit,
        "max_num_partial_prefills": 3,
        "long_prefill_token_threshold": 3 * unit,
        "skip_tokenizer_init": True,
    }
    parallel = {"device": device, "tensor_parallel_size": tensor_parallel_size, "seed": seed}
    return LLM(model, **{**small, **parallel, **options})


def summary(soak: Soak, seconds: float) -> str:
    counts = soak.ledger.counts
    lines = [f"{name:20s}{counts[name]:>12,d}" for name in COUNTED]
    share = counts["partings"] / max(1, counts["compared"])
    rank_0 = f"{soak.mib_at_first:.0f} -> {resident_mib():.0f} MiB"
    return "\n".join([*lines, f"partings are {share:.4%} of compared tokens; {seconds:.0f} s; rank 0 took {rank_0}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    sizes = ", ".join(name.removeprefix("Qwen3-") for name in PUBLISHED_SHAPES)
    demo = str(ROOT / "assets" / "demo-qwen3")
    parser.add_argument("--model", default=demo, help=f"a folder, or, for random weights, one of {sizes}")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculative-config", type=json.loads, help='such as \'{"method": "ngram", ...}\'')
    parser.add_argument("--seed", type=int, default=0, help="of everything but the threads' timing")
    args = parser.parse_args()

    before, begin = children(), time.monotonic()
    bar = tqdm(total=round(60 * args.minutes), unit="s", mininterval=1.0, dynamic_ncols=True)

    def show(text: str) -> None:
        bar.set_postfix_str(text, refresh=False)
        bar.update(round(time.monotonic() - begin) - bar.n)

    options = {"dtype": args.dtype, "speculative_config": args.speculative_config}
    with start(args.model, args.device, args.tensor_parallel_size, args.seed, **options) as llm:
        soak = Soak(llm, args.seed, show)
        try:
            soak.run(60 * args.minutes)
        except Exception as error:
            soak.ledger.violation(f"{type(error).__name__}: {error}")
    bar.close()
    patience = time.monotonic() + 5.0
    while (left := children() - before) and time.monotonic() < patience:
        time.sleep(0.05)
    if left:
        soak.ledger.violation(f"processes are left: {sorted(left)}")
    print(summary(soak, time.monotonic() - begin))
    for violation in soak.ledger.violations[:20]:
        print(f"VIOLATION {violation}")
    print("soak: failed" if soak.ledger.violations else "soak: passed")
    return bool(soak.ledger.violations)


if __name__ == "__main__":
    sys.exit(main())
