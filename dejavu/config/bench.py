"""The shape of the section ``bench``, and what a declaration must satisfy for ``workflow=bench``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dejavu.config.bounds import above_zero, at_least, refuse
from dejavu.config.fault import FaultConfig
from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

_URL = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?(/[^\s?#]*)?")
_LEAST_VOCABULARY = 2


@dataclass(kw_only=True)
class BenchConfig:
    """The endpoint that ``workflow=bench`` drives, and what is good enough. What is sent, and when: ``workload``."""

    url: str = "http://127.0.0.1:8000"
    """Of any OpenAI-compatible endpoint, with or without ``/v1``."""
    api_key: str | None = field(default=None, repr=False)
    """None: the environment's DEJAVU_API_KEY, or no key."""
    ca_cert: str | None = None
    """PEM file of the authority that signed the endpoint's certificate; None: those that the system trusts."""
    model: str | None = None
    """The name to ask for; None: the endpoint's first."""
    duration_s: float | None = None
    """Seconds in which requests are sent; a workload with a rate is repeated for as long. None: the workload once."""
    max_concurrency: int | None = None
    """Requests under way at a time; one that is due waits in the client. None: no limit, an open loop."""
    timeout_s: float = 600.0
    """Of one request, from sending to the end of its answer."""
    ttft_s: float | None = None
    """Goodput counts requests whose first token came within so many seconds."""
    tpot_s: float | None = None
    """Goodput counts requests whose later tokens took so many seconds each, on average."""
    e2e_s: float | None = None
    """Goodput counts requests that ended within so many seconds."""
    vocab_size: int = 100
    """Random prompts (``workload=synthetic`` and ``trace``) are token ids below it, which every model has."""


def check_bench(config: Config, *, is_benching: bool) -> None:
    """The section makes sense, or there is none. Raises ConfigError naming key, value and limit."""
    bench = config.bench
    if not is_benching:
        # The key may stand in the environment whatever the workflow is.
        if replace(bench, api_key=None) != BenchConfig():
            chosen = config.workflow.name.value
            raise ConfigError(f"bench is for workflow=bench, and the choice is workflow={chosen}")
        return
    if not _URL.fullmatch(bench.url):
        raise refuse("bench.url", bench.url, "must be http://HOST:PORT or https://HOST:PORT")
    for key in ("duration_s", "timeout_s", "ttft_s", "tpot_s", "e2e_s"):
        above_zero(f"bench.{key}", getattr(bench, key), " s")
    at_least("bench.max_concurrency", bench.max_concurrency, 1, " request")
    at_least("bench.vocab_size", bench.vocab_size, _LEAST_VOCABULARY, " token ids")
    if bench.duration_s is not None and config.workload.rate == 0:
        raise refuse(
            "bench.duration_s",
            f"{bench.duration_s:g}",
            "repeats requests at a rate: it needs workload.rate=REQUESTS_PER_S above 0",
        )
    if config.fault != FaultConfig():
        raise ConfigError("fault is for a cluster that this run starts, and workflow=bench starts none")
