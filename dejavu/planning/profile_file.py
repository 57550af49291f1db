"""Profiles as files: what was measured, where, by whom; read into costs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from dejavu.errors import ConfigError, nearest
from dejavu.planning.fits import FitCosts
from dejavu.planning.interpolation import PointCosts
from dejavu.planning.shape import ModelShape

# The upper bounds are beyond any machine; within them no product of two leaves the range of numbers.
Rows = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Tokens = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e9)]
Coefficient = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]
Fit = tuple[Coefficient, Coefficient, Coefficient]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one kind of machine: points, or coefficients of fits. Times in seconds, of the whole model."""

    model: str
    hardware: str
    devices: Rows
    """Of the machine, sharing every layer."""
    engine: str
    """What computed."""
    model_hash: str | None = None
    """Of the weights, since names such as ``hub`` and ``local`` say nothing of them; None: unknown."""
    dtype: str | None = None
    """Of the computation; None: unknown."""
    prompt_points: tuple[tuple[Rows, Tokens, Seconds], ...] = ()
    step_points: tuple[tuple[Rows, Tokens, Seconds], ...] = ()
    prompt_fit: Fit | None = None
    step_fit: Fit | None = None
    many_rows_fit: Fit | None = None
    many_rows_from: int = 0
    copy_bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | None = None
    """KV of rows from the host to the device; None: not measured."""

    @property
    def label(self) -> str:
        """``opt-66b on 2 x a100-80gb (vllm)``."""
        return f"{self.model} on {self.devices} x {self.hardware} ({self.engine})"


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Profiles of one origin."""

    source: str
    licence: str
    profiles: tuple[Profile, ...]


def read_profile_file(path: Path) -> ProfileFile:
    """The file's profiles. Raises ConfigError naming the path and what is wrong in it."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ProfileFile)
    except OSError as error:
        raise ConfigError(f"profile.path={path}: cannot be read ({error.strerror})") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"profile.path={path}: is no profile file ({error})") from error
    if not found.profiles:
        raise ConfigError(f"profile.path={path}: holds no profile")
    return found


def published_files() -> tuple[ProfileFile, ...]:
    """The profiles that come with the program, by the name of their file."""
    folder = resources.files("dejavu.conf") / "profile" / "published"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".json"))
    return tuple(msgspec.json.decode((folder / name).read_bytes(), type=ProfileFile) for name in names)


def choose_measured(file: ProfileFile, path: Path, *, shape: ModelShape, devices: int) -> Profile:
    """The file's profile of the model in its dtype. Raises ConfigError naming what there is instead."""
    model, differences = shape.name, []
    for profile in file.profiles:
        if (profile.model, profile.devices) != (model, devices):
            continue
        difference = _difference(profile, shape)
        if difference is None:
            return profile
        differences.append(difference)
    if differences:
        raise ConfigError(
            f"profile.path={path}: {'; '.join(differences)}\nmeasure this one with workflow=profile model={model}"
        )
    there = ", ".join(profile.label for profile in file.profiles)
    raise ConfigError(
        f"profile.path={path}: nothing of model={model} on machines of {devices} device(s)\nit has {there}"
    )


def _difference(profile: Profile, shape: ModelShape) -> str | None:
    """Why a profile of the same name is one of something else; None: as far as is known it is not."""
    for what, measured, wanted in (
        ("weights with the hash", profile.model_hash, shape.model_hash),
        ("the dtype", profile.dtype, shape.dtype),
    ):
        if measured is not None and wanted is not None and measured != wanted:
            return f"model={profile.model} was measured with {what} {measured}, and this one has {wanted}"
    return None


def choose_published(
    files: Sequence[ProfileFile], *, model: str, hardware: str, devices: int, engine: str | None
) -> tuple[ProfileFile, Profile]:
    """The first profile that fits. Raises ConfigError naming what there is instead."""
    known = [(file, profile) for file in files for profile in file.profiles]
    of_model = [one for one in known if one[1].model == model]
    if not of_model:
        names = {profile.model for _, profile in known}
        raise ConfigError(f"profile=published knows nothing of model={model}\n{nearest(model, names)}")
    for file, profile in of_model:
        wanted = (hardware, devices, engine or profile.engine)
        if (profile.hardware, profile.devices, profile.engine) == wanted:
            return file, profile
    suffix = f" ({engine})" if engine else ""
    there = sorted({f"{one.devices} x {one.hardware} ({one.engine})" for _, one in of_model})
    raise ConfigError(
        f"profile=published knows nothing of model={model} on {devices} x {hardware}{suffix}\n"
        f"there are: {', '.join(there)}\nset cluster.devices_per_machine, profile.hardware and profile.engine"
    )


def profile_costs(file: ProfileFile, profile: Profile) -> PointCosts | FitCosts:
    """Times out of the profile. Raises ConfigError for one that has neither points nor fits of both kinds."""
    source = f"{profile.label}. {file.source}"
    if profile.prompt_points and profile.step_points:
        return PointCosts(source, profile.prompt_points, profile.step_points)
    if profile.prompt_fit is None or profile.step_fit is None:
        raise ConfigError(f"the profile of {profile.label} has no times of prompts and of steps")
    return FitCosts(
        source=source,
        prompt_fit=profile.prompt_fit,
        step_fit=profile.step_fit,
        many_rows_fit=profile.many_rows_fit or profile.step_fit,
        many_rows_from=profile.many_rows_from or 2**31,
    )
