#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Streams the continuation of a prompt, with asyncio.

Start a fleet, install the client, then run it:

    cargo run --release -- serve demo/pycoder-7m-q8_0.gguf
    pip install ./clients/python
    python3 clients/python/examples/stream.py "def fibonacci(n):"

A second argument selects another server; the default is http://127.0.0.1:8080. BALLAST_API_KEY may
hold an API key.
"""

import asyncio
import os
import sys

from ballast_client import AsyncClient, BallastError, Delta, Finished, GenerateRequest, Sampling, Started


async def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):\n"
    server = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8080"
    request = GenerateRequest(prompt, max_tokens=64, sampling=Sampling(temperature=0.8, seed=7))

    async with AsyncClient(server, api_key=os.environ.get("BALLAST_API_KEY"), timeout_s=60) as client:
        async with client.generate(request) as stream:
            async for event in stream:
                match event:
                    case Started():
                        print(f"[{event.model}, {len(event.prompt_tokens)} prompt tokens]", file=sys.stderr)
                    case Delta():
                        print(event.text, end="", flush=True)
                    case Finished():
                        usage = event.usage
                        print(f"\n[{usage.completion_tokens} tokens, {event.reason.value}]", file=sys.stderr)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except BallastError as error:
        sys.exit(f"{type(error).__name__}: {error}")
