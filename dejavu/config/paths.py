"""Whether the paths of a declaration exist, and what the user may have meant where one does not."""

from __future__ import annotations

from pathlib import Path

from dejavu.config.schema import Config
from dejavu.errors import ConfigError, nearest

MOST_NAMES = 200


def check_paths(config: Config) -> None:
    """Every folder and file that ``config`` names is there. Raises ConfigError for the first that is not."""
    if config.model.path is not None:
        require_folder("model.path", Path(config.model.path))
    for key in ("ca_cert", "cert", "key"):
        path = getattr(config.store, key)
        if path is not None:
            require_file(f"store.{key}", Path(path))
    for key in ("tls_cert", "tls_key"):
        path = getattr(config.serve, key)
        if path is not None:
            require_file(f"serve.{key}", Path(path))
    if config.bench.ca_cert is not None:
        require_file("bench.ca_cert", Path(config.bench.ca_cert))


def require_folder(key: str, path: Path) -> None:
    """``path`` is a folder. Raises ConfigError naming ``key`` and the nearest existing path."""
    if not path.exists():
        raise ConfigError(f"{key}={path}: no such folder\n{nearest_path(path)}")
    if not path.is_dir():
        raise ConfigError(f"{key}={path}: is a file, and a folder is needed")


def require_file(key: str, path: Path) -> None:
    """``path`` is a readable file. Raises ConfigError naming ``key`` and the nearest existing path."""
    if not path.exists():
        raise ConfigError(f"{key}={path}: no such file\n{nearest_path(path)}")
    if path.is_dir():
        raise ConfigError(f"{key}={path}: is a folder, and a file is needed")
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{key}={path}: cannot be read ({error.strerror})") from error


def nearest_path(path: Path) -> str:
    """One line: the deepest folder of ``path`` that exists and the names in it that come nearest."""
    missing = path
    while not missing.parent.exists():
        missing = missing.parent
    folder = missing.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir())[:MOST_NAMES]
    except OSError:
        names = []
    if not names:
        return f"{folder} is empty or cannot be read"
    hint = nearest(missing.name, names)
    if hint.startswith("did"):
        return f"in {folder}: {hint}"
    return f"{folder} holds: " + ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
