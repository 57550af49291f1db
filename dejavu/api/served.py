"""The model that is served, as clients may ask for it."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.models.tokenizer import TextCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the API tells of the model, and what it needs to speak its language."""

    id: str
    created_s: int
    """Seconds since the Unix epoch."""
    max_length: int
    """Most tokens of a request, prompt and answer together."""
    codec: TextCodec | None
    """None: prompts are given as tokens, and answers have no text."""

    def card(self) -> dict[str, object]:
        """The model's object in ``/v1/models``."""
        return {
            "id": self.id,
            "object": "model",
            "created": self.created_s,
            "owned_by": "dejavu",
            "max_model_len": self.max_length,
        }
