"""UCX's settings, which it reads from the environment when it is first loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType

logger = logging.getLogger(__name__)

COMMON_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        # Without it a restarted listener cannot bind its old port for a minute.
        "UCX_TCP_CM_REUSEADDR": "y",
        # Other libraries' UCX settings in the same environment are no reason to warn.
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        # A lost peer is reported by TransportError; UCXX would print it to stderr too, at every retry.
        "UCXX_LOG_LEVEL": "FATAL",
    }
)
"""What every network wants; ``make_core`` sets it beside the network's own settings."""

TCP_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        # Half to a third of the time of large transfers over TCP, against UCX's own choice.
        "UCX_RNDV_SCHEME": "put_zcopy",
        "UCX_TCP_TX_SEG_SIZE": "64K",
    }
)
"""What suits TCP, measured on loopback. Other networks pass their own mapping instead."""


def tune_environment(settings: Mapping[str, str], *, environment: MutableMapping[str, str] | None = None) -> None:
    """Every setting is in the environment, except where the user has already set it.

    Child processes inherit it. Must come before the first import of ``ucxx`` or ``ucp``.
    """
    target = os.environ if environment is None else environment
    for key, value in settings.items():
        chosen = target.setdefault(key, value)
        if chosen != value:
            logger.info("%s=%s from the environment is kept (ours: %s)", key, chosen, value)
