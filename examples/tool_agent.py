"""An agent loop: the model answers or calls a tool, and a tool's result goes back into the chat.

A grammar lets it write nothing but plain text or a valid call, in the format that its chat template asks for.

    python examples/tool_agent.py
"""

import json
import re
from collections.abc import Callable
from typing import Any

from nanovllm import LLM, SamplingParams, StructuredOutput

MODEL = "demo"


def get_weather(city: str) -> str:
    return json.dumps({"sky": "sunny", "degrees": 21})


def get_time(city: str) -> str:
    return json.dumps({"time": "14:30"})


FUNCTIONS: dict[str, Callable[..., str]] = {"get_weather": get_weather, "get_time": get_time}
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": ARGUMENTS}} for name in FUNCTIONS]
CALL = ARGUMENTS | {"properties": {"name": {"enum": [*FUNCTIONS]}, "arguments": ARGUMENTS}}
CALL |= {"required": ["name", "arguments"]}
GRAMMAR = rf"""start: call | /[^<]+/
call: <tool_call> "\n" %json {json.dumps(CALL)} "\n" </tool_call>
"""  # <tool_call> without quotes is a special token


def answer(llm: LLM, messages: list[dict[str, Any]], max_turns: int = 4) -> str:
    grammar = StructuredOutput(grammar=GRAMMAR)
    params = SamplingParams(temperature=0, max_tokens=128, skip_special_tokens=False, structured_outputs=grammar)
    for _ in range(max_turns):
        text = llm.chat(messages, params, tools=TOOLS, use_tqdm=False)[0].text
        messages.append({"role": "assistant", "content": text})
        if not (call := re.fullmatch(r"<tool_call>(.*)</tool_call>", text, re.DOTALL)):
            return text
        request = json.loads(call[1])
        result = FUNCTIONS[request["name"]](**request["arguments"])
        print("tool:", request, "->", result)
        messages.append({"role": "tool", "content": result})
    raise RuntimeError(f"no answer in {max_turns} turns")


if __name__ == "__main__":
    with LLM(MODEL) as engine:
        for question in ("What is the weather in Paris?", "What time is it in Rome?"):
            print(question, answer(engine, [{"role": "user", "content": question}]))
