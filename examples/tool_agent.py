"""An agent's loop: the model says which tool it wants, held to by a JSON schema; its result goes back into the chat.

python examples/tool_agent.py
"""

import json
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutput

MODEL = "demo"
TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
STEP = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"tool": {"enum": [*TOOLS]}, "a": NUMBER, "b": NUMBER},
            "required": ["tool", "a", "b"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 40}},
            "required": ["answer"],
            "additionalProperties": False,
        },
    ]
}


def run(llm: LLM, question: str, most_steps: int = 4) -> str:
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": f"Answer, or call a tool of {[*TOOLS]}. JSON only."},
        {"role": "user", "content": question},
    ]
    params = SamplingParams(temperature=0, max_tokens=96, structured_outputs=StructuredOutput(json=STEP))
    for _ in range(most_steps):
        text = llm.chat(chat, params, use_tqdm=False)[0].text
        step = json.loads(text)
        print("model:", step)
        if "answer" in step:
            return str(step["answer"])
        result = TOOLS[step["tool"]](step["a"], step["b"])
        print("tool:", result)
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f"The tool says {result}."}]
    return f"no answer in {most_steps} steps"


if __name__ == "__main__":
    with LLM(MODEL) as engine:
        print(run(engine, "What is 12 times 7?"))
