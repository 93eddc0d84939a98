# SPDX-License-Identifier: Apache-2.0
"""The client for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from . import _wire, types
from ._connection import OPTIONS, Tls, connection_to
from ._generated import ballast_pb2 as pb
from ._generated import ballast_pb2_grpc as services
from .errors import from_rpc_error

Reply = TypeVar("Reply")


class Stream(Iterator[types.Event]):
    """The events of a request. Leaving the `with` block, or `cancel` from any thread, stops the worker."""

    def __init__(self, call: grpc.Call, choices: int) -> None:
        self._call = call
        self._progress = _wire.StreamProgress(choices)

    def __next__(self) -> types.Event:
        while True:
            try:
                frame = next(self._call)
            except StopIteration:
                self._progress.check_end()
                raise
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            if (event := _wire.event_of(frame)) is not None:
                self._progress.see(event)
                return event

    def cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class Client:
    """Calls one server. Threads may share it.

    `timeout_s` bounds each call that has no timeout of its own; the server's own limit holds as well.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, tls: Tls | None = None, timeout_s: float | None = None
    ) -> None:
        connection = connection_to(url, api_key, tls)
        if connection.credentials is None:
            self._channel = grpc.insecure_channel(connection.target, OPTIONS)
        else:
            self._channel = grpc.secure_channel(connection.target, connection.credentials, OPTIONS)
        self._metadata = connection.metadata
        self._timeout_s = timeout_s
        self._inference = services.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(self, request: types.GenerateRequest, *, timeout_s: float | None = None) -> Stream:
        """Starts a request. A refusal is raised where its first event would be."""
        options = self._options(timeout_s)
        return Stream(self._inference.Generate(_wire.request_to_wire(request), **options), request.n)

    def complete(self, request: types.GenerateRequest, *, timeout_s: float | None = None) -> types.Completion:
        """Reads a request to its end."""
        builder = _wire.CompletionBuilder(request.n)
        with self.generate(request, timeout_s=timeout_s) as stream:
            for event in stream:
                builder.add(event)
        return builder.build()

    def embed(self, request: types.EmbeddingRequest, *, timeout_s: float | None = None) -> types.Embeddings:
        """One vector for each input."""
        wire = _wire.embed_to_wire(request)
        return _wire.embeddings_of(self._call(self._inference.Embed, wire, timeout_s))

    def rerank(self, request: types.RerankRequest, *, timeout_s: float | None = None) -> types.Reranked:
        """Scores documents by how well they answer a query."""
        wire = _wire.rerank_to_wire(request)
        return _wire.reranked_of(self._call(self._inference.Rerank, wire, timeout_s))

    def tokenize(self, text: str, *, model: str = "", special: bool = True) -> list[int]:
        """Token ids of a text. `special`: with the special tokens that the model puts around a text."""
        request = pb.TokenizeRequest(model=model, text=text, no_special=not special)
        return list(self._call(self._inference.Tokenize, request).tokens)

    def detokenize(self, tokens: Sequence[int], *, model: str = "") -> str:
        return self._call(self._inference.Detokenize, pb.DetokenizeRequest(model=model, tokens=tokens)).text

    def models(self) -> list[types.Model]:
        return _wire.models_of(self._call(self._inference.ListModels, pb.ListModelsRequest()))

    def health(self) -> types.Health:
        request = health_pb2.HealthCheckRequest(service="ballast.v1.Inference")
        return types.Health(self._call(self._health.Check, request).status)

    def close(self) -> None:
        """Ends the connection, and cancels what runs."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _options(self, timeout_s: float | None) -> dict[str, object]:
        return {"metadata": self._metadata, "timeout": self._timeout_s if timeout_s is None else timeout_s}

    def _call(self, method: Callable[..., Reply], request: object, timeout_s: float | None = None) -> Reply:
        try:
            return method(request, **self._options(timeout_s))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
