"""Mesh axes over which the vocabulary or the sequences are split, under ``shard_map`` or ``pmap``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from duohead.metrics import Part, combine_packed, finish, pack
from duohead_jax import namespace


class Axes(NamedTuple):
    """The axis names of a call, None where nothing is split: the engine's collectives."""

    vocab: str | None = None
    sequence: str | None = None

    @property
    def sequence_ranks(self) -> int:
        return 1 if self.sequence is None else jax.lax.axis_size(self.sequence)

    def check(self) -> None:
        """Refuses an axis that does not exist where the call stands.

        Raises:
            TypeError: not a name.
            ValueError: no axis of this name is bound here, or one axis is to split both.
        """
        for argument, axis in (("vocab_axis", self.vocab), ("sequence_axis", self.sequence)):
            if axis is not None:
                check_axis(argument, axis)
        if self.vocab is not None and self.vocab == self.sequence:
            raise ValueError(f"sequence_axis: must be another axis than vocab_axis, got {self.vocab!r} for both")

    def start(self, width: int) -> Any:
        """The first column of this shard."""
        return 0 if self.vocab is None else jax.lax.axis_index(self.vocab) * width

    def gather(self, xp: Any, rows: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """All shards' rows, typed as the same on every device of the axis, and the columns of each shard."""
        assert self.vocab is not None
        starts = jnp.arange(jax.lax.axis_size(self.vocab), dtype=jnp.int32) * width
        return _all_gather(rows, self.vocab), starts, starts + width

    def add(self, rows: jax.Array) -> jax.Array:
        """Rows added in the order of the devices, so that every device has the same bits."""
        assert self.vocab is not None
        return jnp.sum(_all_gather(rows, self.vocab), axis=0)

    def sum_sequences(self, rows: jax.Array) -> jax.Array:
        assert self.sequence is not None
        return jax.lax.psum(rows, self.sequence)

    def match(self, gradient: jax.Array, logits: jax.Array) -> jax.Array:
        """The gradient with the logits' manual axes, as a derivative rule must return it.

        Logits that are the same along an axis get the sum over it; along an axis that only they vary over, the
        gradient is declared to vary.
        """
        wanted = varying(logits)
        extra = tuple(sorted(varying(gradient) - wanted))
        if extra:
            gradient = jax.lax.psum(gradient, extra)
        return vary(gradient, wanted)


def check_axis(argument: str, axis: Any) -> None:
    if not isinstance(axis, str):
        raise TypeError(f"{argument}: must be the name of a shard_map or pmap axis, got {axis!r}")
    try:
        jax.lax.axis_size(axis)
    except NameError:
        raise ValueError(
            f"{argument}: no axis {axis!r} is bound here; call under jax.shard_map (or pmap) over an axis of that "
            "name, or leave the argument out: sharded arrays under plain jit need none"
        ) from None


def varying(array: jax.Array) -> frozenset[str]:
    """The manual axes along which shard_map's types let the array differ; none under pmap."""
    kind: Any = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def vary(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The array, declared to differ along these manual axes too."""
    missing = tuple(sorted(frozenset(axes) - varying(array)))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def _all_gather(rows: jax.Array, axis: str) -> jax.Array:
    return jax.lax.all_gather(rows, axis, to="invarying")


def global_counts(
    labels: jax.Array | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    preference_pairs: jax.Array | None = None,
    *,
    axis: str | None = None,
    sequence_axis: str | None = None,
    num_segments: int | None = None,
) -> dict[str, jax.Array]:
    """``num_tokens``, ``num_sequences``, ``num_pairs`` over a data-parallel axis, in one psum.

    Passed to ``monolithic_loss`` they make the devices' losses and gradients add up to the whole batch's (so reduce
    with psum, not pmean). Counts that the arguments do not tell are left out. The same segment id on two devices of
    ``axis`` is two sequences; on two devices of ``sequence_axis`` it is one, which costs a psum of
    ``num_segments + 1`` integers more. None: this device alone.

    >>> import jax.numpy as jnp
    >>> counts = global_counts(jnp.array([3, -100, 2]), segment_ids=jnp.array([0, 1, 4]))
    >>> {name: int(count) for name, count in counts.items()}
    {'num_tokens': 2, 'num_sequences': 2}
    """
    if labels is None and mask is None:
        raise ValueError("labels, mask: one of them is needed to count tokens, none was given")
    valid = (mask if labels is None else labels >= 0).reshape(-1)  # type: ignore[union-attr]
    if labels is not None and mask is not None:
        valid = valid & mask.reshape(-1)
    if sequence_axis is not None:
        check_axis("sequence_axis", sequence_axis)
        if segment_ids is not None and num_segments is None:
            raise ValueError("num_segments: needed where sequence_axis splits the sequences, none was given")
    ids = valid.astype(jnp.int32) - 1 if segment_ids is None else jnp.where(valid, segment_ids.reshape(-1), -1)
    bound = num_segments if sequence_axis is not None and segment_ids is not None else None
    lengths, num_tokens = _lengths(ids, bound), jnp.sum(valid)
    if sequence_axis is not None:
        summed = jax.lax.psum(jnp.concatenate([num_tokens[None], lengths]), sequence_axis)
        num_tokens, lengths = summed[0], summed[1:]
    counts = {"num_tokens": num_tokens}
    if segment_ids is not None:
        counts["num_sequences"] = jnp.sum(lengths > 0)
    if preference_pairs is not None:
        counts["num_pairs"] = jnp.sum(jnp.all(preference_pairs >= 0, axis=-1) & jnp.any(lengths > 0))
    if axis is None:
        return counts
    check_axis("axis", axis)
    return dict(zip(counts, jax.lax.psum(jnp.stack(list(counts.values())), axis), strict=True))


def _lengths(ids: jax.Array, num_segments: int | None) -> jax.Array:
    """Something above 0 for each sequence that has a token: by id, or without a bound on the ids in sorted order."""
    if num_segments is not None:
        inside = (ids >= 0) & (ids < num_segments)
        counts = jnp.zeros(num_segments + 1, ids.dtype)
        return counts.at[jnp.where(inside, ids, num_segments)].add(inside.astype(ids.dtype))[:-1]
    ordered = jnp.sort(ids)
    before = jnp.concatenate([jnp.full_like(ordered[:1], -1), ordered[:-1]])
    return ((ordered != before) & (ordered >= 0)).astype(ids.dtype)


def combine_metrics(parts: Mapping[str, Part], axis: str | None = None) -> dict[str, jax.Array]:
    """The whole batch's metrics from every device's ``aux.parts``, exactly, in one all-gather.

    Sums, counts and weights add, minima and maxima are those of all devices; one division at the end. ``axis``: the
    one over which tokens are split (data or sequence), never the vocabulary's.

    >>> import jax.numpy as jnp
    >>> from duohead.metrics import Mean
    >>> float(combine_metrics({"m": Mean(jnp.array(3.0), jnp.array(2.0))})["m"])
    1.5
    """
    if axis is not None and parts:
        check_axis("axis", axis)
        parts = combine_packed(namespace, parts, _all_gather(pack(namespace, parts), axis))
    return {name: finish(namespace, part) for name, part in parts.items()}
