"""Top-k over HTTP: requests that arrive together are answered in one batch.

    python examples/serve.py                 # serve on port 8000
    python examples/serve.py --load 200      # serve on a free port, send 200 requests, print latency percentiles

Expected output of the second command, on two CPU cores that also send the requests:

    200 requests, 16 at once
    215 requests/s, p50 52.3 ms, p90 130.3 ms, p99 273.7 ms
"""

from __future__ import annotations

import argparse
import asyncio
import time

import fastapi
import torch
import uvicorn

import samplex_cuda as sx

torch.manual_seed(0)
CLASSES, WIDTH = 100_000, 64
encoder = torch.nn.Linear(16, WIDTH).eval()  # your model
head = sx.SampledClassifier(WIDTH, CLASSES, sx.samplers.Uniform(CLASSES), num_samples=64).eval()
app = fastapi.FastAPI()
waiting: asyncio.Queue = asyncio.Queue()


@torch.inference_mode()
def answer(rows: list[list[float]]) -> list[dict]:
    """Top 10 of each row."""
    logits, ids = head.topk(encoder(torch.tensor(rows)), 10)
    return [{"ids": i, "logits": s} for i, s in zip(ids.tolist(), logits.tolist(), strict=True)]


async def worker() -> None:
    """Answers what is waiting, up to 64 requests at a time."""
    while True:
        batch = [await waiting.get()]
        while not waiting.empty() and len(batch) < 64:
            batch.append(waiting.get_nowait())
        found = await asyncio.to_thread(answer, [x for x, _ in batch])
        for (_, future), result in zip(batch, found, strict=True):
            future.set_result(result)


@app.post("/topk")
async def topk(x: list[float]) -> dict:
    """POST 16 numbers, get ids and logits."""
    if len(x) != 16:
        raise fastapi.HTTPException(422, f"x must have 16 numbers, got {len(x)}")
    future = asyncio.get_running_loop().create_future()
    await waiting.put((x, future))
    return await future


async def load(port: int, requests: int, at_once: int = 16) -> None:
    """Sends requests, some at a time, and prints latencies."""
    import httpx

    gate, times = asyncio.Semaphore(at_once), []

    async def one(client: httpx.AsyncClient) -> None:
        async with gate:
            start = time.perf_counter()
            reply = await client.post(f"http://127.0.0.1:{port}/topk", json=torch.randn(16).tolist(), timeout=60)
            assert len(reply.raise_for_status().json()["ids"]) == 10
            times.append(time.perf_counter() - start)

    async with httpx.AsyncClient() as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(requests)))
        total = time.perf_counter() - start
    p50, p90, p99 = (sorted(times)[min(len(times) - 1, int(len(times) * q))] * 1e3 for q in (0.5, 0.9, 0.99))
    print(f"{requests} requests, {at_once} at once")
    print(f"{requests / total:.0f} requests/s, p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")


async def main(port: int, requests: int) -> None:
    """Serves; with `requests`, only for the load test."""
    server = uvicorn.Server(uvicorn.Config(app, port=0 if requests else port, log_level="warning"))
    jobs = [asyncio.create_task(worker()), asyncio.create_task(server.serve())]
    if requests:
        while not server.started:
            await asyncio.sleep(0.05)
        await load(server.servers[0].sockets[0].getsockname()[1], requests)
        server.should_exit = True
    await jobs[1]
    jobs[0].cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load", type=int, default=0)
    args = parser.parse_args()
    asyncio.run(main(args.port, args.load))
