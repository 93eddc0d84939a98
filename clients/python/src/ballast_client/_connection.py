# SPDX-License-Identifier: Apache-2.0
"""Where the server is, and how calls prove who they are."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc

# Messages of a worker are bounded by the server; a long prompt's `started` frame exceeds grpc's 4 MiB.
OPTIONS = [("grpc.max_receive_message_length", 64 << 20)]


@dataclass(frozen=True)
class Tls:
    """Certificates in PEM. None takes the roots of the system, and shows no certificate of the client."""

    roots: bytes | None = None
    client_certificate: bytes | None = None
    client_key: bytes | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.roots, self.client_key, self.client_certificate)


@dataclass(frozen=True)
class Connection:
    target: str
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str], ...]


def connection_to(url: str, api_key: str | None, tls: Tls | None) -> Connection:
    """`url`: http://HOST:PORT, https://HOST:PORT, or unix:PATH. Nothing is sent yet."""
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    if url.startswith("unix:"):
        return Connection(url, None, metadata)
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/"):
        raise ValueError(f"{url!r} is neither http://HOST:PORT nor https://HOST:PORT nor unix:PATH")
    if parts.scheme == "http" and tls is not None:
        raise ValueError(f"certificates for {url!r}, which has no TLS")
    credentials = (tls or Tls()).credentials() if parts.scheme == "https" else None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return Connection(f"{host}:{port}", credentials, metadata)
