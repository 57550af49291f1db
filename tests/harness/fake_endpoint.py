"""An OpenAI-compatible endpoint that answers as it is told, on a thread, for tests of clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "let-me-in"


class FakeEndpoint:
    """Answers ``max_tokens`` pieces; a prompt of text chooses otherwise: ``429``, ``cut``, ``broken``, ``no text`` or
    ``fails``.

    ``wait_for`` requests must be under way before any is answered; ``most_under_way`` is what it has seen.
    """

    def __init__(self, *, wait_for: int = 0, with_usage: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_under_way = 0
        self._wait_for = wait_for
        self._with_usage = with_usage
        self._under_way = 0
        self._changed = threading.Condition()

    def begin(self, body: dict[str, Any]) -> None:
        """A request has come; returns when it may be answered."""
        with self._changed:
            self.bodies.append(body)
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(self.bodies) >= self._wait_for, timeout=20)

    def end(self) -> None:
        """A request has its answer."""
        with self._changed:
            self._under_way -= 1

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[str]:
        """The data of the events of an answer."""
        prompt = body.get("prompt")
        if path.endswith("/chat/completions"):
            yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for piece in range(body["max_tokens"]):
            if piece == 1 and prompt == "cut":
                return
            if piece == 1 and prompt == "broken":
                yield "{"
            if piece == 1 and prompt == "no text":
                yield '{"choices": [{"index": 0, "text": "\udcff"}]}'
            if piece == 1 and prompt == "fails":
                yield json.dumps({"error": {"message": "the cluster is gone", "type": "server_error"}})
                return
            said = {"delta": {"content": "a"}} if path.endswith("/chat/completions") else {"text": "a"}
            yield json.dumps({"choices": [{"index": 0, **said, "finish_reason": None}]})
        yield json.dumps({"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "length"}]})
        if self._with_usage and body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"


@contextmanager
def fake_endpoint(endpoint: FakeEndpoint) -> Iterator[str]:
    """The endpoint's address; afterwards its port is closed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.headers["Authorization"] not in (None, f"Bearer {KEY}"):
                self._whole(401, {"error": {"message": "a wrong key"}})
            else:
                self._whole(200, {"object": "list", "data": [{"id": "first"}, {"id": "second"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.begin(body)
            try:
                if body.get("prompt") == "429":
                    self._whole(429, {"error": {"message": "the queue is full"}})
                else:
                    self._stream(body)
            finally:
                endpoint.end()

        def _stream(self, body: Mapping[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in endpoint.events(self.path, body):
                data = f"data: {event}\n\n".encode(errors="surrogateescape")
                # Cut in two, as a network may do it; an empty part would end the answer.
                for part in (data[:5], data[5:]):
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def _whole(self, status: int, answer: object) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
