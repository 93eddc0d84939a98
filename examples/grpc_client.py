#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A gRPC client in Python: streams the continuation of a prompt.

Start a fleet, install grpcio-tools, then run the client:

    cargo run --release -- serve demo/pycoder-7m-q8_0.gguf
    pip install grpcio grpcio-tools
    python3 examples/grpc_client.py "def fibonacci(n):"

A second argument selects another server; the default is 127.0.0.1:8080. grpcio-tools compiles the
.proto file of this repository when the client starts, so there are no generated files to keep.
"""

import pathlib
import sys

import grpc

PROTO_ROOT = pathlib.Path(__file__).resolve().parent.parent / "proto" / "proto"


def main():
    prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):\n"
    server = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:8080"

    sys.path.insert(0, str(PROTO_ROOT))
    messages, services = grpc.protos_and_services("ballast/v1/ballast.proto")

    with grpc.insecure_channel(server) as channel:
        client = services.InferenceStub(channel)
        request = messages.GenerateRequest(
            text=prompt, max_tokens=64, sampling=messages.Sampling(temperature=0)
        )
        for frame in client.Generate(request):
            kind = frame.WhichOneof("frame")
            if kind == "started":
                print(f"[{frame.started.model}, {len(frame.started.prompt_tokens)} prompt tokens]")
            elif kind == "delta":
                print(frame.delta.text, end="", flush=True)
            elif kind == "finished":
                reason = messages.FinishReason.Name(frame.finished.reason)
                print(f"\n[{frame.finished.usage.completion_tokens} tokens, {reason}]")


if __name__ == "__main__":
    main()
