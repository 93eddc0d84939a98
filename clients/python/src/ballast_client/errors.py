# SPDX-License-Identifier: Apache-2.0
"""Exceptions of calls. docs/OPERATING.md of the server lists when it answers with which status."""

from __future__ import annotations

import grpc


class BallastError(Exception):
    """A call failed."""

    def __init__(self, message: str, code: grpc.StatusCode, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        # When the server can take the request, as far as it knows.
        self.retry_after_s = retry_after_s


class InvalidRequestError(BallastError):
    """A field is wrong, or the request can never fit."""


class AuthenticationError(BallastError):
    """The API key is missing or not valid."""


class NotFoundError(BallastError):
    """The model does not exist."""


class RateLimitError(BallastError):
    """The tenant or the key has reached a limit of its own. See `retry_after_s`."""


class UnavailableError(BallastError):
    """No server is there, no worker is ready, or the queue is full. See `retry_after_s`."""


class DeadlineExceededError(BallastError):
    """The timeout of the call has passed."""


class QuarantinedError(BallastError):
    """Requests with this content have crashed workers. Do not repeat it."""


class StreamCancelledError(BallastError):
    """The stream was cancelled, here or on its way."""


class ServerError(BallastError):
    """Any other failure of the server."""


class IncompleteStreamError(BallastError):
    """The stream ended without the end of each choice, although it reported no failure."""

    def __init__(self, unfinished: int) -> None:
        super().__init__(f"{unfinished} choices have not ended", grpc.StatusCode.DATA_LOSS)


_BY_CODE: dict[grpc.StatusCode, type[BallastError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: AuthenticationError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RateLimitError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.FAILED_PRECONDITION: QuarantinedError,
    grpc.StatusCode.CANCELLED: StreamCancelledError,
}


def from_rpc_error(error: grpc.RpcError) -> BallastError:
    """The exception for an error of grpc or of grpc.aio, which is also a call."""
    code = error.code()
    trailers = {key: value for key, value in error.trailing_metadata() or ()}
    try:
        retry_after_s = float(trailers["retry-after"])
    except (KeyError, ValueError):
        retry_after_s = None
    return _BY_CODE.get(code, ServerError)(error.details() or str(code), code, retry_after_s)
