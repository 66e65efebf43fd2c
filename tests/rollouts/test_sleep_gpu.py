"""Memory of weights and cache goes back to the driver and returns at its addresses, under captured graphs."""

import pytest
import torch

from nanovllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
PROMPTS = [list(range(start, start + 200)) for start in range(100, 900, 100)]


@pytest.mark.parametrize("size", [1, 2])
def test_memory_goes_and_returns(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_sleep": True, "max_model_len": 4096}
    with LLM("Qwen3-0.6B", tensor_parallel_size=size, num_kvcache_blocks=2048, max_num_seqs=16, **options) as llm:
        runner = llm.engine.executor.runner  # type: ignore[attr-defined]
        weights = dict(runner.model.named_parameters())

        def texts() -> list[list[int]]:
            return [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

        def addresses() -> list[int]:
            caches = [layer.cache.k.data_ptr() for layer in runner.model.attention_layers()]
            return [p.data_ptr() for p in weights.values()] + caches

        before, where, sums = texts(), addresses(), llm.checksum()
        held = sum(p.nbytes for p in weights.values())
        held += sum(2 * layer.cache.k.nbytes for layer in runner.model.attention_layers())
        for level in (1, 2):
            saved = {name: p.cpu() for name, p in weights.items()}
            free = torch.cuda.mem_get_info()[0]
            freed = llm.sleep(level=level)
            assert torch.cuda.mem_get_info()[0] - free >= 0.95 * held and freed >= 0.95 * held * size
            with pytest.raises(RuntimeError, match="asleep"):
                texts()
            llm.wake_up()
            assert addresses() == where
            if level == 2:
                if size > 1:
                    break  # the other rank's weights are gone for good
                llm.begin_update(partial=True)
                with torch.inference_mode():
                    for name, p in weights.items():
                        p.copy_(saved[name])
                llm.finish_update()
            assert llm.checksum() == sums
            assert texts() == before
