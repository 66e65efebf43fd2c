"""lighteval scores and generates with this engine.

    lighteval custom MODEL "$(python -c 'import nanovllm.integrations.lighteval as m; print(m.__file__)')" TASKS

or, with options of the engine, `Pipeline(..., model=NanoModel.start(MODEL, max_model_len=4096))`. All requests of a
task go to the engine at once; answers to one question compute the question once. Results are not kept between runs.
Tested with lighteval 0.13.0.
"""

from types import SimpleNamespace
from typing import Any, cast

from lighteval.models.abstract_model import LightevalModel
from lighteval.models.custom.custom_model import CustomModelConfig
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.prompt_manager import PromptManager
from lighteval.tasks.requests import Doc

from nanovllm.integrations.scoring import Score, score_ends
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

_DEFAULT_TOKENS = 256
"""Of an answer, where neither the task nor the generation parameters say."""


class NanoModel(LightevalModel):  # type: ignore[misc]
    """lighteval's custom model."""

    is_async = False

    def __init__(self, config: CustomModelConfig, llm: LLM | None = None) -> None:
        """`config`: its model_name is started, where no `llm` is given, which stays the caller's to close."""
        self.config = config
        self._owns_engine = llm is None
        self.llm = LLM(config.model_name) if llm is None else llm
        has_template = self.tokenizer.chat_template is not None
        self._prompts = PromptManager(has_template, self.tokenizer, config.system_prompt)
        self._cache = SimpleNamespace(_init_registry=lambda registry: None)

    @classmethod
    def start(cls, model: str | LLM, *, system_prompt: str | None = None, generation_parameters: Any = None,
              **options: Any) -> "NanoModel":  # fmt: skip
        """`model`: a folder or hub id, with options of the engine; or an engine."""
        name = str(model.config.model) if isinstance(model, LLM) else model
        known = {"system_prompt": system_prompt, "generation_parameters": generation_parameters}
        given = {key: value for key, value in known.items() if value is not None}
        config = CustomModelConfig(model_name=name, model_definition_file_path=__file__, **given)
        if isinstance(model, LLM):
            if options:
                raise ValueError(f"options {sorted(options)}: must be given to the engine itself")
            return cls(config, model)
        found = cls(config, LLM(model, **options))
        found._owns_engine = True
        return found

    def cleanup(self) -> None:
        """Closes the engine, where it was started here."""
        if self._owns_engine:
            self.llm.close()

    # -- text and tokens ----------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    @property
    def add_special_tokens(self) -> bool:
        return not self._prompts.use_chat_template  # a template writes them itself

    @property
    def max_length(self) -> int:
        """Most tokens of context and continuation together."""
        return self.llm.engine.max_total_tokens

    def _context(self, doc: Doc) -> str:
        return cast(str, self._prompts.prepare_prompt(doc))

    # -- what tasks ask for -------------------------------------------------------------------------------------

    def greedy_until(self, docs: list[Doc]) -> list[ModelResponse]:
        """The answers to each document, as its task and the generation parameters want them. Contexts that leave no
        room lose their beginning."""
        contexts = [self._context(doc) for doc in docs]
        params = [self._generation(doc) for doc in docs]
        prompts = [
            self.tok_encode(context)[-(self.max_length - param.most_tokens) :]
            for context, param in zip(contexts, params, strict=True)
        ]
        outputs = self.llm.generate(prompts, params, use_tqdm=not self.disable_tqdm)
        return [
            ModelResponse(
                input=context, input_tokens=output.prompt_token_ids,
                text=[completion.text for completion in output.outputs],
                output_tokens=[completion.token_ids for completion in output.outputs],
            )
            for context, output in zip(contexts, outputs, strict=True)
        ]  # fmt: skip

    def _generation(self, doc: Doc) -> SamplingParams:
        options = self.config.generation_parameters.to_vllm_dict()
        wanted = options.pop("max_tokens", None) or doc.generation_size or _DEFAULT_TOKENS
        stop = [*(options.pop("stop", None) or ())]
        if not self._prompts.use_chat_template:
            stop += [text for text in doc.stop_sequences or () if text]
        most = min(int(wanted), self.max_length - 1)
        return SamplingParams(n=doc.num_samples, max_tokens=most, stop=stop, **options)

    def loglikelihood(self, docs: list[Doc]) -> list[ModelResponse]:
        """Of each document's choices, the log-probability and whether it is what greedy sampling gives. Contexts that
        are too long lose their beginning."""
        contexts = [self._context(doc) for doc in docs]
        pairs = [self.tok_encode_pair(context, doc.choices) for context, doc in zip(contexts, docs, strict=True)]
        flat = [pair for choices in pairs for pair in zip(*choices, strict=True)]
        scored = iter(self._scores([before + choice for before, choice in flat], [len(choice) for _, choice in flat]))
        found = []
        for context, (before, choices) in zip(contexts, pairs, strict=True):
            own = [next(scored) for _ in choices]
            found.append(
                ModelResponse(
                    input=context, input_tokens=before, output_tokens=choices,
                    logprobs=[value for value, _ in own], argmax_logits_eq_gold=[greedy for _, greedy in own],
                )
            )  # fmt: skip
        return found

    def loglikelihood_rolling(self, docs: list[Doc]) -> list[ModelResponse]:
        """Log-probability of each document's text: in windows of max_length where it is longer, each token scored once,
        the first of a window behind the token before it, that of the text behind the beginning of a text."""
        contexts, windows, counts = [self._context(doc) for doc in docs], [], []
        first = self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id
        for context in contexts:
            ids = [first, *self.tok_encode(context, add_special_tokens=False)]
            starts = range(0, max(1, len(ids) - 1), self.max_length - 1)
            windows += [ids[start : start + self.max_length] for start in starts]
            counts.append(len(starts))
        scored = iter(self._scores(windows, [len(window) - 1 for window in windows]))
        found = []
        for context, count in zip(contexts, counts, strict=True):
            own = [next(scored) for _ in range(count)]
            total, greedy = sum(value for value, _ in own), all(greedy for _, greedy in own)
            found.append(ModelResponse(input=context, logprobs=[total], argmax_logits_eq_gold=[greedy]))
        return found

    def _scores(self, prompts: list[list[int]], counts: list[int]) -> list[Score]:
        return score_ends(self.llm, prompts, counts, use_tqdm=not self.disable_tqdm)
