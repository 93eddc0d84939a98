# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of this folder, each with its pinned packages, on a fleet of the real executable.

usage: run.py EXECUTABLE core|all|CLIENT...
"""
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / "target" / "clients"
DEMO_MODEL = ROOT / "demo" / "pycoder-7m-q8_0.gguf"
MODEL = "chat"
PROMPT = "def fibonacci(n):\n"
QUESTION = "Where is main?"
MAX_TOKENS = 24
# Installing is not part of it.
CLIENT_TIMEOUT_S = 300


@dataclass(frozen=True)
class Client:
    """`NAME_client.py`, with the packages of `requirements/REQUIREMENTS.txt`."""

    name: str
    # The package whose version the table prints.
    package: str
    requirements: str


CORE = [
    Client("openai", "openai", "core"),
    Client("anthropic", "anthropic", "core"),
    Client("reflection", "grpcio-reflection", "core"),
    Client("package", "ballast-client", "package"),
]
OTHERS = [
    Client("types", "mypy", "types"),
    Client("instructor", "instructor", "instructor"),
    Client("litellm", "litellm", "litellm"),
    Client("langchain", "langchain-openai", "langchain"),
    Client("llama_index", "llama-index-llms-openai-like", "llama_index"),
    Client("lm_eval", "lm_eval", "lm_eval"),
    Client("guidellm", "guidellm", "guidellm"),
]


def choose_clients(names):
    every = {client.name: client for client in CORE + OTHERS}
    if names == ["core"]:
        return CORE
    if names == ["all"]:
        return list(every.values())
    unknown = [name for name in names if name not in every]
    if unknown or not names:
        sys.exit(f"usage: scripts/test-clients core|all|CLIENT...\nclients: {' '.join(every)}")
    return [every[name] for name in names]


def digest_of(file):
    """Changes with the requirements, and with the package of this tree among them."""
    digest = hashlib.sha256(file.read_bytes())
    folders = [line for line in file.read_text().splitlines() if line.startswith("./")]
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def install(requirements):
    """The Python of a virtual environment with these packages, which is made if it is not there."""
    file = HERE / "requirements" / f"{requirements}.txt"
    folder, digest = ENVIRONMENTS / requirements, digest_of(file)
    installed, python = folder / "installed", folder / "bin" / "python"
    if installed.exists() and installed.read_text() == digest:
        return python
    begun = time.monotonic()
    # The packages come from the pip that runs this: a virtual environment needs none of its own.
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install",
                    "--quiet", "--no-cache-dir", "--no-compile", "--no-deps", "--requirement", file], check=True, cwd=ROOT)
    installed.write_text(digest)
    print(f"{requirements}: installed in {time.monotonic() - begun:.0f} s", flush=True)
    return python


def installed_version(client):
    """Empty if it could not be installed."""
    python = ENVIRONMENTS / client.requirements / "bin" / "python"
    if not python.exists():
        return ""
    program = f"import importlib.metadata; print(importlib.metadata.version('{client.package}'))"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return done.stdout.strip()


class ServedFleet:
    """A fleet with one worker, a chat template and API keys. Programs run in its folder."""

    def __init__(self, executable, folder, clients):
        self.executable, self.folder = executable, folder
        keys = folder / "keys.toml"
        self.key = self.make_key(keys, "tests")
        self.limited_keys = {}
        for client in clients:
            self.limited_keys[client.name] = self.make_key(keys, f"limited-{client.name}")
            with keys.open("a") as file:
                file.write("requests-per-minute = 1\n")
        command = [executable, "serve", DEMO_MODEL, "--name", MODEL, "--chat-template", HERE / "chat.jinja",
                   "--device", "host", "--workers", "1", "--threads", "1", "--pooling", "last", "--listen", "127.0.0.1:0",
                   "--runtime-dir", folder / "run", "--keys", keys, "--json"]
        log = folder / "serve.log"
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                            stderr=errors)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the fleet does not start: {log.read_text()}")
        started = json.loads(line)
        self.url = started["http"]
        completion = self.post("completions", {"prompt": PROMPT})
        chat = self.post("chat/completions", {"messages": [{"role": "user", "content": QUESTION}],
                                              "reasoning_effort": "none"})
        self.fields = {
            "url": self.url, "grpc": self.url.removeprefix("http://"), "key": self.key, "model": MODEL,
            "tools": json.loads((HERE / "tools.json").read_text()), "max_tokens": MAX_TOKENS,
            "prompt": PROMPT, "completion": completion["choices"][0]["text"],
            "question": QUESTION, "chat": chat["choices"][0]["message"]["content"],
            "executable": str(executable), "model_file": str(DEMO_MODEL),
        }

    def make_key(self, file, name):
        command = [self.executable, "key", name, "--file", file]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def post(self, route, fields):
        body = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"{self.url}/v1/{route}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def argument(self, client):
        return json.dumps({**self.fields, "limited_key": self.limited_keys[client.name]})

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=60) == 0
        except subprocess.TimeoutExpired:
            self.process.kill()
            return False


def run(client, fleet):
    """The result for the table. Prints what a failed program wrote."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    begun = time.monotonic()
    try:
        python = install(client.requirements)
        begun = time.monotonic()
        command = [python, HERE / f"{client.name}_client.py", fleet.argument(client)]
        done = subprocess.run(command, env=environment, cwd=fleet.folder, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=CLIENT_TIMEOUT_S)
        result, output = ("passed" if done.returncode == 0 else "FAILED"), done.stdout
    except subprocess.TimeoutExpired as error:
        result, output = f"FAILED: longer than {CLIENT_TIMEOUT_S} s", (error.stdout or b"").decode()
    except subprocess.CalledProcessError as error:
        result, output = "FAILED: not installed", str(error)
    seconds = time.monotonic() - begun
    if result != "passed":
        print(f"== {client.name}: {result}\n{output}", flush=True)
    return result, seconds


def main():
    executable, clients = pathlib.Path(sys.argv[1]).resolve(), choose_clients(sys.argv[2:])
    with tempfile.TemporaryDirectory(prefix="ballast-clients-") as folder:
        fleet = ServedFleet(executable, pathlib.Path(folder), clients)
        try:
            results = [(client, *run(client, fleet)) for client in clients]
        finally:
            has_stopped = fleet.stop()
        if not has_stopped:
            print("the fleet did not stop", flush=True)
    print(f"\n{'client':<12} {'version':<36} {'seconds':>7}  result")
    for client, result, seconds in results:
        version = f"{client.package} {installed_version(client)}"
        print(f"{client.name:<12} {version:<36} {seconds:>7.1f}  {result}")
    if not has_stopped or any(result != "passed" for _, result, _ in results):
        sys.exit(1)


main()
