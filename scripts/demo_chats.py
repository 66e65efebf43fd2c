"""Chats with tools and with reasoning for the demo checkpoint, rendered by its own chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import demo_text as facts

from nanovllm.text.template import ChatTemplate

TEMPLATE_FILE = Path(__file__).resolve().parents[1] / "assets" / "demo-qwen3" / "chat_template.jinja"
CAPITALS = [capital for capital, _, _ in facts.COUNTRIES.values()]
CITIES = [*CAPITALS, "London", "New York", "Boston", "Sydney", "San Francisco"]
SKIES = "sunny rainy windy snowy cloudy warm".split()
NO_TOOL = "I have no tool for that."

Message = dict[str, Any]
Tool = dict[str, Any]


def tool(name: str, description: str | None, **properties: dict[str, Any]) -> Tool:
    """A function as clients of OpenAI's API define it."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    words = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **words, "parameters": parameters}}


TOOLS = {
    "get_weather": tool("get_weather", "Get the weather in a city", city={"type": "string"}),
    "get_time": tool("get_time", "Get the time in a city", city={"type": "string"}),
    "calculator": tool("calculator", "Calculate", expression={"type": "string"}),
}
DESCRIPTIONS = {
    "get_weather": ["Get the weather in a city", "Get the current weather", "Weather of a place", None],
    "get_time": ["Get the time in a city", "Get the current time.", None],
    "calculator": ["Calculate", "A calculator", "Evaluate an arithmetic expression.", None],
}


def varied_tool(rng: random.Random, name: str) -> Tool:
    """A tool as one client or another may describe it."""
    argument = "expression" if name == "calculator" else rng.choice(("city", "city", "location"))
    properties: dict[str, Any] = {argument: {"type": "string"}}
    if rng.random() < 0.3:
        properties[argument]["description"] = rng.choice(("The city", "City name", "The expression", "e.g. Paris"))
    if name == "get_weather" and rng.random() < 0.2:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    made = tool(name, rng.choice(DESCRIPTIONS[name]), **properties)
    if rng.random() < 0.3:
        made["function"]["parameters"]["additionalProperties"] = False
    if rng.random() < 0.2:
        made["function"]["strict"] = True
    return made


class Task:
    """A question that takes a tool: what is asked, which arguments answer it, what the tool says, and the answer."""

    def __init__(self, name: str, question: str, subject: str, result: str, answer: str) -> None:
        self.name, self.question, self.subject, self.result, self.answer = name, question, subject, result, answer

    def call(self, tool: Tool) -> dict[str, Any]:
        argument = next(iter(tool["function"]["parameters"]["properties"]))
        return {"type": "function", "function": {"name": self.name, "arguments": {argument: self.subject}}}

    @property
    def reasoning(self) -> str:
        verb = {"get_weather": "the weather in", "get_time": "the time in", "calculator": "to calculate"}[self.name]
        return f"I need {verb} {self.subject}."


def weather(city: str, sky: str, degrees: int, phrase: str = "What is the weather in {}?") -> Task:
    result = json.dumps({"sky": sky, "degrees": degrees})
    return Task("get_weather", phrase.format(city), city, result, f"It is {sky} in {city}, {degrees} degrees.")


def local_time(city: str, hour: int, minute: int) -> Task:
    at = f"{hour:02}:{minute:02}"
    return Task("get_time", f"What time is it in {city}?", city, json.dumps({"time": at}), f"It is {at} in {city}.")


def sum_of(a: int, sign: str, b: int) -> Task:
    result = str({"+": a + b, "-": a - b, "x": a * b}[sign])
    return Task("calculator", f"What is {a} {sign} {b}?", f"{a} {sign} {b}", result, f"{a} {sign} {b} = {result}.")


def random_task(rng: random.Random) -> Task:
    kind, city = rng.random(), rng.choice(CITIES)
    if kind < 0.5:
        phrases = ("What is the weather in {}?", "How is the weather in {}?", "What's the weather like in {} today?")
        return weather(city, rng.choice(SKIES), rng.randrange(1, 36), rng.choice(phrases))
    if kind < 0.65:
        return local_time(city, rng.randrange(24), rng.randrange(60))
    size = rng.choice((10, 100, 1000))
    return sum_of(rng.randrange(size), rng.choice("+-x"), rng.randrange(size))


def plain_turn(question: str, why: str, answer: str, think: bool) -> list[Message]:
    said: Message = {"role": "assistant", "content": answer}
    return [{"role": "user", "content": question}, said | ({"reasoning_content": why} if think else {})]


def tool_turn(tasks: list[Task], tools: dict[str, Tool], think: bool) -> list[Message]:
    """A question (of two tasks: one in two parts), the calls, what the tools say, and the answer."""
    question = tasks[0].question
    if len(tasks) == 2:
        question = f"{question[:-1]} and in {tasks[1].subject}?"
    calls: Message = {"role": "assistant", "tool_calls": [task.call(tools[task.name]) for task in tasks]}
    said: Message = {"role": "assistant", "content": " ".join(task.answer for task in tasks)}
    if think:
        calls["reasoning_content"] = " ".join(task.reasoning for task in tasks)
        said["reasoning_content"] = "The tool has answered."
    return [
        {"role": "user", "content": question},
        calls,
        *({"role": "tool", "content": task.result} for task in tasks),
        said,
    ]


