"""Your own HTTP server, with FastAPI and AsyncLLM. A client that disconnects aborts its request.

    pip install fastapi uvicorn
    uvicorn examples.fastapi_server:app
    curl -N localhost:8000/complete -H 'content-type: application/json' -d '{"prompt": "Once upon a time"}'
"""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from nanovllm import AsyncLLM, SamplingParams

MODEL = "demo"


class Question(BaseModel):
    prompt: str
    max_tokens: int = 32
    temperature: float = 0.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with await AsyncLLM.start(MODEL) as app.state.llm:
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/complete")
async def complete(question: Question) -> StreamingResponse:
    try:
        params = SamplingParams(max_tokens=question.max_tokens, temperature=question.temperature)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None

    async def texts() -> AsyncIterator[str]:
        async with aclosing(app.state.llm.generate(question.prompt, params)) as deltas:
            async for delta in deltas:
                yield delta.text

    return StreamingResponse(texts(), media_type="text/plain; charset=utf-8")


if __name__ == "__main__":
    from fastapi.testclient import TestClient

    with TestClient(app) as client:
        print(client.post("/complete", json={"prompt": "Once upon a time"}).text)
        print(client.post("/complete", json={"prompt": "x", "temperature": -1}).json())
