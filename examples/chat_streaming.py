"""Streams two chats at once. The second one is cut short, which aborts its request.

python examples/chat_streaming.py
"""

import asyncio

from nanovllm import AsyncLLM, SamplingParams

MODEL = "demo"


async def answer(llm: AsyncLLM, name: str, question: str, max_pieces: int) -> None:
    """Prints an answer piece by piece, at most `max_pieces` of them. Leaving the loop early aborts the request."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=48)
    pieces = 0
    async for delta in llm.chat([{"role": "user", "content": question}], params):
        print(f"{name}: {delta.text!r}{' ' + str(delta.finish_reason) if delta.finished else ''}")
        pieces += 1
        if pieces == max_pieces:
            print(f"{name}: enough")
            break


async def main() -> None:
    async with await AsyncLLM.start(MODEL) as llm:
        await asyncio.gather(
            answer(llm, "first", "What is the capital of France?", 1000), answer(llm, "second", "Tell me a story.", 5)
        )


if __name__ == "__main__":
    asyncio.run(main())
