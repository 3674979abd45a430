"""The source of what happens to one row around its sweeps: its place, statistics, and what is saved for the write."""

from __future__ import annotations

from collections.abc import Iterable

from duohead.kernels import sweeps
from duohead.kernels.layout import saved_names
from duohead.plan import Plan
from duohead.statistics import rows_of


def place(has_labels: bool, sharded: bool, needs_label: bool) -> list[str]:
    """The row's label: is it past the vocabulary, and at which of these columns is it?"""
    if not has_labels:
        return []
    lines = [
        "label = tl.load(labels + row, mask=valid_row, other=0).to(tl.int64)",
        "bad = valid_row & (label >= size)",
    ]
    if needs_label:
        lines.append("place = label - start" if sharded else "place = label")
        lines.append("owned = valid_row & (place >= 0) & (place < real)")
    return lines


def partial_rows(plan: Plan) -> dict[tuple[str, int], str]:
    """The rows of ``duohead.statistics.rows_of`` as expressions in the sweep's sums."""
    found: dict[tuple[str, int], str] = {}
    for i, _ in enumerate(plan.softmaxes):
        found["max", i] = f"tl.where(s{i} == 0.0, -INFINITY, top * scale{i})"
        found["sum", i] = f"s{i}"
        found["label", i] = f"tl.where(owned & (label_logit != top), (label_logit - top) * scale{i}, 0.0)"
        found["weighted", i] = f"h{i} * LN2"
        found["total", i] = f"total * scale{i}"
        found["count", i] = "count"
    for k, teacher in enumerate(plan.teachers):
        found["teacher_max", k] = f"tl.where(t{k} == 0.0, -INFINITY, top_y{teacher.array} * teacher_scale{k})"
        found["teacher_sum", k] = f"t{k}"
    for j, _ in enumerate(plan.pairings):
        found["teacher_cross_entropy", j] = f"ce{j} * LN2"
        found["forward_kl", j] = f"fk{j} * LN2"
        found["reverse_kl", j] = f"rk{j} * LN2"
    return found


def store_partial_rows(plan: Plan) -> list[str]:
    """Stores the partial rows for the array code between two launches; a row that does not exist is as zeros are."""
    expressions = partial_rows(plan)
    lines = []
    for n, key in enumerate(rows_of(plan)):
        other = "1.0" if key[0] in ("sum", "teacher_sum") else "0.0"
        lines.append(f"tl.store(rows + {n} * count_rows + row, tl.where(valid_row, {expressions[key]}, {other}))")
    return lines


def statistics(plan: Plan, has_labels: bool) -> list[str]:
    """The whole vocabulary's row → statistics and normalisers, as in ``duohead.statistics.finish``."""
    lines = []
    log = "tl.where(bad, float('nan'), tl.log(s{i}))" if has_labels else "tl.log(s{i})"
    for i, softmax in enumerate(plan.softmaxes):
        lines += [
            f"top{i} = top * scale{i}",
            f"log_sum{i} = {log.format(i=i)}",
            f"lse{i} = tl.where(s{i} == 0.0, -INFINITY, top{i} + log_sum{i})",
            # A row of -inf alone is taken relative to 0.
            f"top{i} = tl.where(s{i} == 0.0, 0.0, top{i})",
            f"log2_sum{i} = log_sum{i} * LOG2E",
        ]
        if softmax.logprob:
            lines += [
                # Compared, not subtracted: contracted with the cap's product, the difference at the top is not 0.
                f"at_label{i} = tl.where(owned & (label_logit != top), (label_logit - top) * scale{i}, 0.0)",
                f"logprob{i} = at_label{i} - log_sum{i}",
                f"is_top{i} = tl.where(at_label{i} == 0.0, 1.0, 0.0)",
            ]
        if softmax.entropy:
            lines.append(f"entropy{i} = log_sum{i} - h{i} * LN2 / s{i}")
        if softmax.mean_logprob:
            lines += [
                f"share{i} = count / size",
                f"mean_logprob{i} = (total * scale{i} - count * log_sum{i}) / size",
            ]
    for k, teacher in enumerate(plan.teachers):
        lines += [
            f"teacher_top{k} = tl.where(t{k} == 0.0, 0.0, top_y{teacher.array} * teacher_scale{k})",
            f"teacher_log_sum{k} = tl.log(t{k})",
            f"teacher_log2_sum{k} = teacher_log_sum{k} * LOG2E",
        ]
    for j, pairing in enumerate(plan.pairings):
        i, k = pairing.softmax, pairing.teacher
        if pairing.teacher_cross_entropy:
            lines.append(f"teacher_cross_entropy{j} = log_sum{i} - ce{j} * LN2 / t{k}")
        if pairing.forward_kl:
            lines.append(f"forward_kl{j} = fk{j} * LN2 / t{k} - (teacher_log_sum{k} - log_sum{i})")
        if pairing.reverse_kl:
            lines.append(f"reverse_kl{j} = rk{j} * LN2 / s{i} - (log_sum{i} - teacher_log_sum{k})")
    return lines


