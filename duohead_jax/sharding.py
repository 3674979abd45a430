"""Mesh axes over which the vocabulary or the sequences are split."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax


class Axes(NamedTuple):
    """The axis names of a call, None where nothing is split."""

    vocab: str | None = None
    sequence: str | None = None

    def start(self, width: int) -> Any:
        """The first column of this shard."""
        return 0 if self.vocab is None else jax.lax.axis_index(self.vocab) * width

    def match(self, gradient: jax.Array, logits: jax.Array) -> jax.Array:
        """The gradient with the logits' type."""
        return gradient
