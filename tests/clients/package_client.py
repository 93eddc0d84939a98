# SPDX-License-Identifier: Apache-2.0
"""The package of clients/python, installed: texts, events, deadlines, cancellation, errors, and its example."""
import asyncio
import dataclasses
import json
import pathlib
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import ballast_client as ballast
import grpc
from ballast_client import AsyncClient, Client, GenerateRequest, Sampling
from ballast_client._generated import ballast_pb2, ballast_pb2_grpc

from common import LONG_OUTPUT, Cancellation, raises, read_fleet

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "clients" / "python" / "examples" / "stream.py"

fleet = read_fleet()
greedy = Sampling(temperature=0)
short = GenerateRequest(fleet.prompt, max_tokens=fleet.max_tokens, sampling=greedy)
long = dataclasses.replace(short, max_tokens=LONG_OUTPUT, ignore_eos=True)
drawn = dataclasses.replace(short, sampling=Sampling(temperature=0.8, seed=7), n=2, top_logprobs=1)


def post(path, **fields):
    body = json.dumps({"model": fleet.model, **fields}).encode()
    headers = {"content-type": "application/json", "x-api-key": fleet.key}
    with urllib.request.urlopen(urllib.request.Request(f"{fleet.url}{path}", body, headers)) as reply:
        return json.load(reply)


def complete_over_http(**fields):
    return post("/v1/completions", prompt=fleet.prompt, **fields)