def load_normalisers(plan: Plan) -> list[str]:
    """The saved normalisers, for a sweep in a launch of its own."""
    names = saved_names(plan)[: 2 * (len(plan.softmaxes) + len(plan.teachers))]
    lines = [f"{name} = tl.load(saved + {n} * count_rows + row)" for n, name in enumerate(names)]
    lines += [f"log2_sum{i} = log_sum{i} * LOG2E" for i, _ in enumerate(plan.softmaxes)]
    return lines + [f"teacher_log2_sum{k} = teacher_log_sum{k} * LOG2E" for k, _ in enumerate(plan.teachers)]


def load_coefficients(plan: Plan) -> list[str]:
    """The saved coefficients, as the first launch stored them or the array code computed them."""
    first = 2 * (len(plan.softmaxes) + len(plan.teachers))
    return [
        f"{name} = tl.load(saved + {n} * count_rows + row)" for n, name in enumerate(saved_names(plan)) if n >= first
    ]


def apply_upstream(plan: Plan) -> list[str]:
    """Multiplies every coefficient (R of the JSD is a mean, not a weight); B and C go with log2."""
    first = 2 * (len(plan.softmaxes) + len(plan.teachers))
    lines = []
    for name in saved_names(plan)[first:]:
        if name.startswith("R"):
            continue
        unit = " * LN2" if name[0] in "BC" else ""
        lines.append(f"{name} = {name} * factor{unit}")
    return lines


def store_saved(plan: Plan) -> list[str]:
    """Stores normalisers and coefficients, so that the gradient can be written again."""
    return store("saved", saved_names(plan))


def store(target: str, names: Iterable[str]) -> list[str]:
    """Stores the row's values as its column of ``target``; 0 for a row that does not exist."""
    return [
        f"tl.store({target} + {n} * count_rows + row, tl.where(valid_row, {name}, 0.0))" for n, name in enumerate(names)
    ]


def read_label_column(plan: Plan, accumulate: bool) -> list[str]:
    """The label's column, where any softmax needs its log-probability."""
    return sweeps.load_label_column(plan, accumulate) if plan.needs_labels else []


def row_pointers(plan: Plan, gradient: bool, accumulate: bool) -> list[str]:
    """Where the row begins in every array: 64-bit, whatever the tokens and the vocabulary."""
    lines = ["row_logits = logits + row * (logits_stride * UNIT)"]
    lines += [f"row_teacher{a} = teacher{a} + row * (teacher{a}_stride * UNIT)" for a in sweeps.teacher_arrays(plan)]
    lines += ["row_gradient = gradient + row * (gradient_stride * UNIT)"] if gradient else []
    return lines + (["row_old = old + row * (gradient_stride * UNIT)"] if accumulate else [])


def real_columns(padded: bool, sharded: bool) -> list[str]:
    """``real``: how many of these columns hold the vocabulary; none in a row that does not exist."""
    lines = ["columns = width * UNIT"]
    lines += ["start = tl.load(shard_start).to(tl.int64)"] if sharded else []
    if not padded:
        return [*lines, "real = columns * valid_row.to(tl.int32)"]
    first = "size - start" if sharded else "size"
    return [
        *lines,
        f"real = tl.minimum(tl.maximum({first}, 0), columns).to(tl.int32) * valid_row.to(tl.int32)",
    ]
