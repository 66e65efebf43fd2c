"""lm-evaluation-harness scores and generates with this engine.

    from lm_eval import simple_evaluate
    from nanovllm.integrations.lm_eval import NanoLM
    results = simple_evaluate(NanoLM(MODEL), tasks=["arc_easy"])

All requests of a task go to the engine at once; answers to one question compute the question once. Tested with
lm-eval 0.4.13.
"""

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanovllm.errors import refuse
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""A request for scores: the key under which its result is cached, the tokens of the context, those of the
continuation."""
Score = tuple[float, bool]
"""Log-probability of some tokens, and whether they are what greedy sampling gives."""


class NanoLM(TemplateLM):  # type: ignore[misc]
    """A model for simple_evaluate."""

    def __init__(self, model: str | LLM, max_gen_toks: int = 256, **options: Any) -> None:
        """`model`: a folder or hub id, with options of the engine; or an engine, which stays the caller's to close.
        `max_gen_toks`: most tokens of an answer where the task does not say."""
        super().__init__()
        if isinstance(model, LLM) and options:
            raise ValueError(f"options {sorted(options)}: must be given to the engine itself")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._max_gen_toks = max_gen_toks
        self.tokenizer = self.llm.tokenizer

    # -- text and tokens ----------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def max_length(self) -> int:
        """Maximum tokens of context and continuation together."""
        return self.llm.engine.book.max_total_tokens

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **options))

    # -- what tasks ask for -------------------------------------------------------------------------------------

    def _loglikelihood_tokens(self, requests: list[Scored], disable_tqdm: bool = False, **unused: Any) -> list[Score]:
        """Log-probability of each continuation, and whether it is what greedy sampling gives. Contexts that are too
        long lose their beginning."""
        prompts = [context + continuation for _, context, continuation in requests]
        scores = score_ends(self.llm, prompts, [len(end) for _, _, end in requests], use_tqdm=not disable_tqdm)
        for (key, _, _), score in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text: in windows of max_length where it is longer, each token scored once."""
        windows: list[Scored] = []
        counts = []
        for (text,) in (request.args for request in requests):
            pairs = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            own: list[Scored] = [(None, *make_disjoint_window(pair)) for pair in pairs]
            windows += own
            counts.append(len(own))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = []
        for request, count in zip(requests, counts, strict=True):
            totals.append(sum(next(scores)[0] for _ in range(count)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to one of its `until`. Contexts that leave no room lose their beginning."""
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            param = self._generation(options)
            prompts.append(self.tok_encode(context)[-(self.max_length - param.most_tokens) :])
            params.append(param)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        for request, output in zip(requests, outputs, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, output.text)
        return [output.text for output in outputs]

    def _generation(self, options: dict[str, Any]) -> SamplingParams:
        known = dict(normalize_gen_kwargs(options, default_max_gen_toks=self._max_gen_toks))
        if (max_tokens := int(known.pop("max_gen_toks"))) >= self.max_length:  # nothing of a context would be left
            refuse("max_gen_toks", max_tokens, f"below the engine's {self.max_length} tokens (max_model_len)")
        stop = [text for text in handle_stop_sequences(known.pop("until", None), eos=None) if text]
        known.pop("do_sample", None)
        return SamplingParams(max_tokens=max_tokens, stop=stop, **known)


def score_ends(llm: LLM, prompts: list[list[int]], counts: list[int], use_tqdm: bool) -> list[Score]:
    """Scores the last `count` tokens of each prompt. A prompt that is longer than the engine serves loses its
    beginning."""
    prompts = [prompt[-llm.engine.book.max_total_tokens :] for prompt in prompts]
    starts = [max(1, len(prompt) - count) for prompt, count in zip(prompts, counts, strict=True)]
    params = [SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprob_start=start) for start in starts]
    scores = []
    for output, start in zip(llm.generate(prompts, params, use_tqdm=use_tqdm), starts, strict=True):
        rows = output.prompt_logprobs
        assert rows is not None
        pairs = zip(rows[start:], output.prompt_token_ids[start:], strict=True)
        tokens = [row[token] for row, token in pairs if row is not None]
        scores.append((sum(token.logprob for token in tokens), all(token.rank == 1 for token in tokens)))
    return scores
