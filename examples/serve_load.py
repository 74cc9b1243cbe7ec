"""A load test of examples/serve.py on loopback: requests per second and latency percentiles.

    python examples/serve_load.py --requests 200

Expected output on two CPU cores that also send the requests:

    200 requests, 16 at once
    215 requests/s, p50 52.3 ms, p90 130.3 ms, p99 273.7 ms
"""

from __future__ import annotations

import argparse
import asyncio
import time

import httpx
import serve
import torch
import uvicorn


async def load(port: int, requests: int, at_once: int) -> None:
    """Sends requests, some at a time, and prints latencies."""
    gate, times = asyncio.Semaphore(at_once), []

    async def one(client: httpx.AsyncClient) -> None:
        async with gate:
            start = time.perf_counter()
            x = torch.randn(serve.INPUTS).tolist()
            reply = await client.post(f"http://127.0.0.1:{port}/topk", json=x, timeout=60)
            assert len(reply.raise_for_status().json()["ids"]) == 10
            times.append(time.perf_counter() - start)

    async with httpx.AsyncClient() as client:
        start = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(requests)))
        total = time.perf_counter() - start
    p50, p90, p99 = (sorted(times)[min(len(times) - 1, int(len(times) * q))] * 1e3 for q in (0.5, 0.9, 0.99))
    print(f"{requests} requests, {at_once} at once")
    print(f"{requests / total:.0f} requests/s, p50 {p50:.1f} ms, p90 {p90:.1f} ms, p99 {p99:.1f} ms")


async def main(requests: int, at_once: int) -> None:
    """Serves on a free port for as long as the load test takes."""
    server = uvicorn.Server(uvicorn.Config(serve.app, port=0, log_level="warning"))
    job = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.05)
    await load(server.servers[0].sockets[0].getsockname()[1], requests, at_once)
    server.should_exit = True
    await job


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    args = parser.parse_args()
    asyncio.run(main(args.requests, args.at_once))
