"""Differentiable row statistics for losses of a user's own: which ones, and the plan that computes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from duohead import checks
from duohead.engine import Collectives, statistics_of
from duohead.fields import Number
from duohead.plan import Given, Plan, Planner
from duohead.statistics import Columns, Inputs, Normalisers, Statistics, fold
from duohead.term import STATISTICS, TEACHER_STATISTICS
from duohead.terms import Distillation

Array = Any
ALL = (*STATISTICS, *TEACHER_STATISTICS)


class TokenStatistics(NamedTuple):
    """Statistics per token, in nats; None where not asked for, 0 on masked rows."""

    logprob: Array = None
    lse: Array = None
    entropy: Array = None
    mean_logprob: Array = None
    teacher_cross_entropy: Array = None
    forward_kl: Array = None
    reverse_kl: Array = None
    jsd: Array = None


class StatisticsPlan(NamedTuple):
    """A plan with the keys of the statistics that were asked for, in the order of ``names``."""

    plan: Plan
    names: tuple[str, ...]
    keys: tuple[tuple[Any, ...], ...]


def plan_statistics(
    names: Sequence[str],
    *,
    has_labels: bool,
    teachers: Mapping[str, Any],
    temperature: Number,
    student_temperature: Number,
    jsd_beta: Number,
    logits_scale_factor: Number,
    final_logit_softcap: Number | None,
) -> tuple[StatisticsPlan, list[Number]]:
    """The plan of some statistics of one softmax, and the values of its hyperparameters.

    Raises:
        ValueError: an unknown statistic, or one that needs labels or a teacher that were not given.
    """
    names = checks.check_names("statistics", names, ALL)
    checks.check_scale(logits_scale_factor, final_logit_softcap)
    if "logprob" in names and not has_labels:
        raise ValueError("labels: the statistic 'logprob' needs them, none were given")
    wanted = [name for name in names if name in TEACHER_STATISTICS]
    if wanted and len(teachers) != 1:
        raise ValueError(f"teacher_logits: the statistic {wanted[0]!r} needs one teacher, got {len(teachers)}")
    loss = Distillation(
        reference_model=next(iter(teachers), "teacher"),
        temperature=temperature,
        student_temperature=student_temperature,
        jsd_beta=jsd_beta,
    )
    planner = Planner(Given(frozenset(), tuple(teachers), ()), logits_scale_factor, final_logit_softcap)
    keys: list[tuple[Any, ...]] = []
    beta = planner.slot(jsd_beta) if "jsd" in names else -1
    for name in names:
        if name in TEACHER_STATISTICS:
            index = planner.pairing(loss, name, beta)
            if name == "jsd":
                # β = 0 and 1 mean forward and reverse KL, so both are needed.
                planner.pairing(loss, "forward_kl", -1)
                planner.pairing(loss, "reverse_kl", -1)
            keys.append((name, index, beta) if name == "jsd" else (name, index))
        else:
            keys.append((name, planner.softmax(loss.student_scale, name)))
    return StatisticsPlan(planner.plan(()), tuple(names), tuple(keys)), planner.hyper


def evaluate_statistics(
    xp: Any,
    wanted: StatisticsPlan,
    hyper: Sequence[Array],
    logits: Array,
    inputs: Inputs,
    columns: Columns,
    collectives: Collectives | None = None,
    split_vocab: bool = False,
) -> tuple[list[Array], Statistics, Normalisers]:
    """The values asked for (0 on masked rows), and what ``fold_statistics`` needs."""
    statistics, normalisers = statistics_of(xp, wanted.plan, hyper, logits, inputs, columns, collectives, split_vocab)
    values = []
    for key in wanted.keys:
        value = statistics[key]
        if key[0] == "jsd":
            beta = hyper[key[2]]
            value = xp.where(beta <= 0, statistics["forward_kl", key[1]], value)
            value = xp.where(beta >= 1, statistics["reverse_kl", key[1]], value)
        values.append(xp.where(inputs.valid, value, xp.zeros_like(value)))
    return values, statistics, normalisers


def fold_statistics(
    xp: Any,
    wanted: StatisticsPlan,
    hyper: Sequence[Array],
    statistics: Statistics,
    inputs: Inputs,
    columns: Columns,
    upstream: Sequence[Array | None],
) -> Any:
    """The write's coefficients from the cotangents of the statistics."""
    cotangents: dict[tuple[Any, ...], Array] = {}

    def add(key: tuple[Any, ...], value: Array) -> None:
        cotangents[key] = cotangents[key] + value if key in cotangents else value

    for key, given in zip(wanted.keys, upstream, strict=True):
        if given is None:
            continue
        value = xp.where(inputs.valid, given, xp.zeros_like(given))
        if key[0] != "jsd":
            add(key, value)
            continue
        beta, zero = hyper[key[2]], xp.zeros_like(value)
        add(("forward_kl", key[1]), xp.where(beta <= 0, value, zero))
        add(("reverse_kl", key[1]), xp.where(beta >= 1, value, zero))
        add(key, xp.where((beta > 0) & (beta < 1), value, zero))
    return fold(xp, wanted.plan, hyper, statistics, cotangents, columns)
