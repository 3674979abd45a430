"""The source of what touches the vocabulary: loading a tile, adding it to the statistics, writing its gradient.

A program owns a row. Its tile is ``[THREADS, UNROLL, 8]`` columns, 8 and UNROLL of them inside a thread, so that the
running maximum and sums ``[THREADS]`` stay in a thread and are rescaled once a tile; nothing crosses threads before
the sweep ends. Names in the source: ``v`` the (capped) logits of a tile, ``y0, y1 …`` the teachers' arrays, ``k0 …`` a
scale times log2 e, ``s0`` Σ e^(x − max), ``h0`` Σ e^(x − max)·(x − max) / ln 2, and per pairing ``ce0 fk0 rk0``.
"""

from __future__ import annotations

from collections.abc import Sequence

from duohead.kernels.layout import uses_entropy_slope, uses_teacher_mass
from duohead.kernels.source import indent
from duohead.plan import Plan

OFFSETS = [
    "THREADS: tl.constexpr = 32 * WARPS",
    "TILE: tl.constexpr = 8 * UNROLL * THREADS",
    "offsets = (tl.arange(0, UNROLL)[None, :, None] * (THREADS * 8) + tl.arange(0, THREADS)[:, None, None] * 8",
    "           + tl.arange(0, 8)[None, None, :])",
]


def teacher_arrays(plan: Plan) -> tuple[int, ...]:
    """The teachers' arrays that are read; several temperatures of one share its load and its maximum."""
    return tuple(sorted({teacher.array for teacher in plan.teachers}))


def has_means(plan: Plan) -> bool:
    """Whether any softmax needs the mean of its log-probabilities."""
    return any(softmax.mean_logprob for softmax in plan.softmaxes)


def scales(plan: Plan) -> list[str]:
    """Loads every scale, and the cap."""
    lines = []
    for i, softmax in enumerate(plan.softmaxes):
        lines += [f"scale{i} = tl.load(hyper + {softmax.scale})", f"k{i} = scale{i} * LOG2E"]
    for k, teacher in enumerate(plan.teachers):
        lines += [f"teacher_scale{k} = tl.load(hyper + {teacher.scale})", f"teacher_k{k} = teacher_scale{k} * LOG2E"]
    for j, pairing in enumerate(plan.pairings):
        lines += [f"beta{j}_{b} = tl.load(hyper + {slot})" for b, slot in enumerate(pairing.jsd)]
    if plan.softcap >= 0:
        lines.append(f"cap = tl.load(hyper + {plan.softcap})")
    return lines


def cap(plan: Plan, name: str = "v", inside: str | None = None) -> list[str]:
    """The softcap of loaded logits; ``inside`` masks what was not loaded, which must stay −∞."""
    if plan.softcap < 0:
        return []
    lines = [f"bend_{name} = tanh({name} / cap)", f"{name} = bend_{name} * cap"]
    return [*lines, f"{name} = tl.where({inside}, {name}, -INFINITY)"] if inside else lines


def load(plan: Plan, policy: str, inside: str | None) -> list[str]:
    """Loads a tile at column ``c`` of the logits and of every teacher."""
    mask = f", mask={inside}, other=-INFINITY" if inside else ""
    hint = f", eviction_policy='{policy}'"
    lines = [f"v = tl.load(row_logits + c + offsets{mask}{hint}).to(tl.float32)"]
    for a in teacher_arrays(plan):
        lines.append(f"y{a} = tl.load(row_teacher{a} + c + offsets{mask}{hint}).to(tl.float32)")
    return [*lines, *cap(plan, "v", inside)]


# --- the read ---------------------------------------------------------------------------------------------------------


def accumulators(plan: Plan) -> list[str]:
    """Every accumulator at its start."""
    zero = "tl.zeros([THREADS], tl.float32)"
    lowest = "tl.full([THREADS], LOWEST, tl.float32)"
    lines = [f"m = {lowest}"]
    lines += [f"my{a} = {lowest}" for a in teacher_arrays(plan)]
    return lines + [f"{name} = {zero}" for name in sums(plan)]


def sums(plan: Plan) -> list[str]:
    """The names of the running sums."""
    names = []
    for i, softmax in enumerate(plan.softmaxes):
        names.append(f"s{i}")
        names += [f"h{i}"] if softmax.entropy else []
    names += ["total", "count"] if has_means(plan) else []
    names += [f"t{k}" for k, _ in enumerate(plan.teachers)]
    for j, pairing in enumerate(plan.pairings):
        names += [f"ce{j}"] if pairing.teacher_cross_entropy else []
        names += [f"fk{j}"] if pairing.forward_kl else []
        names += [f"rk{j}"] if pairing.reverse_kl else []
    return names


