"""The transport over UCX, through whichever of its Python bindings is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping

from dejavu.errors import ConfigError
from dejavu.transport.core import Core
from dejavu.transport.credits import CreditLimit
from dejavu.transport.engine import DEFAULT_CREDITS, LinkTransport
from dejavu.transport.ucx_environment import COMMON_SETTINGS, TCP_SETTINGS, tune_environment

logger = logging.getLogger(__name__)

BINDINGS = ("ucxx", "ucp")
"""In the order of preference: UCXX, then its predecessor UCX-Py."""


class UcxTransport(LinkTransport):
    """A ``Transport`` over UCX. Raises ConfigError where no binding of UCX is installed."""

    def __init__(
        self,
        secret: str,
        settings: Mapping[str, str] = TCP_SETTINGS,
        *,
        credit_limit: CreditLimit = DEFAULT_CREDITS,
        handshake_timeout_s: float = 5.0,
    ) -> None:
        super().__init__(
            make_core(settings), secret, credit_limit=credit_limit, handshake_timeout_s=handshake_timeout_s
        )


def make_core(settings: Mapping[str, str]) -> Core:
    """A running core over the first binding that is installed, under these UCX settings."""
    binding = installed_binding()
    tune_environment({**COMMON_SETTINGS, **settings})
    # Imported only now, because UCX reads its environment when it is loaded.
    if binding == "ucxx":
        from dejavu.transport.ucxx_worker import UcxxCore

        return UcxxCore()
    from dejavu.transport.ucp_worker import UcpCore

    logger.info("UCXX is not installed; UCX-Py is used")
    return UcpCore()


def installed_binding() -> str:
    """The name of the module to use. Raises ConfigError when there is none."""
    for binding in BINDINGS:
        if importlib.util.find_spec(binding) is not None:
            return binding
    raise ConfigError(
        "transport=ucx: no Python binding of UCX is installed\n"
        "install ucxx-cu13 (Linux, x86-64 or arm64; no GPU needed)"
    )
