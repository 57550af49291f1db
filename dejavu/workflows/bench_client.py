"""An open-loop client of an OpenAI-compatible endpoint: each request is sent when it is due, whatever the others do."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from dejavu.clock import Clock
from dejavu.errors import ConfigError, DejavuError, nearest
from dejavu.report.load import Sample
from dejavu.workflows.bench_stream import Answer, EventSplitter, StreamError, message_of_body
from dejavu.workload import Ask

_MODELS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where to ask, and how to be let in."""

    url: str
    """Up to and with ``/v1``, without a slash at its end."""
    api_key: str | None
    ca_cert: str | None
    """PEM file of the authority that signed the endpoint's certificate; None: those that the system trusts."""

    @classmethod
    def of(cls, url: str, api_key: str | None, ca_cert: str | None) -> Endpoint:
        """The endpoint of an address with or without ``/v1``."""
        bare = url.rstrip("/")
        return cls(url=bare if bare.endswith("/v1") else f"{bare}/v1", api_key=api_key, ca_cert=ca_cert)

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        """A session without a limit on connections, inside a running event loop."""
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        trusted: ssl.SSLContext | bool = True
        if self.ca_cert is not None:
            trusted = ssl.create_default_context(cafile=self.ca_cert)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=trusted),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )


async def model_of(endpoint: Endpoint, wanted: str | None) -> str:
    """The name to ask for: ``wanted``, which the endpoint has, or the endpoint's first model.

    Raises ConfigError for a wrong key or an unknown model, DejavuError where no such endpoint answers.
    """
    try:
        async with endpoint.session(_MODELS_TIMEOUT_S) as session, session.get(f"{endpoint.url}/models") as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise DejavuError(f"bench.url={endpoint.url}: no endpoint answers ({_said(error)})") from error
    if status in (401, 403):
        raise ConfigError(
            f"bench.url={endpoint.url}: the endpoint refuses the key ({message_of_body(body)})\n"
            "set bench.api_key, or DEJAVU_API_KEY in the environment"
        )
    names = _names(body) if status == 200 else []
    if wanted is not None:
        # An endpoint that does not list its models may have this one.
        if names and wanted not in names:
            raise ConfigError(f"bench.model={wanted}: the endpoint has no such model\n{nearest(wanted, names)}")
        return wanted
    if not names:
        raise DejavuError(f"bench.url={endpoint.url}: it lists no model (HTTP {status})\ngive bench.model=NAME")
    return names[0]


def _names(body: bytes) -> list[str]:
    try:
        listed: Any = msgspec.json.decode(body)
        return [str(one["id"]) for one in listed["data"]]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send, and how."""

    endpoint: Endpoint
    model: str
    asks: Sequence[Ask]
    timeout_s: float
    max_concurrency: int | None = None
    """None: as many as are due."""


class LoadClient:
    """Sends a load once. ``samples`` grows as requests end, so that a load that is interrupted has its part."""

    def __init__(self, load: Load, clock: Clock, heard: Callable[[LoadClient], None]) -> None:
        """``heard`` is told whenever a piece of an answer has come or a request has ended, on the loop's thread."""
        self.samples: list[Sample] = []
        self.num_failed = 0
        self.num_pieces = 0
        """Pieces of answers that have come so far."""
        self._load = load
        self._clock = clock
        self._heard = heard
        self._start_s = 0.0

    async def run(self) -> None:
        """Every request has ended, well or not."""
        load = self._load
        gate = contextlib.nullcontext() if load.max_concurrency is None else asyncio.Semaphore(load.max_concurrency)
        async with load.endpoint.session(load.timeout_s) as session, asyncio.TaskGroup() as group:
            self._start_s = self._clock.monotonic()
            for ask in load.asks:
                await asyncio.sleep(max(0.0, ask.arrival_s - self._now_s()))
                group.create_task(self._one(session, ask, gate))

    def _now_s(self) -> float:
        return self._clock.monotonic() - self._start_s

    async def _one(
        self, session: aiohttp.ClientSession, ask: Ask, gate: contextlib.AbstractAsyncContextManager[None]
    ) -> None:
        async with gate:
            sent_s = self._now_s()
            answer = Answer(chunk_times_s=[])
            kind: str | None = None
            detail: str | None = None
            try:
                await self._ask(session, ask, answer)
            except StreamError as error:
                kind, detail = error.kind, str(error)
            except TimeoutError:
                kind, detail = "timeout", f"no whole answer within bench.timeout_s={self._load.timeout_s:g}"
            except (aiohttp.ClientError, OSError) as error:
                kind, detail = "connection", _said(error)
            self.samples.append(
                Sample(
                    id=ask.id,
                    due_s=ask.arrival_s,
                    sent_s=sent_s,
                    end_s=self._now_s(),
                    prompt_tokens=answer.usage.prompt_tokens if answer.usage is not None else _known_length(ask.body),
                    output_tokens=answer.output_tokens,
                    chunk_times_s=tuple(answer.chunk_times_s),
                    error=kind,
                    detail=detail,
                )
            )
            self.num_failed += kind is not None
            self._heard(self)

    async def _ask(self, session: aiohttp.ClientSession, ask: Ask, answer: Answer) -> None:
        body = {
            "model": self._load.model,
            **ask.body,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        events = EventSplitter()
        headers = {"Content-Type": "application/json"}
        url = f"{self._load.endpoint.url}/{ask.path}"
        async with session.post(url, data=msgspec.json.encode(body), headers=headers) as response:
            if response.status != 200:
                raise StreamError(f"http {response.status}", message_of_body(await response.read()))
            async for data in response.content.iter_any():
                at_s = self._now_s()
                before = len(answer.chunk_times_s)
                for event in events.feed(data):
                    answer.take(event, at_s)
                self.num_pieces += len(answer.chunk_times_s) - before
                self._heard(self)
        answer.check_whole()


def _known_length(body: Mapping[str, object]) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) else 0


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
