"""The times that the declared profile gives, and the sizes of a model that is declared by them."""

from __future__ import annotations

from pathlib import Path

from dejavu.config import Config, ModelConfig, ProfileConfig, ProfileKind
from dejavu.errors import ConfigError
from dejavu.models.spec import DEFAULT_MAX_LENGTH
from dejavu.planning.costs import GivenCosts
from dejavu.planning.profile_file import choose_measured, choose_published, published_files, read_profile_file
from dejavu.planning.roofline import Device, RooflineCosts
from dejavu.planning.shape import ModelShape, shape_of_sizes
from dejavu.planning.times import Times, times_of_profile

_GB = 10**9
_TERA = 10**12


def declared_shape(model: ModelConfig) -> ModelShape:
    """The sizes of a model of which nothing else is known."""
    dtype = "float16" if model.dtype is None else model.dtype.value
    max_length = model.max_length or model.shape.num_positions or DEFAULT_MAX_LENGTH
    return shape_of_sizes(model.kind, model.shape, dtype=dtype, max_length=max_length)


def times(config: Config, shape: ModelShape, rows: int) -> Times:
    """The times that the declared profile gives. Raises ConfigError where it has none for this model."""
    profile, devices = config.profile, config.cluster.devices_per_machine
    match profile.effective_kind:
        case ProfileKind.given:
            return _given(profile, rows)
        case ProfileKind.roofline:
            return _roofline(profile, shape, devices)
        case ProfileKind.published:
            file, chosen = choose_published(
                published_files(),
                model=shape.name,
                hardware=str(profile.hardware),
                devices=devices,
                engine=profile.engine,
            )
            return times_of_profile("published", file, chosen)
        case ProfileKind.measured:
            path = Path(str(profile.path))
            file = read_profile_file(path)
            return times_of_profile("measured", file, choose_measured(file, path, shape=shape, devices=devices))


def _given(profile: ProfileConfig, rows: int) -> Times:
    if profile.prompt_time_s is None or profile.token_time_s is None:
        raise ConfigError("profile=given needs profile.prompt_time_s and profile.token_time_s")
    costs = GivenCosts(rows=rows, whole_prompt_time_s=profile.prompt_time_s, whole_token_time_s=profile.token_time_s)
    return Times(kind="given", costs=costs)


def _roofline(profile: ProfileConfig, shape: ModelShape, num_devices: int) -> Times:
    if profile.tflops is None or profile.memory_gb_per_s is None:
        raise ConfigError("profile=roofline needs profile.tflops and profile.memory_gb_per_s")
    device = Device(
        name=profile.hardware or "device",
        operations_per_s=profile.tflops * _TERA,
        memory_bytes_per_s=profile.memory_gb_per_s * _GB,
        compute_efficiency=profile.compute_efficiency,
        memory_efficiency=profile.memory_efficiency,
    )
    return Times(
        kind="roofline",
        costs=RooflineCosts(shape=shape, device=device, num_devices=num_devices),
    )
