"""Which address of this machine to publish: as named, of an interface, or the one that leads to somebody."""

from __future__ import annotations

import fcntl
import socket
import struct

from dejavu.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""Asks Linux for an interface's IPv4 address."""
_MOST_NAME_BYTES = 15


def address_of(host: str) -> str:
    """``host`` itself, or the IPv4 address of the interface that it names, such as ``eth0``.

    Raises ConfigError for an interface without an address.
    """
    if host not in {name for _, name in socket.if_nameindex()}:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", host.encode()[:_MOST_NAME_BYTES])
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise ConfigError(f"interface {host} has no IPv4 address ({error.strerror})") from error
    return socket.inet_ntoa(answer[20:24])


def check_address(key: str, host: str) -> None:
    """The address is one that links can be made to. Raises ConfigError naming ``key`` for an IPv6 address."""
    if ":" in host:
        raise ConfigError(f"{key}={host}: links are made over IPv4; name an IPv4 address, an interface or a host name")


def address_towards(endpoint: str) -> str:
    """The address from which this machine reaches ``endpoint`` (``HOST:PORT``). Sends nothing.

    Raises ConfigError where no way leads there.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{endpoint} cannot be reached from here ({error.strerror}); say host=ADDRESS") from error
