"""The sizes of a model, which are all that a plan needs of it: bytes of weights and of KV, operations of a token."""

from __future__ import annotations

from dataclasses import dataclass

from dejavu.config.planning import ShapeConfig
from dejavu.kv.layout import DTYPE_BYTES, LayerRange
from dejavu.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model's sizes. Parameters are counted by number, not by byte."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    max_length: int
    """Most positions of a row, prompt and new tokens together."""
    layer_parameters: int
    embedding_parameters: int
    """Of what the first stage holds beside its layers."""
    head_parameters: int
    """Of what the last stage holds beside its layers; a tied head counts."""
    model_hash: str | None = None
    """Of its weights; None where only the sizes are known."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a parameter, and of an element of KV."""
        return DTYPE_BYTES[self.dtype]

    @property
    def layer_weight_bytes(self) -> int:
        """W0."""
        return self.layer_parameters * self.dtype_bytes

    @property
    def position_bytes(self) -> int:
        """K and V of one token of one row in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token of one row in all layers."""
        return self.num_layers * self.position_bytes

    @property
    def num_parameters(self) -> int:
        """Of the whole model in one piece; a tied head counts twice, since first and last stage hold it."""
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def weight_bytes(self, layers: LayerRange, *, is_first: bool, is_last: bool) -> int:
        """Weights of a stage with these layers."""
        parameters = len(layers) * self.layer_parameters
        parameters += self.embedding_parameters if is_first else 0
        parameters += self.head_parameters if is_last else 0
        return parameters * self.dtype_bytes


def shape_of_spec(name: str, spec: ModelSpec) -> ModelShape:
    """The sizes of a model that lies in a folder."""
    return ModelShape(
        name=name,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        dtype=spec.dtype,
        max_length=spec.max_length,
        layer_parameters=spec.layer_parameters,
        embedding_parameters=spec.embedding_parameters,
        head_parameters=spec.head_parameters,
        model_hash=spec.model_hash if spec.folder else None,
    )


def spec_of_shape(shape: ModelShape) -> ModelSpec:
    """A model of which only the sizes are known, as plans know it: it lies nowhere, and no token ends its text."""
    return ModelSpec(
        folder="",
        family=shape.name,
        dtype=shape.dtype,
        max_length=shape.max_length,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
        model_hash=shape.model_hash or shape.name,
        layer_parameters=shape.layer_parameters,
        embedding_parameters=shape.embedding_parameters,
        head_parameters=shape.head_parameters,
    )


def shape_of_sizes(name: str, sizes: ShapeConfig, *, dtype: str, max_length: int) -> ModelShape:
    """The sizes of a published model, counted from its dimensions; validated beforehand."""
    hidden, head_dim = sizes.hidden_size, sizes.head_dim or sizes.hidden_size // sizes.num_heads
    bias = 1 if sizes.has_biases else 0
    num_kv_heads = sizes.num_kv_heads or sizes.num_heads
    query, keys = sizes.num_heads * head_dim, num_kv_heads * head_dim
    attention = (hidden + bias) * (query + 2 * keys) + (query + bias) * hidden
    feed_forward = sizes.feed_forward_matrices * hidden * sizes.feed_forward_size
    feed_forward += bias * ((sizes.feed_forward_matrices - 1) * sizes.feed_forward_size + hidden)
    norm = (1 + bias) * hidden
    embedding = sizes.vocab_size * hidden
    return ModelShape(
        name=name,
        num_layers=sizes.num_layers,
        hidden_size=hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=sizes.vocab_size,
        dtype=dtype,
        max_length=max_length,
        layer_parameters=attention + feed_forward + 2 * norm,
        embedding_parameters=embedding + (sizes.num_positions or 0) * hidden,
        head_parameters=embedding + norm,
    )
