"""The part of a pass that one stage does: for whoever has times of the whole model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShare:
    """Of a prompt's pass, its layers; of a step, its weights, which are read at every step, and its layers' KV."""

    layers: float
    weights: float
    """Of layers and head together: the last stage has the head."""

    def step_s(self, whole_s: float, shortest_s: float) -> float:
        """Of a step that takes ``whole_s`` through the whole model, and ``shortest_s`` with next to no KV to read."""
        weights_s = min(whole_s, shortest_s)
        return weights_s * self.weights + (whole_s - weights_s) * self.layers