def check_fields():
    """No parameter of the .proto file is missing."""
    for own, wire in ((Sampling, ballast_pb2.Sampling), (ballast.Usage, ballast_pb2.Usage)):
        assert {field.name for field in dataclasses.fields(own)} == set(wire.DESCRIPTOR.fields_by_name)
    given = {field.name for field in dataclasses.fields(GenerateRequest)} - {"prompt"}
    # The deadline is the call's; the others are the prompt.
    given |= {"deadline_ms", "text", "tokens", "chat"}
    assert given == set(ballast_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
    for own, wire in ((ballast.EmbeddingRequest, ballast_pb2.EmbedRequest), (ballast.RerankRequest, ballast_pb2.RerankRequest)):
        given = {field.name for field in dataclasses.fields(own)} | {"deadline_ms"}
        assert {"no_" * (name == "normalize") + name for name in given} == set(wire.DESCRIPTOR.fields_by_name)


def check_texts(client):
    assert client.health() is ballast.Health.SERVING
    (model,) = client.models()
    assert (model.name, model.workers) == (fleet.model, 1), model
    tokens = client.tokenize(fleet.prompt)
    assert client.detokenize(client.tokenize(fleet.prompt, special=False)) == fleet.prompt

    whole = client.complete(short)
    assert whole.choices[0].text == fleet.completion and list(whole.started.prompt_tokens) == tokens, whole
    by_tokens = client.complete(dataclasses.replace(short, prompt=tokens))
    assert by_tokens.choices[0].tokens == whole.choices[0].tokens, by_tokens
    chat = dataclasses.replace(short, prompt=[ballast.Message("user", fleet.question)])
    assert client.complete(chat).choices[0].text == fleet.chat

    drawn_whole = client.complete(drawn)
    answer = complete_over_http(max_tokens=fleet.max_tokens, temperature=0.8, seed=7, n=2, logprobs=1)
    for own, other in zip(drawn_whole.choices, answer["choices"], strict=True):
        assert own.text == other["text"], (own, other)
        own_logprobs = [round(logprob.logprob, 4) for logprob in own.logprobs]
        assert own_logprobs == [round(logprob, 4) for logprob in other["logprobs"]["token_logprobs"]]
    assert drawn_whole.choices[0].text != drawn_whole.choices[1].text

    kinds = [type(event) for event in client.generate(short)]
    assert kinds[0] is ballast.Started and kinds[-1] is ballast.Finished, kinds
    assert set(kinds[1:-1]) == {ballast.Delta}, kinds


def check_beams(client):
    found = client.complete(dataclasses.replace(short, n=2, beam_search=ballast.BeamSearch(width=4, length_penalty=0.5)))
    answer = complete_over_http(
        max_tokens=fleet.max_tokens, n=2, best_of=4, use_beam_search=True, length_penalty=0.5)
    assert [choice.text for choice in found.choices] == [choice["text"] for choice in answer["choices"]]


def check_pooling(client):
    inputs = [fleet.prompt, client.tokenize("import os"), "class"]
    own = client.embed(ballast.EmbeddingRequest(inputs, dimensions=16))
    # HTTP takes texts or token ids.
    texts = post("/v1/embeddings", input=[fleet.prompt, "class"], dimensions=16)["data"]
    tokens = post("/v1/embeddings", input=inputs[1], dimensions=16)["data"]
    others = [data["embedding"] for data in (texts[0], tokens[0], texts[1])]
    for vector, other in zip(own.vectors, others, strict=True):
        assert len(vector) == 16 and all(abs(a - b) < 1e-6 for a, b in zip(vector, other, strict=True))
    raw = client.embed(ballast.EmbeddingRequest(["class"], normalize=False)).vectors[0]
    assert abs(sum(value * value for value in raw) - 1) > 1e-3

    documents = ["def add(a, b):", "import os", "class Point:"]
    ranked = client.rerank(ballast.RerankRequest("import sys", documents, top_n=2))
    results = post("/v1/rerank", query="import sys", documents=documents, top_n=2)["results"]
    assert [document.index for document in ranked.results] == [result["index"] for result in results]
    for document, result in zip(ranked.results, results, strict=True):
        assert abs(document.score - result["relevance_score"]) < 1e-6
    with raises(ballast.InvalidRequestError):
        client.embed(ballast.EmbeddingRequest([]))
    with raises(ballast.DeadlineExceededError):
        client.rerank(ballast.RerankRequest("x", ["y " * 200] * 500), timeout_s=0.01)


def check_grammars(client):
    schema = json.dumps({"type": "integer", "minimum": 10, "maximum": 99})
    for grammar, fits in (
        (ballast.Grammar(ballast.GrammarKind.JSON_SCHEMA, schema), lambda text: 10 <= int(text) <= 99),
        (ballast.Grammar(ballast.GrammarKind.REGEX, "[ab]{3}"), lambda text: len(text) == 3),
        (ballast.OneOf(["yes", "no"]), lambda text: text in ("yes", "no")),
    ):
        choice = client.complete(dataclasses.replace(short, grammar=grammar)).choices[0]
        assert fits(choice.text) and choice.finished.reason is ballast.FinishReason.STOP, choice


def check_errors(client):
    for error_type, change in (
        (ballast.NotFoundError, {"model": "none"}),
        (ballast.InvalidRequestError, {"sampling": Sampling(temperature=3)}),
        (ballast.InvalidRequestError, {"prompt": []}),
    ):
        with raises(error_type, retry_after_s=None):
            client.complete(dataclasses.replace(short, **change))
    with raises(ballast.DeadlineExceededError):
        client.complete(long, timeout_s=0.05)
    with Client(fleet.url, api_key="sk-none") as stranger, raises(ballast.AuthenticationError):
        stranger.models()
    with Client("http://127.0.0.1:1", timeout_s=5) as nobody, raises(ballast.UnavailableError):
        nobody.models()
    with Client(fleet.url, api_key=fleet.limited_key) as limited:
        limited.complete(short)
        try:
            limited.complete(short)
            raise AssertionError("the key has no limit")
        except ballast.RateLimitError as error:
            assert 1 <= error.retry_after_s <= 60, error.retry_after_s


def check_cancellation(client):
    cancellation = Cancellation(fleet)
    with client.generate(long) as stream:
        next(stream), next(stream)
        cancellation.check_running()
    cancellation.check_stopped()
    with raises(ballast.StreamCancelledError):
        next(stream)

    cancellation = Cancellation(fleet)
    stream = client.generate(long)
    threading.Timer(0.1, stream.cancel).start()
    begun = time.monotonic()
    with raises(ballast.StreamCancelledError):
        list(stream)
    assert time.monotonic() - begun < 5
    cancellation.check_stopped()


async def check_async():
    async with AsyncClient(fleet.url, api_key=fleet.key, timeout_s=30) as client:
        assert await client.health() is ballast.Health.SERVING
        assert [model.name for model in await client.models()] == [fleet.model]
        tokens = await client.tokenize(fleet.prompt, special=False)
        assert await client.detokenize(tokens) == fleet.prompt
        answers = await asyncio.gather(*(client.complete(short) for _ in range(4)))
        assert {answer.choices[0].text for answer in answers} == {fleet.completion}, answers
        embeddings = await client.embed(ballast.EmbeddingRequest(["one", "two"]))
        assert len(embeddings.vectors) == 2 and embeddings.prompt_tokens >= 2
        assert len((await client.rerank(ballast.RerankRequest("one", ["two"]))).results) == 1
        with raises(ballast.NotFoundError):
            await client.complete(dataclasses.replace(short, model="none"))
        with raises(ballast.DeadlineExceededError):
            await client.complete(long, timeout_s=0.05)

        async def read_long(started):
            async for event in client.generate(long):
                if isinstance(event, ballast.Delta):
                    started.set()

        cancellation, started = Cancellation(fleet), asyncio.Event()
        task = asyncio.create_task(read_long(started))
        await started.wait()
        await asyncio.to_thread(cancellation.check_running)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await asyncio.to_thread(cancellation.check_stopped)

        cancellation = Cancellation(fleet)
        async with client.generate(long) as stream:
            await anext(stream), await anext(stream)
        # The stream is cancelled, and the task that reads it is not.
        with raises(ballast.StreamCancelledError):
            await anext(stream)
        await asyncio.to_thread(cancellation.check_stopped)


class UnfinishedStreams(ballast_pb2_grpc.InferenceServicer):
    """Ends each stream after the first of its choices."""

    def Generate(self, request, context):
        yield ballast_pb2.GenerateFrame(started=ballast_pb2.Started(model="m"))
        # A kind of frame that this version does not know.
        yield ballast_pb2.GenerateFrame()
        yield ballast_pb2.GenerateFrame(finished=ballast_pb2.Finished())


def check_unfinished_streams():
    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    ballast_pb2_grpc.add_InferenceServicer_to_server(UnfinishedStreams(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"http://127.0.0.1:{port}", timeout_s=30) as client:
        assert client.complete(GenerateRequest("x")).started.model == "m"
        with raises(ballast.IncompleteStreamError):
            client.complete(GenerateRequest("x", n=2))
    server.stop(None)


def check_example():
    command = [sys.executable, EXAMPLE, fleet.prompt, fleet.url]
    done = subprocess.run(command, env={"BALLAST_API_KEY": fleet.key}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer = complete_over_http(max_tokens=64, temperature=0.8, seed=7)
    assert done.stdout == answer["choices"][0]["text"], done
    assert f"{answer['usage']['completion_tokens']} tokens" in done.stderr, done
    refused = subprocess.run(command, env={}, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and refused.stderr.startswith("AuthenticationError: "), refused


check_fields()
with Client(fleet.url, api_key=fleet.key, timeout_s=30) as shared:
    check_texts(shared)
    check_beams(shared)
    check_pooling(shared)
    check_grammars(shared)
    check_errors(shared)
    check_cancellation(shared)
asyncio.run(check_async())
check_unfinished_streams()
check_example()
