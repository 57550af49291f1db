"""Prompts and traces in: turns what the user declares into requests with arrival times.

Knows no model: text becomes token ids through a ``Codec`` that the caller brings. Sends nothing.
"""

from dejavu.workload.asks import CHAT, COMPLETIONS, Ask, load_asks
from dejavu.workload.codec import Codec, Message
from dejavu.workload.lengths import RequestLength, request_lengths
from dejavu.workload.loading import check, load

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "Ask",
    "Codec",
    "Message",
    "RequestLength",
    "check",
    "load",
    "load_asks",
    "request_lengths",
]
