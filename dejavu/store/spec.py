"""Where etcd is and how to be let in: the one value that every store object is built from."""

from __future__ import annotations

import re

import msgspec

from dejavu.errors import ConfigError

_ENDPOINT = re.compile(r"^(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):(\d{1,5})$")


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach etcd. It travels to child processes as JSON through a pipe; the password is not in its repr.

    ``timeout_s`` bounds every call, all endpoints together. Raises ConfigError on values that cannot work.
    """

    endpoints: tuple[str, ...]
    """``host:port`` of each member; an IPv6 host stands in brackets."""
    ca_cert: str | None = None
    """PEM file of the authority that signed the server's certificate; given, TLS is used."""
    cert: str | None = None
    """PEM file of the client's certificate, where the server asks for one."""
    key: str | None = None
    """PEM file of the key of ``cert``."""
    user: str | None = None
    password: str | None = None
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("store.endpoints is empty: name at least one etcd member as host:port")
        for endpoint in self.endpoints:
            found = _ENDPOINT.match(endpoint)
            if found is None or not 0 < int(found.group(2)) < 65536:
                raise ConfigError(f"store.endpoints: {endpoint!r} is not host:port (no scheme, no path)")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("store.cert and store.key belong together: give both or neither")
        if self.cert is not None and self.ca_cert is None:
            raise ConfigError("store.cert is given without store.ca_cert: TLS needs the authority's certificate")
        if (self.user is None) != (self.password is None):
            raise ConfigError("store.user and store.password belong together: give both or neither")
        if self.timeout_s <= 0:
            raise ConfigError(f"store.timeout_s is {self.timeout_s}: it must be above 0")

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.password is not None:
            shown["password"] = "***"
        return f"StoreSpec({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
