"""A service whose cluster repeats the prompt, at once: the real books, service and HTTP server, without a model."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dejavu.api.app import create_app
from dejavu.api.served import ServedModel
from dejavu.api.server import Address, HttpServer
from dejavu.clock import SystemClock
from dejavu.engine.messages import RunPrompt, encode
from dejavu.errors import DejavuError
from dejavu.ids import RequestId, RowId
from dejavu.request import Completion, TokenLogprobs
from dejavu.serving.ledger import Ledger
from dejavu.serving.prompts import prompt_row
from dejavu.serving.service import Service
from dejavu.serving.source import Arrival, Cancellation, Source, Submission
from dejavu.serving.standing import Standing

from harness.plans import VOCAB_SIZE, split_plan

DEADLINE_S = 30.0
ALPHABET = "".join(chr(ord("@") + token) for token in range(VOCAB_SIZE))
"""Token 0, which ends a request, is ``@``."""
MODEL = "echo"


class EchoCodec:
    """A letter a token; a chat is its messages in a row."""

    has_chat_template = True

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(letter) for letter in text]

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return "".join(f"{_said_by(message)}{message['content']}" for message in messages)

    def encode_chat_text(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens)

    def most_characters(self, num_tokens: int) -> int:
        return 100 * num_tokens

    def token_text(self, token: int) -> str:
        return ALPHABET[token]

    def token_bytes(self, token: int) -> bytes:
        return ALPHABET[token].encode()


def _said_by(message: Mapping[str, Any]) -> str:
    role = "" if message["role"] in ("user", "assistant") else message["role"]
    return f"{role}{message.get('name', '')}"


class Deaf:
    """An observer of nothing."""

    def token(self, request_id: RequestId, at_s: float) -> None:
        pass

    def ended(self, completion: Completion, token_times_s: Sequence[float]) -> None:
        pass


class EchoController:
    """In the place of a controller. While it is held, whoever has come waits; a test may let it fail."""

    def __init__(self) -> None:
        self.plan = split_plan(token_rows=2, in_flight=2)
        self.ledger = Ledger(
            self.plan,
            EchoCodec(),  # type: ignore[arg-type]
            Deaf(),
            progressed=lambda row_id: None,
            ended=lambda row_id: None,
        )
        self.failure: str | None = None
        self.is_between = False
        self.is_changing = False
        self.lost: tuple[str, ...] = ()
        self._changed = threading.Condition()
        self._num_wakes = 0
        self._num_steps_left = math.inf
        self._live: dict[RowId, None] = {}

    @property
    def standing(self) -> Standing:
        return Standing(
            plan=self.plan,
            is_between=self.is_between,
            is_changing=self.is_changing,
            lost=self.lost,
            num_waiting=0,
            num_running=len(self.ledger.rows),
            num_rows_taken=self.ledger.admission.num_rows_taken,
        )

    def hold(self, *, after_steps: int = 0) -> None:
        """After so many more tokens of everyone, nobody gets any."""
        self._num_steps_left = after_steps

    def go_on(self) -> None:
        self._num_steps_left = math.inf
        self.wake()

    def wake(self) -> None:
        with self._changed:
            self._num_wakes += 1
            self._changed.notify()

    def run(self, source: Source, *, start_s: float) -> None:
        clock, num_seen = SystemClock(), 0
        while True:
            now_s = clock.monotonic() - start_s
            for arrival in source.take(now_s):
                self._take(arrival, now_s)
            if self.failure is not None:
                raise DejavuError(self.failure)
            if self._num_steps_left > 0 and self._step(now_s):
                self._num_steps_left -= 1
                continue
            wait_s = source.wait_s(now_s)
            if wait_s is None and not self.ledger.num_open:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._num_wakes > num_seen, min(wait_s or 0.05, 0.05))  # noqa: B023
                num_seen = self._num_wakes

    def abandon(self, reason: str, untaken: Sequence[Arrival] = ()) -> None:
        for arrival in untaken:
            self._take(arrival, 0.0)
        self.ledger.abandon(reason, 0.0)

    def _take(self, arrival: Arrival, now_s: float) -> None:
        match arrival:
            case Submission():
                self.ledger.submit(arrival, now_s)
            case Cancellation():
                self._free(self.ledger.cancel(arrival, now_s).release)

    def _step(self, now_s: float) -> bool:
        """One more token for everyone. Returns whether there was anything to do."""
        rows_due = self.ledger.next_prompt()
        if rows_due:
            # As a controller would send it: whatever a client may ask for must have room in the message.
            encode(RunPrompt(epoch=self.plan.epoch, rows=tuple(map(prompt_row, rows_due))))
            prompted = [row.row_id for row in rows_due]
            changes = self.ledger.first_tokens(prompted, *self._tokens(prompted), now_s)
            self._live |= dict.fromkeys(row_id for row_id in prompted if row_id in self.ledger.rows)
            self._free(changes.release)
            return True
        rows = list(self._live)
        self._free(self.ledger.next_tokens(rows, *self._tokens(rows), now_s).release)
        return bool(rows)

    def _tokens(self, row_ids: Sequence[RowId]) -> tuple[list[int], list[TokenLogprobs | None]]:
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for row_id in row_ids:
            tracked = self.ledger.rows[row_id]
            prompt, top = tracked.request.prompt_tokens, tracked.request.sampling.top_logprobs
            tokens.append(prompt[len(tracked.tokens) % len(prompt)])
            likely = tuple((token, -float(token)) for token in range(top or 0))
            logprobs.append(None if top is None else TokenLogprobs(-0.5, likely))
        return tokens, logprobs

    def _free(self, row_ids: Sequence[RowId]) -> None:
        for row_id in row_ids:
            self._live.pop(row_id, None)
        self.ledger.rows_ended(row_ids)


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Mapping[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Those of a stream, without the last one, which says that it is done."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


class EchoServer:
    """An HTTP server over a service over an ``EchoController``, and a client of it."""

    def __init__(self, controller: EchoController, service: Service, url: str) -> None:
        self.controller = controller
        self.service = service
        self.url = url

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=DEADLINE_S)

    def get(self, path: str, **headers: str) -> Reply:
        return self._ask("GET", path, None, headers)

    def post(self, path: str, body: Mapping[str, object] | bytes, **headers: str) -> Reply:
        return self._ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def complete(self, prompt: str = "ABC", **fields: object) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 5, **fields})

    def chat(self, content: object = "ABC", **fields: object) -> Reply:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, **fields})

    def _ask(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()


@contextmanager
def echo_server(
    *,
    max_queue: int = 100,
    request_timeout_s: float | None = None,
    api_key: str | None = None,
    codec: object = EchoCodec(),
) -> Iterator[EchoServer]:
    """It answers; at the end everything of it is gone."""
    controller = EchoController()
    service = Service(
        controller,  # type: ignore[arg-type]
        SystemClock(),
        max_queue=max_queue,
        request_timeout_s=request_timeout_s,
    )
    model = ServedModel(id=MODEL, created_s=1, max_length=controller.plan.model.max_length, codec=codec)  # type: ignore[arg-type]
    thread = threading.Thread(target=_run, args=(service,), name="echo")
    thread.start()
    try:
        app = create_app(service, model, api_key=api_key)
        with Address("127.0.0.1", 0) as address, HttpServer(app, address) as server:
            yield EchoServer(controller, service, server.url)
    finally:
        controller.go_on()
        service.drain(0.0)
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


def _run(service: Service) -> None:
    try:
        service.run()
    except DejavuError:
        pass  # A test lets it fail, and asks what its users hear of that.
