"""From tokens to one scalar: every reduction is a weight per token (MATH §5)."""

from __future__ import annotations

from typing import Any

Array = Any


def inverse(xp: Any, count: Array) -> Array:
    """1 / count, and 0 for a count of 0: nothing valid gives loss 0 and gradient 0."""
    some = count != 0  # NaN stays NaN
    return xp.where(some, 1.0 / xp.where(some, count, xp.ones_like(count)), 0.0)


def token_weights(
    xp: Any,
    reduction: str,
    *,
    num_tokens: Array,
    num_sequences: Array | None,
    denominator: Array | None,
    length: Array | None,
) -> Array:
    """The weight of a valid token; ``length`` is that of its sequence (0: it belongs to none)."""
    if reduction == "token_mean":
        return inverse(xp, num_tokens)
    if reduction == "sum":
        return xp.ones_like(num_tokens)
    if reduction == "constant":
        return inverse(xp, denominator)
    if reduction == "sequence_mean_token_sum":
        return xp.where(length != 0, inverse(xp, num_sequences), 0.0)
    return inverse(xp, num_sequences) * inverse(xp, length)


def sequence_weights(
    xp: Any,
    reduction: str,
    *,
    num_tokens: Array,
    num_sequences: Array,
    denominator: Array | None,
    lengths: Array,
) -> Array:
    """The summed weight of each sequence's tokens, which all carry the sequence's value."""
    if reduction == "sequence_mean_token_mean":
        return xp.where(lengths != 0, inverse(xp, num_sequences), 0.0)
    return lengths * token_weights(
        xp,
        reduction,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        denominator=denominator,
        length=lengths,
    )


def item_weight(xp: Any, reduction: str, *, count: Array, denominator: Array | None) -> Array:
    """The weight of each preference pair, or of each sequence where a sequence counts once."""
    if reduction == "sum":
        return xp.ones_like(count)
    if reduction == "constant":
        return inverse(xp, denominator)
    return inverse(xp, count)
