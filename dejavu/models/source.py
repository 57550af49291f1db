"""Where a model comes from: checks the user's choice cheaply, then brings it into a local folder.

Importing this file, and ``check``, need neither torch nor transformers nor a network.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dejavu.errors import ConfigError, nearest
from dejavu.models.checkpoint import weight_files
from dejavu.models.families import FAMILIES, family_of, read_json
from dejavu.models.made_folder import Progress
from dejavu.models.random_shapes import SHAPES, make_random

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.json",
    "tokenizer*",
    "*.jinja",
    "merges.txt",
    "*.model",
)
_TINY = "tiny-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What the user chose: ``kind`` is one of ``kinds()``."""

    kind: str
    path: str | None = None
    """Of ``local``: a folder; a relative one counts from the current folder."""
    name: str | None = None
    """Of ``hub``: ``owner/model``."""
    revision: str | None = None
    seed: int = 0
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None


def kinds() -> tuple[str, ...]:
    """Every kind of source."""
    return ("smollm2-135m", "local", "hub", *SHAPES, *(f"{_TINY}{family}" for family in FAMILIES))


def cache_folder() -> Path:
    """The folder that keeps what is made or fetched: ``DEJAVU_CACHE``, else the user's cache folder."""
    if chosen := os.environ.get("DEJAVU_CACHE"):
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("dejavu"))


def has_tokenizer(folder: Path) -> bool:
    """True when ``folder`` can turn text into tokens; without one, prompts must be given as tokens."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def check(source: ModelSource) -> None:
    """The choice is plausible; raises ConfigError otherwise. Milliseconds, no network, no heavy import."""
    if source.kind not in kinds():
        raise ConfigError(f"model.kind: {source.kind!r} is unknown\n{nearest(source.kind, kinds())}")
    if source.kind == "local":
        _check_local(source.path)
    elif source.kind == "hub":
        _check_hub_name(source.name)
    elif source.kind.startswith(_TINY):
        _check_tiny(source)


def known_num_layers(source: ModelSource) -> int | None:
    """Layers of a model that ``check`` has passed, as far as that is known without a download; None for a hub's."""
    if source.kind == "hub":
        return None
    if source.kind == "local":
        raw = read_json(_local_folder(source.path) / "config.json")
        layers = raw.get("num_hidden_layers", raw.get("n_layer"))
        return layers if isinstance(layers, int) else None
    if source.kind.startswith(_TINY):
        return source.num_layers
    if source.kind in SHAPES:
        return SHAPES[source.kind].num_layers
    from dejavu.models.smollm2 import NUM_LAYERS

    return NUM_LAYERS


def resolve(source: ModelSource, cache: Path, progress: Progress) -> Path:
    """The local folder of the model; fetched, converted or made now if it is not in ``cache`` yet."""
    check(source)
    if source.kind == "local":
        return _local_folder(source.path)
    if source.kind == "hub":
        return _from_hub(source)
    if source.kind.startswith(_TINY):
        from dejavu.models.tiny import make_tiny

        return make_tiny(
            source.kind.removeprefix(_TINY),
            cache,
            num_layers=source.num_layers,
            seed=source.seed,
            num_heads=source.num_heads,
            num_kv_heads=source.num_kv_heads,
        )
    if source.kind in SHAPES:
        return make_random(source.kind, cache, seed=source.seed, progress=progress)
    from dejavu.models.smollm2 import make_smollm2

    return make_smollm2(cache, progress)


def _local_folder(path: str | None) -> Path:
    if not path:
        raise ConfigError("model.path: model=local needs a folder with config.json and safetensors")
    return Path(path).expanduser().absolute()


def _check_local(path: str | None) -> None:
    folder = _local_folder(path)
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ConfigError(f"model.path: {folder} {what}\n{_nearest_folder(folder)}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {folder} holds no config.json\n{_nearest_folder(folder / 'config.json')}")
    family_of(folder)
    weight_files(folder)


def _nearest_folder(missing: Path) -> str:
    """A hint: the nearest existing folder above, and its like-named members."""
    parent = next(folder for folder in missing.parents if folder.is_dir())
    try:
        names = [child.name for child in parent.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        names = []
    wanted = missing.relative_to(parent).parts[0]
    inside = f": {nearest(wanted, sorted(names)[:20])}" if names and wanted != "config.json" else ""
    return f"nearest existing folder: {parent}{inside}"


def _check_hub_name(name: str | None) -> None:
    if not name:
        raise ConfigError("model.name: model=hub needs a name such as owner/model")
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(
            f"model.name: {name!r} is not of the form owner/model; for a folder use model=local model.path="
        )


def _check_tiny(source: ModelSource) -> None:
    kv_heads = source.num_kv_heads or source.num_heads
    if source.num_layers < 1:
        raise ConfigError(f"model.num_layers: {source.num_layers} is less than 1")
    if source.num_heads < 1 or 64 % source.num_heads or source.num_heads % kv_heads or (64 // source.num_heads) % 2:
        raise ConfigError(
            f"model.num_heads: {source.num_heads} with num_kv_heads {kv_heads} does not fit a hidden size of 64\n"
            "heads: 1, 2, 4, 8, 16 or 32, and a multiple of the kv heads"
        )


def _from_hub(source: ModelSource) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(str(source.name), revision=source.revision, allow_patterns=list(_HUB_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().splitlines()[0][:200]
        raise ConfigError(
            f"model.name: {source.name} cannot be fetched from the hub: {first_line}\n"
            "check the name and the network, or give a folder with model=local model.path="
        ) from error
    family_of(Path(folder))
    return Path(folder)
