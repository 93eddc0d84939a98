# SPDX-License-Identifier: Apache-2.0
"""What the programs of this folder share: the fleet under test, its metrics, and a proxy that fails.

Each program gets a JSON object with the fields of `Fleet` as its only argument. It fails by an exception.
"""
import http.client
import json
import sys
import threading
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Far more than the demo model writes while a client goes away.
LONG_OUTPUT = 3500
# For what takes milliseconds on a free machine.
PATIENCE_S = 30


@dataclass(frozen=True)
class Fleet:
    url: str
    # Address of gRPC, without a scheme.
    grpc: str
    key: str
    # A key with one request a minute.
    limited_key: str
    model: str
    # OpenAI's form.
    tools: list
    # What every client gets for these prompts with temperature 0 and `max_tokens`.
    prompt: str
    completion: str
    question: str
    chat: str
    max_tokens: int
    # The executable, and the file of the model.
    executable: str
    model_file: str

    def read_metric(self, name):
        """The sum of a metric over its labels. `name` may end within the labels."""
        request = urllib.request.Request(f"{self.url}/metrics", headers={"x-api-key": self.key})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def read_fleet():
    return Fleet(**json.loads(sys.argv[1]))


def eventually(what, condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        time.sleep(0.05)


class Cancellation:
    """Checks that a stream of `LONG_OUTPUT` tokens, which its client leaves, is stopped in the worker."""

    ABORTED = 'ballast:request_success_total{model_name="chat",finished_reason="abort"}'

    def __init__(self, fleet):
        self.fleet = fleet
        self.aborted = fleet.read_metric(self.ABORTED)
        self.tokens = fleet.read_metric("ballast:generation_tokens_total")

    def check_running(self):
        assert self.fleet.read_metric("ballast:num_streams ") >= 1

    def check_stopped(self):
        eventually("the stream counts as aborted",
                   lambda: self.fleet.read_metric(self.ABORTED) > self.aborted)
        eventually("the worker is free", lambda: self.fleet.read_metric("ballast:num_requests_running") == 0)
        assert self.fleet.read_metric("ballast:num_streams ") == 0
        written = self.fleet.read_metric("ballast:generation_tokens_total") - self.tokens
        assert written < LONG_OUTPUT, f"the stream ended by itself after {written} tokens"


class _ProxyHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.arrivals.append(time.monotonic())
        if self.server.failures:
            return self._fail(self.server.failures.pop(0))
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=PATIENCE_S)
        upstream.request("POST", self.path, body, dict(self.headers))
        reply = upstream.getresponse()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        while piece := reply.read1(65536):
            self.wfile.write(piece)
        upstream.close()

    def _fail(self, status):
        """The router's own answer with this status."""
        code = {429: "rate_limit_exceeded", 503: "overloaded"}[status]
        error = {"message": "come back later", "type": "server_error", "param": None, "code": code}
        body = json.dumps({"error": error}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.send_header("retry-after", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def failing_proxy(fleet, failures):
    """A proxy in front of the fleet that answers the first requests with these status codes.

    Gives its URL and the list of the times at which requests arrived.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _ProxyHandler)
    server.daemon_threads = True
    server.upstream = urllib.parse.urlsplit(fleet.url).netloc
    server.failures = list(failures)
    server.arrivals = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.arrivals
    finally:
        server.shutdown()
        server.server_close()


def check_retries(arrivals, count):
    """`count` requests arrived, each after the time that `Retry-After` named."""
    assert len(arrivals) == count, arrivals
    pauses = [later - earlier for earlier, later in zip(arrivals, arrivals[1:])]
    assert all(0.9 <= pause < 10 for pause in pauses), pauses


@contextmanager
def raises(error_type, **fields):
    """The block raises this exception, whose attributes have these values."""
    try:
        yield
    except error_type as error:
        for name, value in fields.items():
            assert getattr(error, name) == value, f"{name} of {error!r}: {getattr(error, name)!r}"
    else:
        raise AssertionError(f"no {error_type.__name__}")
