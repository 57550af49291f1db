"""A way to a store that can be cut: whoever goes by it loses the store, and nobody else does."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType


class StoreRelay:
    """Passes bytes between whoever connects to ``endpoint`` and the store, until it is cut."""

    def __init__(self, store: str) -> None:
        host, _, port = store.rpartition(":")
        self._store = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def endpoint(self) -> str:
        """``host:port`` of it."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Every connection is gone, and each new one goes at once."""
        with self._lock:
            self._is_cut = True
            ends, self._ends = self._ends, set()
        for end in ends:
            _close(end)

    def mend(self) -> None:
        """New connections reach the store."""
        with self._lock:
            self._is_cut = False

    def __enter__(self) -> StoreRelay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        _close(self._listener)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._join(self._listener.accept()[0])

    def _join(self, near: socket.socket) -> None:
        with self._lock:
            if self._is_cut:
                near.close()
                return
            far = socket.create_connection(self._store)
            self._ends |= {near, far}
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    _close(sink)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
