"""The application on a socket, served by a thread of its own."""

from __future__ import annotations

import errno
import logging
import socket
import ssl
import threading
from pathlib import Path
from types import TracebackType

import uvicorn
from starlette.types import ASGIApp

from dejavu.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_LAST_ANSWERS_S = 2
"""For answers that are complete and only wait for their clients to read them."""
_STOP_TIMEOUT_S = 10.0
_NO_PASSWORD = "no password"
"""Never right: an encrypted key is refused, where OpenSSL would ask for its password on the terminal."""


class Address:
    """A port that is this process's alone, where nobody is answered before ``listen``. ``close`` lets go of it.

    Raises ConfigError when it cannot be had.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            try:
                self.socket = _bound(host, port, is_shared=False)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                # Perhaps only by what is left of connections to a service that has ended.
                self.socket = _bound(host, port, is_shared=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"serve.host={host} serve.port={port}: cannot listen there ({reason})") from error

    def listen(self) -> None:
        """Clients are accepted. Raises ConfigError when somebody else does that here."""
        try:
            # For the next service here: what is left of these connections shall not be in its way.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(f"{self.url('http')}: cannot listen there ({error.strerror or error})") from error

    def __enter__(self) -> Address:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def url(self, scheme: str) -> str:
        """Where it is."""
        host, port = self.socket.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _bound(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """A socket on the port; ``is_shared`` lets it be one that others have, none of whom listens. Raises OSError."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_shared)
        bound.bind((host, port))
        # Until it listens, when nobody can have the port anyhow, nobody is to share it.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        bound.close()
        raise
    return bound


def check_tls(cert: Path, key: Path) -> None:
    """The files are a certificate and its key. Raises ConfigError."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, _NO_PASSWORD)
    except OSError as error:
        raise ConfigError(f"serve.tls_cert={cert} with serve.tls_key={key}: {error}") from error


class HttpServer:
    """Answers on the address while the ``with`` block runs; at its end, no connection is left.

    Args:
        tls: certificate and key, PEM files that have been checked; None: plain HTTP.
    """

    def __init__(self, app: ASGIApp, address: Address, tls: tuple[Path, Path] | None = None) -> None:
        self.url = address.url("http" if tls is None else "https")
        self._address = address
        cert, key = tls or (None, None)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_LAST_ANSWERS_S,
                ssl_certfile=cert,
                ssl_keyfile=key,
                ssl_keyfile_password=_NO_PASSWORD,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def __enter__(self) -> HttpServer:
        # From here on clients are accepted, and answered in a moment.
        self._address.listen()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(_STOP_TIMEOUT_S)

    def _serve(self) -> None:
        self._server.run(sockets=[self._address.socket])