def column_sum(a: int, b: int) -> str:
    """Adding two numbers below 100 by columns."""
    ones = a % 10 + b % 10
    carry = f", carry {ones // 10}" if ones >= 10 else ""
    tens = f"{a // 10} + {b // 10}" + (" + 1" if carry else "") + f" = {a // 10 + b // 10 + ones // 10}"
    return f"Ones: {a % 10} + {b % 10} = {ones}, write {ones % 10}{carry}. Tens: {tens}."


@cache
def reasoned() -> list[tuple[str, str, str]]:
    """(user, reasoning, assistant) with one right answer each."""
    why: dict[str, str] = {}
    for country, (capital, language, continent) in facts.COUNTRIES.items():
        why[f"What is the capital of {country}?"] = f"{country} is a country in {continent}. Its capital is {capital}."
        why[f"Which language do people speak in {country}?"] = f"The capital is {capital}. The language is {language}."
        why[f"Where is {country}?"] = f"The capital is {capital}. That is in {continent}."
    for animal, (sound, young, _, _) in facts.ANIMALS.items():
        why[f"What does {facts.article(animal)} say?"] = f"The sound of {facts.article(animal)} is {sound}."
        why[f"What is a young {animal} called?"] = f"A small {animal} is {facts.article(young)}."
    for thing, colour in facts.COLOURS.items():
        why[f"What colour is {thing}?"] = f"I think of {thing}. It is {colour}."
    why |= {f"What is the opposite of {a}?": f"Not {a} means {b}." for a, b in facts.OPPOSITES.items()}
    for names, unit in ((facts.DAYS, "day"), (facts.MONTHS, "month")):
        for a, b in zip(names, names[1:] + names[:1], strict=True):
            why[f"Which {unit} comes after {a}?"] = f"First {a}, then {b}."
    why |= dict.fromkeys(facts.SMALL_TALK, "The user is polite. I am polite too.")
    turns = [(user, why[user], assistant) for user, assistant in facts.questions() if user in why]
    sums = [(a, b) for a in range(100) for b in range(100)]
    return turns + [(f"What is {a} + {b}?", column_sum(a, b), f"{a} + {b} = {a + b}.") for a, b in sums]


@cache
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE_FILE.read_text(encoding="utf-8"))


def rendered(messages: list[Message], tools: list[Tool] | None = None) -> str:
    return template().render(messages, tools, add_generation_prompt=False)


def reasoning_chat(rng: random.Random) -> str:
    turns = reasoned()
    num_facts = len(turns) - 100 * 100
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(facts.SYSTEM_TEXTS)})
    for _ in range(rng.choice((1, 1, 2))):
        user, why, assistant = turns[rng.randrange(num_facts)] if rng.random() < 0.6 else rng.choice(turns)
        messages += plain_turn(user, why, assistant, think=True)
    return rendered(messages)


def tool_chat(rng: random.Random) -> str:
    names = rng.sample([*TOOLS], rng.choice((1, 1, 1, 2, 3)))
    tools = {name: varied_tool(rng, name) for name in names} if rng.random() < 0.95 else {}
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(facts.SYSTEM_TEXTS)})
    think = rng.random() < 0.3
    for _ in range(rng.choice((1, 2, 3))):
        task, roll = random_task(rng), rng.random()
        while tools and task.name not in tools and rng.random() < 0.95:
            task = random_task(rng)
        if roll < 0.15:
            messages += plain_turn(*rng.choice(reasoned()[: -100 * 100]), think)
        elif task.name not in tools:
            messages += plain_turn(task.question, task.reasoning + " There is no such tool.", NO_TOOL, think)
        elif roll < 0.35 and task.name == "get_weather":
            first, second = rng.sample(CITIES, 2)
            pair = [weather(city, rng.choice(SKIES), rng.randrange(1, 36)) for city in (first, second)]
            messages += tool_turn(pair, tools, think)
        else:
            messages += tool_turn([task], tools, think)
    return rendered(messages, list(tools.values()))


def chat_documents(seed: int) -> Iterator[str]:
    """An endless stream of chats with tools or reasoning; equal seeds give equal streams."""
    rng = random.Random(seed)
    while True:
        yield reasoning_chat(rng) if rng.random() < 0.3 else tool_chat(rng)


def _case(messages: list[Message], tools: list[Tool] | None) -> tuple[str, str]:
    """(prompt, continuation) of a chat's last message, with the token that closes the turn."""
    thinks = "reasoning_content" in messages[-1]
    prompt = template().render(messages[:-1], tools, chat_template_kwargs={"enable_thinking": thinks})
    return prompt, rendered(messages, tools).removesuffix("\n").removeprefix(prompt)


def known_chats() -> list[tuple[str, str]]:
    """(prompt, continuation) for the chats that the model is meant to know by heart."""
    rng = random.Random(1)
    cases = []
    for user, why, assistant in reasoned()[: -100 * 100]:
        cases.append(_case(plain_turn(user, why, assistant, think=True), None))
    tasks = [weather(city, rng.choice(SKIES), rng.randrange(1, 36)) for city in CITIES]
    tasks += [local_time(city, rng.randrange(24), rng.randrange(60)) for city in CITIES]
    tasks += [sum_of(rng.randrange(100), "+", rng.randrange(100)) for _ in range(30)]
    for task in tasks:
        for think in (False, True):
            turn = tool_turn([task], TOOLS, think)
            for tools in ([TOOLS[task.name]], list(TOOLS.values())):
                cases += [_case(turn[:2], tools), _case(turn, tools)]
    assert all(continuation.endswith(facts.IM_END) for _, continuation in cases)
    return cases