def rescale(plan: Plan) -> list[str]:
    """Takes every sum from its old maximum to a new one; ``moved`` and ``moved_y0 …`` are old − new."""
    lines = []
    for i, softmax in enumerate(plan.softmaxes):
        lines += [f"step{i} = moved * k{i}", f"floor{i} = tl.maximum(step{i}, FLOOR)", f"f{i} = exp2(floor{i})"]
        if softmax.entropy:
            lines.append(f"h{i} = f{i} * (h{i} + s{i} * floor{i})")
    for k, teacher in enumerate(plan.teachers):
        lines += [f"step_y{k} = moved_y{teacher.array} * teacher_k{k}", f"fy{k} = exp2(tl.maximum(step_y{k}, FLOOR))"]
    # where, not a product: an accumulator that has seen nothing moved from LOWEST, and 0 · ∞ is not 0.
    for j, pairing in enumerate(plan.pairings):
        i, k = pairing.softmax, pairing.teacher
        if pairing.teacher_cross_entropy:
            lines.append(f"shift = tl.where(t{k} > 0.0, t{k} * step{i}, 0.0)")
            lines.append(f"ce{j} = tl.where(fy{k} > 0.0, fy{k} * (ce{j} + shift), 0.0)")
        if pairing.forward_kl:
            lines.append(f"shift = tl.where(t{k} > 0.0, t{k} * (step_y{k} - step{i}), 0.0)")
            lines.append(f"fk{j} = tl.where(fy{k} > 0.0, fy{k} * (fk{j} + shift), 0.0)")
        if pairing.reverse_kl:
            lines.append(f"shift = tl.where(s{i} > 0.0, s{i} * (step{i} - step_y{k}), 0.0)")
            lines.append(f"rk{j} = tl.where(f{i} > 0.0, f{i} * (rk{j} + shift), 0.0)")
    lines += [f"s{i} = s{i} * f{i}" for i, _ in enumerate(plan.softmaxes)]
    lines += [f"t{k} = t{k} * fy{k}" for k, _ in enumerate(plan.teachers)]
    if has_means(plan):
        lines.append("total = total + count * tl.where(count > 0.0, moved, 0.0)")
    return lines


def _within(expression: str) -> str:
    """The sum inside each thread."""
    return f"tl.sum(tl.sum({expression}, 2), 1)"


def add_tile(plan: Plan) -> list[str]:
    """New maxima, the rescale, and this tile's share of every sum."""
    lines = ["new = tl.maximum(m, tl.max(tl.max(v, 2), 1))", "moved = m - new", "m = new"]
    for a in teacher_arrays(plan):
        lines += [f"new = tl.maximum(my{a}, tl.max(tl.max(y{a}, 2), 1))", f"moved_y{a} = my{a} - new", f"my{a} = new"]
    lines += rescale(plan)
    lines.append("relative = v - m[:, None, None]")
    for i, softmax in enumerate(plan.softmaxes):
        lines += [f"d{i} = relative * k{i}", f"e{i} = exp2(d{i})", f"s{i} = s{i} + {_within(f'e{i}')}"]
        if softmax.entropy:
            lines.append(f"h{i} = h{i} + {_within(f'e{i} * tl.maximum(d{i}, FLOOR)')}")
    if has_means(plan):
        lines.append("finite = v > -INFINITY")
        lines.append(f"total = total + {_within('tl.where(finite, relative, 0.0)')}")
        lines.append(f"count = count + {_within('tl.where(finite, 1.0, 0.0)')}")
    for a in teacher_arrays(plan):
        lines.append(f"relative_y{a} = y{a} - my{a}[:, None, None]")
    for k, teacher in enumerate(plan.teachers):
        lines += [f"dy{k} = relative_y{teacher.array} * teacher_k{k}", f"q{k} = exp2(dy{k})"]
        lines.append(f"t{k} = t{k} + {_within(f'q{k}')}")
    for j, pairing in enumerate(plan.pairings):
        i, k = pairing.softmax, pairing.teacher
        if pairing.teacher_cross_entropy:
            lines.append(f"ce{j} = ce{j} + {_within(f'tl.where(q{k} > 0.0, q{k} * d{i}, 0.0)')}")
        if pairing.forward_kl:
            lines.append(f"fk{j} = fk{j} + {_within(f'tl.where(q{k} > 0.0, q{k} * (dy{k} - d{i}), 0.0)')}")
        if pairing.reverse_kl:
            lines.append(f"rk{j} = rk{j} + {_within(f'tl.where(e{i} > 0.0, e{i} * (d{i} - dy{k}), 0.0)')}")
    return lines


