#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An MCP server over standard input and output. Its argument says how its tool `add` behaves."""

import json
import os
import sys
import time


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def call(behaviour, arguments):
    """The text of a result, or None if there is none."""
    if behaviour == "dies":
        print("out of coffee", file=sys.stderr)
        sys.exit(3)
    if behaviour == "hangs":
        time.sleep(600)
    if behaviour == "floods":
        while True:
            os.write(1, b"x" * 65536)
    if behaviour == "chatters":
        while True:
            send({"method": "notifications/message", "params": {}})
    if behaviour == "long":
        return "y" * 100_000
    return str(arguments["a"] + arguments["b"])


def main():
    behaviour = sys.argv[1]
    if len(sys.argv) > 2:
        with open(sys.argv[2], "a", encoding="utf-8") as pids:
            pids.write(f"{os.getpid()}\n")
    for line in sys.stdin:
        request = json.loads(line)
        method, number = request.get("method"), request.get("id")
        if method == "initialize":
            if behaviour == "mute":
                time.sleep(600)
            # A request of the server comes before its answer.
            send({"id": "ping-1", "method": "ping"})
            info = {"name": "test", "version": "1"}
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
            send({"id": number, "result": result})
        elif method == "tools/list":
            number_type = {"type": "number"}
            schema = {"type": "object", "properties": {"a": number_type, "b": number_type}}
            tool = {"name": f"add_{behaviour}", "description": "Adds.", "inputSchema": schema}
            send({"id": number, "result": {"tools": [tool]}})
        elif method == "tools/call":
            text = call(behaviour, request["params"]["arguments"])
            send({"id": number, "result": {"content": [{"type": "text", "text": text}]}})


main()
