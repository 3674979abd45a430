"""The launches as operators, so that ``torch.compile`` keeps them whole in its graph: arrays in, fresh arrays out."""

from __future__ import annotations

import torch

from duohead.kernels.layout import layout_of, saved_names, scalar_count
from duohead.kernels.terms import read_names
from duohead.statistics import rows_of
from duohead_torch import triton_launch
from duohead_torch.plan_key import plan_of

Tensor = torch.Tensor


def _call(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
) -> triton_launch.Call:
    return triton_launch.Call(plan_of(key), logits, valid, labels, tuple(teachers), hyper, start, size, padded)


@torch.library.custom_op("duohead::statistics", mutates_args=())
def statistics(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
) -> Tensor:
    """The partial rows of one read."""
    return triton_launch.statistics(_call(key, logits, valid, labels, teachers, hyper, start, size, padded))


@statistics.register_fake
def _(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
) -> Tensor:
    return hyper.new_empty(len(rows_of(plan_of(key))), logits.shape[0])


@torch.library.custom_op("duohead::jsd", mutates_args=())
def jsd(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    saved: Tensor,
) -> Tensor:
    """The JSD's rows."""
    return triton_launch.jsd(_call(key, logits, valid, labels, teachers, hyper, start, size, padded), saved)


@jsd.register_fake
def _(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    saved: Tensor,
) -> Tensor:
    betas = sum(len(pairing.jsd) for pairing in plan_of(key).pairings)
    return hyper.new_empty(2 * betas, logits.shape[0])


@torch.library.custom_op("duohead::fused", mutates_args=())
def fused(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    tokens: list[Tensor],
    lengths: Tensor | None,
    sequence_count: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Results, per-token rows and what the write needs: one read, no gradient."""
    call = _call(key, logits, valid, labels, teachers, hyper, start, size, padded)
    return tuple(triton_launch.fused(call, tokens, {"lengths": lengths, "sequence_count": sequence_count}))  # type: ignore[return-value]


@fused.register_fake
def _(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    tokens: list[Tensor],
    lengths: Tensor | None,
    sequence_count: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    plan, count = plan_of(key), logits.shape[0]
    return (
        hyper.new_empty(scalar_count(plan)),
        hyper.new_empty(len(layout_of(plan).stored), count),
        hyper.new_empty(len(saved_names(plan)), count),
    )


@torch.library.custom_op("duohead::sequenced", mutates_args=())
def sequenced(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    tokens: list[Tensor],
    segment_ids: Tensor,
    pairs: Tensor | None,
    num_segments: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Results, per-token rows and what the write needs, where terms are over sequences: one read, no gradient."""
    call = _call(key, logits, valid, labels, teachers, hyper, start, size, padded)
    return tuple(triton_launch.sequenced(call, tokens, triton_launch.Segments(segment_ids, pairs, num_segments)))  # type: ignore[return-value]


@sequenced.register_fake
def _(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    tokens: list[Tensor],
    segment_ids: Tensor,
    pairs: Tensor | None,
    num_segments: int,
) -> tuple[Tensor, Tensor, Tensor]:
    plan, count = plan_of(key), logits.shape[0]
    return (
        hyper.new_empty(scalar_count(plan)),
        hyper.new_empty(len(read_names(plan)), count),
        hyper.new_empty(len(saved_names(plan)), count),
    )


@torch.library.custom_op("duohead::write", mutates_args=("gradient",))
def write(
    key: str,
    logits: Tensor,
    valid: Tensor,
    labels: Tensor | None,
    teachers: list[Tensor],
    hyper: Tensor,
    start: Tensor | None,
    size: int,
    padded: bool,
    saved: Tensor,
    upstream: Tensor,
    gradient: Tensor,
    accumulate: bool,
) -> None:
    """Writes (or adds) the gradient in place."""
    call = _call(key, logits, valid, labels, teachers, hyper, start, size, padded)
    triton_launch.write(call, saved, upstream, gradient, accumulate)
