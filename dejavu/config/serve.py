"""The shape of the section ``serve``, and what a declaration must satisfy for ``workflow=serve``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dejavu.config.bounds import above_zero, at_least, refuse
from dejavu.errors import ConfigError

if TYPE_CHECKING:
    from dejavu.config.schema import Config

_MOST_PORT = 65535


@dataclass(kw_only=True)
class ServeConfig:
    """Where ``workflow=serve`` answers, whom, and how much it takes upon itself."""

    host: str = "127.0.0.1"
    """Address on which it listens; 0.0.0.0: on all of this machine's."""
    port: int = 8000
    """0: any free one, which is printed."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must give; None: the environment's DEJAVU_API_KEY, or none is needed."""
    model_name: str | None = None
    """What clients call the model; None: the hub's name, the folder's, or the kind."""
    max_queue: int = 256
    """Requests that may wait beyond the rows of the token pipeline; more are refused with 429."""
    request_timeout_s: float | None = 600.0
    """A request that takes longer, waiting included, ends with 504; None: none does."""
    drain_timeout_s: float = 30.0
    """What is still open so long after the signal to stop is aborted."""
    completions: bool = True
    """Whether each request's line is written to ``completions.jsonl``, which grows as long as the service runs."""
    tls_cert: str | None = None
    """PEM file with the certificate and those between it and its authority; None: plain HTTP."""
    tls_key: str | None = None
    """PEM file with the certificate's key, not encrypted."""


def check_serve(config: Config, *, is_serving: bool) -> None:
    """The section makes sense, or there is none. Raises ConfigError naming key, value and limit."""
    serve = config.serve
    if not is_serving:
        # The key may stand in the environment whatever the workflow is.
        if replace(serve, api_key=None) != ServeConfig():
            chosen = config.workflow.name.value
            raise ConfigError(f"serve is for workflow=serve, and the choice is workflow={chosen}")
        return
    if not serve.host or re.search(r"[\s/]", serve.host):
        raise refuse("serve.host", repr(serve.host), "must be an address or host name, without a port")
    if not 0 <= serve.port <= _MOST_PORT:
        raise refuse("serve.port", serve.port, f"must be from 0 to {_MOST_PORT}; 0 takes any free one")
    if serve.api_key is not None and not re.fullmatch(r"[!-~]+", serve.api_key):
        raise ConfigError("serve.api_key must be visible ASCII characters without spaces, at least one")
    at_least("serve.max_queue", serve.max_queue, 0, " requests")
    above_zero("serve.request_timeout_s", serve.request_timeout_s, " s")
    at_least("serve.drain_timeout_s", serve.drain_timeout_s, 0, " s")
    if (serve.tls_cert is None) != (serve.tls_key is None):
        raise ConfigError("serve.tls_cert and serve.tls_key go together: give both or neither")
