"""The core without a framework, whole or in shards, and what every implementation's function looks like.

Imports neither torch nor jax: the planted faults run these in fresh interpreters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from duohead import engine, numpy_namespace
from duohead.plan import Plan
from duohead.prepare import check_arguments, make_passes
from duohead.seam import seam
from duohead.spec import HeadSpec
from duohead.statistics import Columns, Inputs, add_jsd, finish, fold, merge, read, read_jsd

TYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}


class Outcome(NamedTuple):
    """What one implementation gives, in float64."""

    loss: float
    losses: dict[str, float]
    metrics: dict[str, float]
    gradient: np.ndarray


Head = Mapping[str, Any]
Arguments = Mapping[str, Any]
Run = Callable[[Head, Arguments, str], Outcome]

#: what the head's configuration holds beside its losses is given to the call
_DEFAULTS = {
    "labels": None,
    "mask": None,
    "teacher_logits": None,
    "advantages": None,
    "old_logprobs": None,
    "ref_logprobs": None,
    "importance_weights": None,
    "segment_ids": None,
    "preference_pairs": None,
    "num_segments": None,
    "num_tokens": None,
    "num_sequences": None,
    "num_pairs": None,
    "logits_scale_factor": 1.0,
    "final_logit_softcap": None,
    "vocab_size": None,
    "metrics": (),
    "tokens": (),
    "implementation": "auto",
}


def head_spec(head: Head) -> HeadSpec:
    """The HeadSpec of a configuration whose metrics are written as the oracle takes them, ``head/entropy`` too."""
    config = dict(head)
    config["metrics"] = tuple(name.removeprefix("head/") for name in head.get("metrics", ()))
    return HeadSpec.from_dict(config)


def compute_of(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


# --- the core under NumPy, whole or in shards ---


def _passes(head: Head, inputs: Arguments) -> tuple[Any, list[Any]]:
    arguments = {**_DEFAULTS, **{key: value for key, value in inputs.items() if key != "logits"}}
    checked = check_arguments(inputs["logits"], losses=head_spec(head), **arguments)
    return checked, make_passes(checked)


def _valid(labels: Any, mask: Any, logits: Any, ones: Callable[[Any], Any]) -> Any:
    if labels is None:
        return ones(logits.shape[:-1]) if mask is None else mask
    return labels >= 0 if mask is None else (labels >= 0) & mask


def run_core(
    xp: Any,
    head: Head,
    inputs: Arguments,
    hyper_of: Any,
    cuts: Sequence[int],
    ones: Callable[[Any], Any],
    own: Callable[[Any], Any],
) -> Outcome:
    """One pass over the columns between ``cuts``: read by each shard, merged, and written by each shard.

    ``ones`` makes a mask, ``own`` the framework's array of a NumPy one.
    """
    logits = inputs["logits"]
    checked, passes = _passes(head, inputs)
    item = passes[0]
    size = logits.shape[-1] if checked.vocab_size is None else checked.vocab_size
    padded = size < logits.shape[-1]
    hyper = hyper_of(item.hyper, logits)
    valid = _valid(checked.labels, checked.mask, logits, ones)
    shards = _shards(item, checked, valid, logits, size, padded, cuts)
    evaluation = _evaluate_shards(xp, item.plan, hyper, shards, own)
    one = xp.ones_like(evaluation.loss)
    written = [
        engine.gradient(
            xp, item.plan, hyper, part, given, columns, evaluation.normalisers, evaluation.coefficients, one
        )
        for part, given, columns in shards
    ]
    gradient = xp.cast(xp.cast(xp.concatenate(written), logits.dtype), xp.compute_dtype(logits))
    return outcome(evaluation.loss, evaluation.aux, gradient)


def _shards(
    item: Any, checked: Any, valid: Any, logits: Any, size: int, padded: bool, cuts: Sequence[int]
) -> list[tuple[Any, Inputs, Columns]]:
    edges = [0, *cuts, logits.shape[-1]]
    return [
        (
            logits[..., a:b],
            Inputs(
                checked.labels,
                valid,
                tuple(teacher[..., a:b] for teacher in item.teachers),
                item.tokens,
                checked.segment_ids,
                checked.preference_pairs,
                checked.num_segments,
            ),
            Columns(a, size, padded),
        )
        for a, b in pairwise(edges)
    ]


def _evaluate_shards(
    xp: Any, plan: Plan, hyper: Any, shards: Sequence[tuple[Any, Inputs, Columns]], own: Callable[[Any], Any]
) -> Any:
    part, inputs, columns = shards[0]
    if len(shards) == 1:
        return engine.evaluate(xp, plan, hyper, part, inputs, columns)
    packed = xp.stack([xp.stack(read(xp, plan, hyper, *shard)) for shard in shards])
    starts = np.array([columns.start for _, _, columns in shards])
    ends = starts + np.array([part.shape[-1] for part, _, _ in shards])
    rows = merge(xp, plan, packed, inputs.labels, own(starts), own(ends))
    statistics, normalisers = finish(xp, plan, rows, inputs, columns)
    if plan.has_jsd:
        second = [read_jsd(xp, plan, hyper, *shard, normalisers) for shard in shards]
        add_jsd(plan, [xp.sum_first(xp.stack(list(row))) for row in zip(*second, strict=True)], statistics)
    result = seam(xp, plan, hyper, statistics, inputs)
    coefficients = fold(xp, plan, hyper, statistics, result.cotangents, columns)
    return engine.Evaluation(result.loss, result.aux, normalisers, coefficients)


def outcome(loss: Any, aux: Any, gradient: Any) -> Outcome:
    """An outcome in float64 from what a framework gives."""
    return Outcome(float(loss), _numbers(aux.losses), _numbers(aux.metrics), np.asarray(gradient, np.float64))


def cuts_of(columns: int, shards: int) -> list[int]:
    """Uneven edges: the first shard takes what is left over; no more shards than columns."""
    shards = min(shards, columns)
    width = columns // shards
    return [columns - width * k for k in range(shards - 1, 0, -1)]


class Float32:
    """The NumPy namespace computing in float32, as the frameworks do for float32 and bfloat16 logits."""

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy_namespace, name)

    def compute_dtype(self, array: Any) -> Any:
        return np.float32


def numpy_shards(shards: int, xp: Any = numpy_namespace) -> Run:
    """The core with no framework, its vocabulary in shards: in float64 whatever the dtype, or in float32."""
    number = np.float64 if xp is numpy_namespace else np.float32

    @np.errstate(all="ignore")
    def run(head: Head, inputs: Arguments, dtype: str) -> Outcome:
        given = dict(inputs)
        if number is np.float32:
            given["logits"] = given["logits"].astype(TYPES[dtype])
        cuts = cuts_of(given["logits"].shape[-1], shards)
        ones = lambda shape: np.ones(shape, bool)  # noqa: E731
        return run_core(xp, head, given, lambda values, _: [number(v) for v in values], cuts, ones, np.asarray)

    return run
