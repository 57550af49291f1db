"""etcd3 made importable beside today's protobuf. Nothing else in this package imports etcd3 by itself.

etcd3 0.12 ships modules that were generated for protobuf 3; protobuf 4 and later refuse to run them. The serialized
descriptors inside them are still good, so the message classes are built from those, in a descriptor pool of their
own (their file names, such as ``rpc.proto``, are so common that they clash in the shared pool).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import ModuleType

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.internal import enum_type_wrapper
from google.protobuf.message import DecodeError

from dejavu.errors import Fatal

# In the order of their dependencies: rpc.proto imports the other two.
_PROTO_NAMES = ("kv", "auth", "rpc")
_PACKAGE = "etcd3.etcdrpc"
_SERIALIZED = re.compile(r"^\s*serialized_pb=_b\((.*)\)\s*$", re.MULTILINE)
_IMPORT_LOCK = threading.RLock()


def import_etcd3() -> ModuleType:
    """The ``etcd3`` package, its messages built for the protobuf that is installed.

    Any thread; idempotent. Raises Fatal when etcd3 is missing or is not the release this was written for.
    """
    with _IMPORT_LOCK:
        loaded = sys.modules.get("etcd3")
        if loaded is not None and hasattr(loaded, "Etcd3Client"):
            return loaded
        before = set(sys.modules)
        sys.modules.update(build_modules(installed_folder()))
        try:
            return importlib.import_module("etcd3")
        except (ImportError, AttributeError, TypeError) as error:
            # A half-imported package would look complete to the next caller.
            for name in set(sys.modules) - before:
                if name == "etcd3" or name.startswith("etcd3."):
                    del sys.modules[name]
            raise Fatal(f"etcd3 cannot be imported ({error}); install etcd3==0.12.0 beside protobuf>=4.25") from error


def installed_folder() -> Path:
    """The folder of etcd3's generated modules, found without importing them. Raises Fatal when there is none."""
    found = importlib.util.find_spec("etcd3")
    if found is None or found.origin is None:
        raise Fatal("the package etcd3 is not installed; install etcd3==0.12.0")
    return Path(found.origin).parent / "etcdrpc"


def build_modules(folder: Path) -> dict[str, ModuleType]:
    """Modules that stand in for the generated ones in ``folder``, by their full names. Raises Fatal on a misfit."""
    pool = descriptor_pool.DescriptorPool()
    modules: dict[str, ModuleType] = {}
    for proto_name in _PROTO_NAMES:
        path = folder / f"{proto_name}_pb2.py"
        try:
            serialized = serialized_descriptor(path.read_text(encoding="utf-8"))
            pool.AddSerializedFile(serialized)
            name = FileDescriptorProto.FromString(serialized).name
            modules[f"{_PACKAGE}.{proto_name}_pb2"] = _module_of(pool.FindFileByName(name), f"{proto_name}_pb2")
        except (OSError, ValueError, SyntaxError, KeyError, TypeError, AttributeError, DecodeError) as error:
            raise Fatal(f"{path} does not fit ({error}); install etcd3==0.12.0 beside protobuf>=4.25") from error
    return modules


def serialized_descriptor(source: str) -> bytes:
    """The serialized file descriptor inside a generated module's source. Raises ValueError when there is not one."""
    found = _SERIALIZED.search(source)
    if found is None:
        raise ValueError("it holds no serialized descriptor")
    literal = ast.literal_eval(found.group(1))
    if not isinstance(literal, str):
        raise ValueError(f"its serialized descriptor is a {type(literal).__name__}, not a string")
    return literal.encode("latin1")


def _module_of(file: object, short_name: str) -> ModuleType:
    """A module that holds what protoc would have generated for ``file``: messages, enums and their values."""
    module = ModuleType(f"{_PACKAGE}.{short_name}")
    contents: dict[str, object] = {"DESCRIPTOR": file}
    for name, message in getattr(file, "message_types_by_name").items():  # noqa: B009
        contents[name] = message_factory.GetMessageClass(message)
    for name, enum in getattr(file, "enum_types_by_name").items():  # noqa: B009
        contents[name] = enum_type_wrapper.EnumTypeWrapper(enum)
        contents.update({value.name: value.number for value in enum.values})
    vars(module).update(contents)
    return module
