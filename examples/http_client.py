#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An HTTP client in Python, with the standard library only: streams the continuation of a prompt.

Start a fleet, then run the client:

    cargo run --release -- serve demo/pycoder-7m-q8_0.gguf
    python3 examples/http_client.py "def fibonacci(n):"

A second argument selects another server; the default is http://127.0.0.1:8080. The API is
OpenAI's, so the openai package works too, with base_url="http://127.0.0.1:8080/v1".
"""

import json
import sys
import urllib.request


def main():
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):\n"
    server = sys.argv[2] if len(sys.argv) > 2 else "http://127.0.0.1:8080"

    with urllib.request.urlopen(f"{server}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{server}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        # Server-sent events: lines "data: JSON", ended by "data: [DONE]".
        for line in response:
            event = line.decode().strip().removeprefix("data: ")
            if not event or event == "[DONE]":
                continue
            event = json.loads(event)
            for choice in event["choices"]:
                print(choice["text"], end="", flush=True)
            if event.get("usage"):
                print(f"\n[{model}, {event['usage']['completion_tokens']} tokens]")


if __name__ == "__main__":
    main()
