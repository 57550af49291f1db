"""Asks libucp which transports a connection really uses; the Python bindings do not tell."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

_FIELD_TRANSPORTS = 1 << 3
_MOST_LANES = 16


class _TransportEntry(ctypes.Structure):
    _fields_ = (("transport_name", ctypes.c_char_p), ("device_name", ctypes.c_char_p))


class _Transports(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.POINTER(_TransportEntry)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    )


class _EndpointAttributes(ctypes.Structure):
    """``ucp_ep_attr_t`` of UCX 1.12 and later (ucp.h)."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("transports", _Transports),
        ("user_data", ctypes.c_void_p),
    )


def endpoint_lanes(endpoint_handle: int) -> tuple[str, ...]:
    """``transport/device`` of each lane, e.g. ``("tcp/lo",)``; empty where libucp cannot be asked.

    On the thread that owns the endpoint, while it is alive.
    """
    try:
        query = ctypes.CDLL("libucp.so.0").ucp_ep_query
    except (OSError, AttributeError):
        logger.debug("libucp.so.0 has no ucp_ep_query here; the lanes of links stay unknown")
        return ()
    query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
    query.restype = ctypes.c_int
    entries = (_TransportEntry * _MOST_LANES)()
    attributes = _EndpointAttributes(field_mask=_FIELD_TRANSPORTS)
    attributes.transports.entries = entries
    attributes.transports.num_entries = _MOST_LANES
    attributes.transports.entry_size = ctypes.sizeof(_TransportEntry)
    if query(endpoint_handle, ctypes.byref(attributes)) != 0:
        return ()
    used = entries[: attributes.transports.num_entries]
    # The lane that only sets up connections has no device.
    lanes = (f"{entry.transport_name.decode()}/{entry.device_name.decode()}" for entry in used if entry.device_name)
    return tuple(dict.fromkeys(lanes))
