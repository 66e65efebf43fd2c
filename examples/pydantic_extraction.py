"""Extracts a pydantic object from a text: the output always validates. The demo model is too small to fill it well.

python examples/pydantic_extraction.py
"""

from typing import Literal

from pydantic import BaseModel, Field

from nanovllm import LLM, SamplingParams, StructuredOutput

MODEL = "demo"
TEXT = "Ada Lovelace, born 1815 in London, wrote the first program."


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=40)
    born: int = Field(ge=1000, le=2999)
    field: Literal["mathematics", "physics", "music"]


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=128, structured_outputs=StructuredOutput(json=Person))
    with LLM(MODEL) as llm:
        (output,) = llm.chat([{"role": "user", "content": f"Who is it? Answer as JSON. {TEXT}"}], params)
    print(repr(Person.model_validate_json(output.text)))


if __name__ == "__main__":
    main()