def across_threads(plan: Plan) -> list[str]:
    """The sums of the whole row, relative to its maximum ``top`` (``top_y0 …``)."""
    lines = ["top = tl.max(m, 0)", "moved = m - top"]
    for a in teacher_arrays(plan):
        lines += [f"top_y{a} = tl.max(my{a}, 0)", f"moved_y{a} = my{a} - top_y{a}"]
    lines += rescale(plan)
    return lines + [f"{name} = tl.sum({name}, 0)" for name in sums(plan)]


def _prefetch(plan: Plan, where: str, count: str) -> list[str]:
    lines = [f"prefetch(row_logits + {where}, {count}, logits.dtype.element_ty.primitive_bitwidth // 8)"]
    for a in teacher_arrays(plan):
        size = f"teacher{a}.dtype.element_ty.primitive_bitwidth // 8"
        lines.append(f"prefetch(row_teacher{a} + {where}, {count}, {size})")
    return lines


def sweep_forward(plan: Plan, policy: str, body: Sequence[str], ahead: bool) -> list[str]:
    """The incomplete tile, then every full one in order; ``body`` uses ``v`` (and ``y0 …``) at column ``c``."""
    first, following = [], []
    if ahead:
        first = [
            "if AHEAD:",
            "    if tiles > 0:",
            *indent(indent(_prefetch(plan, "0", "TILE"))),
        ]
        following = [
            "if AHEAD:",
            "    if tile + 1 < tiles:",
            *indent(indent(_prefetch(plan, "c + TILE", "TILE"))),
        ]
    return [
        "tiles = real // TILE",
        "edge = tiles * TILE",
        *first,
        "if edge < real:",
        *indent(["c = edge", "inside = c + offsets < real", *load(plan, policy, "inside"), *body]),
        "for tile in range(0, tiles):",
        *indent(["c = tile * TILE", *following, *load(plan, policy, None), *body]),
    ]


# --- the write --------------------------------------------------------------------------------------------------------


def log_probabilities(plan: Plan, v: str = "v", y: str = "y") -> list[str]:
    """``l0 …`` log2 p and ``p0 …`` of every softmax, ``ly0 …`` log2 q of every teacher."""
    lines = []
    for i, _ in enumerate(plan.softmaxes):
        lines += [f"l{i} = ({v} * scale{i} - top{i}) * LOG2E - log2_sum{i}", f"p{i} = exp2(l{i})"]
    for k, teacher in enumerate(plan.teachers):
        lines.append(f"ly{k} = ({y}{teacher.array} * teacher_scale{k} - teacher_top{k}) * LOG2E - teacher_log2_sum{k}")
    return lines


def gradient(plan: Plan, v: str = "v", y: str = "y", *, label: bool = False) -> list[str]:
    """``g``, the gradient of a tile (of the label's column, with ``label``) before the rounding."""
    lines = log_probabilities(plan, v, y)
    for k, _ in enumerate(plan.teachers):
        if any(pair.teacher == k and uses_teacher_mass(pair) for pair in plan.pairings):
            lines.append(f"q{k} = exp2(ly{k})")
    parts = []
    for i, softmax in enumerate(plan.softmaxes):
        pairs = [(j, pair) for j, pair in enumerate(plan.pairings) if pair.softmax == i]
        inner = f"A{i}"
        if uses_entropy_slope(plan, i):
            inner += f" + B{i} * tl.maximum(l{i}, FLOOR)"
        lines.append(f"inner = {inner}")
        guarded = False
        for j, pair in pairs:
            if pair.reverse_kl:
                lines.append(f"inner = inner + tl.where(C{j} == 0.0, 0.0, C{j} * ly{pair.teacher})")
                guarded = True
            for b, _ in enumerate(pair.jsd):
                lines.append(f"ratio = (ly{pair.teacher} - l{i}) * LN2")
                lines.append(f"over, unused = log_mixture(beta{j}_{b}, ratio)")
                lines.append(f"inner = inner + tl.where(J{j}_{b} == 0.0, 0.0, J{j}_{b} * (over - R{j}_{b}))")
                guarded = True
        lines.append(f"g{i} = tl.where(p{i} == 0.0, 0.0, p{i} * inner)" if guarded else f"g{i} = p{i} * inner")
        outside = [f"D{j} * q{pair.teacher}" for j, pair in pairs if uses_teacher_mass(pair)]
        outside += [f"U{i}"] if softmax.mean_logprob else []
        outside += [f"E{i}"] if softmax.logprob and label else []
        if outside:
            # A column at −∞ gets nothing.
            lines.append(f"g{i} = tl.where(l{i} == -INFINITY, 0.0, g{i} - ({' + '.join(outside)}))")
        parts.append(f"g{i}")
    lines.append(f"g = {' + '.join(parts)}")
    if plan.softcap >= 0:
        lines.append(f"g = g * (1.0 - bend_{v} * bend_{v})")
    return lines


