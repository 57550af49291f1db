"""A checkpoint in safetensors, whole or sharded: what it holds by its headers, and single tensors on demand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dejavu.errors import ConfigError
from dejavu.models.families import read_json

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies and what it is."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files of the model in ``folder``, ascending. Raises ConfigError when one is missing."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"model file {index} holds no weight_map")
        names = tuple(sorted({str(name) for name in weight_map.values()}))
    else:
        names = (WEIGHTS_FILE,)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        hint = _other_weights(folder)
        raise ConfigError(f"model folder {folder} lacks {', '.join(missing[:3])}" + (f"\n{hint}" if hint else ""))
    return names


def _other_weights(folder: Path) -> str:
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5"))
    return f"it holds {', '.join(others[:3])}; only safetensors are read" if others else "only safetensors are read"


def _read_header(path: Path) -> tuple[dict[str, dict[str, object]], int]:
    """The header of a safetensors file (tensor name -> dtype, shape, data_offsets) and the offset of its data."""
    try:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            if not 0 < num_bytes <= _MAX_HEADER_BYTES:
                raise ValueError(f"header of {num_bytes} B")
            header = json.loads(file.read(num_bytes))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model file {path} is no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header, 8 + num_bytes


class Checkpoint:
    """The tensors of the model in a folder, by name. Reading headers needs neither torch nor much time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = weight_files(folder)

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by the name that the checkpoint gives it."""
        found: dict[str, TensorInfo] = {}
        for name in self.files:
            path = self.folder / name
            header, data_start = _read_header(path)
            for tensor, entry in header.items():
                start, stop = (int(offset) for offset in entry["data_offsets"])  # type: ignore[attr-defined]
                found[tensor] = TensorInfo(
                    file=name,
                    dtype=str(entry["dtype"]),
                    shape=tuple(int(size) for size in entry["shape"]),  # type: ignore[attr-defined]
                    start=data_start + start,
                    num_bytes=stop - start,
                )
            last = max((info.start + info.num_bytes for info in found.values() if info.file == name), default=0)
            if path.stat().st_size < last:
                raise ConfigError(f"model file {path} is cut short: {path.stat().st_size} B of {last} B")
        return found

    def find(self, names: Iterable[str]) -> str | None:
        """The first of ``names`` that the checkpoint holds."""
        return next((name for name in names if name in self.tensors), None)

    def load(self, name: str) -> Tensor:
        """An own copy of one tensor on the CPU, in the checkpoint's dtype; no page of the file stays mapped."""
        from safetensors import safe_open

        with safe_open(str(self.folder / self.tensors[name].file), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        # The pages are mapped from the file: served as they are, the first steps would fault them in one by one.
        return tensor.clone()
