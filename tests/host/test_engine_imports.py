"""Imports of an engine's process."""

from programs import run

PROGRAM = """
import sys
from nanovllm.engine.step import Step
from nanovllm.engine.prompt import Prompt
from nanovllm.host import wire
from nanovllm.host.program import run

class Intake:
    frames = [
        wire.Start("assets/demo-qwen3", {"device": "cpu", "num_kvcache_blocks": 64}),
        wire.Add.of(0, Prompt([5, 6, 7]), {"max_tokens": 3, "bad_words": ["red"]}),
        wire.Add.of(1, Prompt([5, 6, 7]), {"max_tokens": 3, "stop": ["zzz"], "logprobs": 1}),
    ]
    done = 0

    def next(self, seconds):
        if self.done == 2:
            raise EOFError
        return self.frames.pop(0) if self.frames else None

    def wake(self):
        pass

def say(frame):
    assert not isinstance(frame, (wire.Refused, wire.Failed)), frame
    if isinstance(frame, Step):
        Intake.done += len(frame.done)

code = run(say, Intake())
print(code, Intake.done, [name for name in ("transformers", "ray", "llguidance") if name in sys.modules])
"""


def test_an_engine_imports_no_transformers_for_its_tokenizer() -> None:
    assert run("-c", PROGRAM) == "0 2 []\n"
