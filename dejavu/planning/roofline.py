"""Times from what a device can compute and read a second: whichever of the two takes longer."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.planning.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one device can do, and what part of it a model reaches."""

    name: str
    operations_per_s: float
    memory_bytes_per_s: float
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0

    @property
    def label(self) -> str:
        """Name and figures, for people."""
        return (
            f"{self.name}: {self.operations_per_s / 1e12:g} TFLOP/s at {self.compute_efficiency:g}, "
            f"{self.memory_bytes_per_s / 1e9:g} GB/s at {self.memory_efficiency:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCosts:
    """Times of a model on a machine of ``num_devices`` devices that share every layer evenly."""

    shape: ModelShape
    device: Device
    num_devices: int = 1

    @property
    def source(self) -> str:
        """For people: what the times were computed from."""
        return f"{self.num_devices} x {self.device.label}"

    def prompt_time_s(self, rows: int, tokens: float) -> float:
        """Y: every layer for every token, attention over the tokens before it, the head for the last token alone."""
        shape = self.shape
        attended = rows * tokens * tokens / 2
        operations = 2 * rows * tokens * shape.num_layers * shape.layer_parameters + self._attention(attended)
        operations += 2 * rows * shape.head_parameters
        read = self._weight_bytes + rows * tokens * shape.kv_bytes_per_token
        return self._longer_s(operations, read)

    def step_time_s(self, rows: int, context: float) -> float:
        """t: all weights are read once for all rows, and each row's KV."""
        shape = self.shape
        parameters = shape.num_layers * shape.layer_parameters + shape.head_parameters
        operations = 2 * rows * parameters + self._attention(rows * context)
        read = self._weight_bytes + rows * context * shape.kv_bytes_per_token
        return self._longer_s(operations, read)

    @property
    def _weight_bytes(self) -> float:
        shape = self.shape
        return (shape.num_layers * shape.layer_parameters + shape.head_parameters) * shape.dtype_bytes

    def _attention(self, attended: float) -> float:
        """Operations for so many pairs of a token and one before it: a product with its key, one with its value."""
        return 4 * attended * self.shape.num_heads * self.shape.head_dim * self.shape.num_layers

    def _longer_s(self, operations: float, read_bytes: float) -> float:
        device = self.device
        compute_s = operations / (device.operations_per_s * device.compute_efficiency)
        read_s = read_bytes / (device.memory_bytes_per_s * device.memory_efficiency)
        return max(compute_s, read_s) / self.num_devices