def _store(inside: str | None, accumulate: bool, value: str = "g") -> list[str]:
    mask = f", mask={inside}" if inside else ""
    lines = []
    if accumulate:
        lines.append(f"{value} = {value} + tl.load(row_old + c + offsets{mask}).to(tl.float32)")
    cast = f"{value}.to(gradient.dtype.element_ty)"
    return [*lines, f"tl.store(row_gradient + c + offsets, {cast}{mask}, cache_modifier='.cs')"]


def sweep_backward(plan: Plan, accumulate: bool) -> list[str]:
    """Writes the gradient, newest tiles first (they are still cached), then the incomplete tile and the padding."""
    edge = [
        "c = edge",
        "inside = c + offsets < real",
        "present = c + offsets < columns",
        *load(plan, "evict_first", "inside"),
        *gradient(plan),
        "g = tl.where(inside, g, 0.0)",
        *_store("present", accumulate),
    ]
    lines = [
        "for tile in range(0, tiles):",
        *indent(
            [
                "c = (tiles - 1 - tile) * TILE",
                *load(plan, "evict_first", None),
                *gradient(plan),
                *_store(None, accumulate),
            ]
        ),
        "if edge < columns:",
        *indent(edge),
    ]
    if not accumulate:
        # Padding, and rows that do not exist, get zeros.
        lines += [
            "zeros = tl.zeros([THREADS, UNROLL, 8], tl.float32)",
            "for c in range(edge + TILE, columns, TILE):",
            *indent(["present = c + offsets < columns", *_store("present", False, "zeros")]),
        ]
    return lines


def load_label_column(plan: Plan, accumulate: bool) -> list[str]:
    """The label's column of every array, before anything may be written over it."""
    lines = ["label_logit = tl.load(row_logits + place, mask=owned, other=-INFINITY).to(tl.float32)"]
    lines += cap(plan, "label_logit")
    for a in teacher_arrays(plan):
        lines.append(f"label_y{a} = tl.load(row_teacher{a} + place, mask=owned, other=-INFINITY).to(tl.float32)")
    if accumulate:
        lines.append("label_old = tl.load(row_old + place, mask=owned, other=0.0).to(tl.float32)")
    return lines


def write_label_column(plan: Plan, accumulate: bool) -> list[str]:
    """The label's column once more, with its −E: last, over what the sweep wrote there."""
    value = "g + label_old" if accumulate else "g"
    return [
        "tl.debug_barrier()",
        *gradient(plan, "label_logit", "label_y", label=True),
        f"tl.store(row_gradient + place, ({value}).to(gradient.dtype.element_ty), mask=owned)",
    ]


def jsd_tile(plan: Plan) -> list[str]:
    """This tile's share of the JSD's two rows per β."""
    lines = log_probabilities(plan)
    for j, pairing in enumerate(plan.pairings):
        if not pairing.jsd:
            continue
        i, k = pairing.softmax, pairing.teacher
        lines += [f"q = exp2(ly{k})", f"ratio = (ly{k} - l{i}) * LN2"]
        for b, _ in enumerate(pairing.jsd):
            beta = f"beta{j}_{b}"
            lines += [
                f"p_over, q_over = log_mixture({beta}, ratio)",
                f"p_over = tl.where(p{i} == 0.0, 0.0, p{i} * p_over)",
                "q_over = tl.where(q == 0.0, 0.0, q * q_over)",
                f"js{j}_{b} = js{j}_{b} + {_within(f'{beta} * q_over + (1.0 - {beta}) * p_over')}",
                f"jr{j}_{b} = jr{j}_{b} + {_within('p_over')}",
            ]
    return lines


def jsd_sums(plan: Plan) -> list[str]:
    """The names of the JSD's sums, in the order of ``duohead.statistics.read_jsd``."""
    return [
        f"{name}{j}_{b}"
        for j, pairing in enumerate(plan.pairings)
        for b, _ in enumerate(pairing.jsd)
        for name in ("js", "jr")
    ]


def sweep_jsd(plan: Plan) -> list[str]:
    """The second read that the JSD needs, with both normalisers known."""
    return [
        *(f"{name} = tl.zeros([THREADS], tl.float32)" for name in jsd_sums(plan)),
        *sweep_forward(plan, "evict_last", jsd_tile(plan), ahead=False),
        *(f"{name} = tl.sum({name}, 0)" for name in jsd_sums(plan)),
    ]
