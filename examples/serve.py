"""Top-k over HTTP: requests that arrive together are answered in one batch. examples/serve_load.py measures it.

    python examples/serve.py
    curl localhost:8000/topk -H 'content-type: application/json' -d '[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]'

Expected output of the second command, as one line:

    {"ids":[36962,41256,78028,68795,91372,64214,16740,95429,13452,47637],
    "logits":[10.834,10.098,10.042,9.457,9.259,9.23,9.02,8.955,8.924,8.851]}
"""

import asyncio

import fastapi
import torch
import uvicorn

import samplex_cuda as sx

torch.manual_seed(0)
CLASSES, INPUTS, WIDTH = 100_000, 16, 64
encoder = torch.nn.Linear(INPUTS, WIDTH).eval()  # your model
head = sx.SampledClassifier(WIDTH, CLASSES, sx.samplers.Uniform(CLASSES), num_samples=64).eval()
app = fastapi.FastAPI()
waiting: list = []
busy = asyncio.Lock()


@torch.inference_mode()
def answer(rows: list[list[float]]) -> list[dict]:
    """Top 10 of each row."""
    logits, ids = head.topk(encoder(torch.tensor(rows)), 10)
    return [{"ids": i, "logits": [round(x, 3) for x in s]} for i, s in zip(ids.tolist(), logits.tolist(), strict=True)]


@app.post("/topk")
async def topk(x: list[float]) -> dict:
    """POST 16 numbers, get ids and logits."""
    if len(x) != INPUTS:
        raise fastapi.HTTPException(422, f"x must have {INPUTS} numbers, got {len(x)}")
    mine = asyncio.get_running_loop().create_future()
    waiting.append((x, mine))
    async with busy:  # in the order of arrival; whoever holds it answers for all who wait
        if not mine.done():
            batch, waiting[:] = waiting[:64], waiting[64:]
            found = await asyncio.to_thread(answer, [numbers for numbers, _ in batch])
            for (_, future), result in zip(batch, found, strict=True):
                future.set_result(result)
    return await mine


if __name__ == "__main__":
    uvicorn.run(app, log_level="warning")
