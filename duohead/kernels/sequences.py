"""Kernels between the read and the write, where terms are over sequences or pairs of them.

    read ─▶ sums ─▶ counts ─▶ pairs ─▶ sequences ─▶ tokens ─▶ results, write

``spans`` notes which segments a span of tokens holds, so that ``sums`` visits no other. Every sum is taken in a fixed
order by one program, never with atomics: two calls give the same bits, and so do both frameworks.
"""

from __future__ import annotations

import functools

from duohead.kernels.bind import KERNEL_NAMES
from duohead.kernels.build import CHUNK_OF_TOKENS, extra_inputs, names_of, reduce_chunk, token_names
from duohead.kernels.eligible import is_fused
from duohead.kernels.layout import statistic_key
from duohead.kernels.source import Kernel, indent, make_kernel
from duohead.kernels.terms import FoldedTokenCode, TermCode, read_names, statistic_name
from duohead.plan import Operand, Plan, PlannedLoss

#: where in ``counts`` each count is: 16 bytes apart, so that a view of one is aligned as an array of its own is
COUNTED = {"valid_count": 0, "sequence_count": 4, "pair_count": 8}
COUNTS_SIZE = 12
#: rows of ``spans``: lowest and highest segment, how many tokens name none that exists, how many are valid
SPAN_ROWS = 4

_SEGMENTS = [
    "segment = tl.load(segment_ids + tokens, mask=inside, other=-1).to(tl.int64)",
    "named = exists & (segment >= 0)",
    "known = named & (segment < num_segments)",
]


def sum_cotangents(plan: Plan) -> tuple[int, ...]:
    """The sequence sums that a term differentiates, as rows of ``sums``."""
    found = {operand.index for operand in _differentiated(plan, ("sequence", "pair"))}
    return tuple(sorted(found - {0}))  # the length has no derivative


def pair_cotangents(plan: Plan) -> tuple[Operand, ...]:
    """The quantities of chosen and rejected sequences that a term over pairs differentiates."""
    return tuple(dict.fromkeys(operand for operand in _differentiated(plan, ("pair",)) if operand.index > 0))


def _differentiated(plan: Plan, kinds: tuple[str, ...]) -> list[Operand]:
    parts = [part for loss in plan.losses for part in loss.parts if part.kind in kinds]
    return [operand for part in parts for operand in part.differentiable]


def _mean(total: str, length: str) -> str:
    return f"{total} / tl.where({length} > 0.0, {length}, 1.0)"


# --- sums over sequences ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def spans() -> Kernel:
    """Which segments a span of tokens holds: one program each."""
    body = [
        *CHUNK_OF_TOKENS,
        *_SEGMENTS,
        "first = tl.min(tl.where(known, segment, num_segments), 0).to(tl.int32)",
        "last = tl.max(tl.where(known, segment, -1), 0).to(tl.int32)",
        "lost = tl.where(known, 0, named.to(tl.int32))",
        "tl.store(spans + chunk, first)",
        "tl.store(spans + span_count + chunk, last)",
        "tl.store(spans + 2 * span_count + chunk, tl.sum(lost, 0))",
        "tl.store(spans + 3 * span_count + chunk, tl.sum(exists.to(tl.int32), 0))",
    ]
    scalars = ["count_rows", "span_count", "num_segments"]
    return make_kernel("spans", ["valid", "segment_ids"], scalars, ["spans"], ["CHUNK"], body, KERNEL_NAMES)


_LAST = 2147483647


def _touched() -> list[str]:
    """The first and the last span that hold the segment, and NaN where any token names a segment past the last."""
    search = [
        "number = begin + numbers",
        "there = number < span_count",
        f"low = tl.load(spans + number, mask=there, other={_LAST})",
        "high = tl.load(spans + span_count + number, mask=there, other=-1)",
        "touches = (low <= segment) & (high >= segment)",
        f"firsts = tl.minimum(firsts, tl.where(touches, number, {_LAST}))",
        "lasts = tl.maximum(lasts, tl.where(touches, number, -1))",
        "lost = lost + tl.load(spans + 2 * span_count + number, mask=there, other=0)",
    ]
    return [
        "numbers = tl.arange(0, SPANS)",
        f"firsts = tl.full([SPANS], {_LAST}, tl.int32)",
        "lasts = tl.full([SPANS], -1, tl.int32)",
        "lost = tl.zeros([SPANS], tl.int32)",
        "for begin in range(0, span_count, SPANS):",
        *indent(search),
        "first = tl.min(firsts, 0)",
        "last = tl.max(lasts, 0)",
        "poison = tl.where(tl.sum(lost, 0) > 0, float('nan'), 0.0)",
    ]


@functools.lru_cache(maxsize=1)
def lengths() -> Kernel:
    """The number of a segment's valid tokens, one segment a program: where no term is over sequences."""
    return _sums("lengths", [], [])


@functools.lru_cache(maxsize=1)
def carried_lengths() -> Kernel:
    """The length of each token's sequence, 0 at tokens of none."""
    body = [
        *CHUNK_OF_TOKENS,
        *_SEGMENTS,
        "tl.store(lengths + tokens, tl.load(sums + segment, mask=known, other=0.0), mask=inside)",
    ]
    inputs, scalars = ["valid", "segment_ids", "sums"], ["count_rows", "num_segments"]
    return make_kernel("carried_lengths", inputs, scalars, ["lengths"], ["CHUNK"], body, KERNEL_NAMES)


@functools.lru_cache(maxsize=256)
def sums(plan: Plan) -> Kernel:
    """Row 0 the lengths, then ``plan.sums``, of one segment a program."""
    names = read_names(plan)

    def load(operand: Operand) -> str:
        if operand.source == "input":
            return f"tl.load(token{operand.index} + tokens, mask=mine, other=0.0).to(tl.float32)"
        row = names.index(statistic_name(statistic_key(operand), plan))
        return f"tl.load(rows + {row} * count_rows + tokens, mask=mine, other=0.0)"

    values = [
        load(wanted.base) if wanted.minus is None else f"{load(wanted.base)} - {load(wanted.minus)}"
        for wanted in plan.sums
    ]
    return _sums("sums", values, ["rows", *token_names(plan)])


def _sums(name: str, values: list[str], inputs: list[str]) -> Kernel:
    """Sums of these expressions over the tokens of one segment a program, after the number of them."""
    each = [
        "tokens = chunk * CHUNK + offsets",
        "inside = tokens < count_rows",
        "exists = tl.load(valid + tokens, mask=inside, other=0) != 0",
        "mine = exists & (tl.load(segment_ids + tokens, mask=inside, other=-1) == segment)",
        "sum0 = sum0 + tl.where(mine, 1.0, 0.0)",
        *(f"sum{n} = sum{n} + tl.where(mine, {value}, 0.0)" for n, value in enumerate(values, 1)),
    ]
    count = 1 + len(values)
    body = [
        "segment = tl.program_id(0)",
        *_touched(),
        "offsets = tl.arange(0, CHUNK).to(tl.int64)",
        *(f"sum{n} = tl.zeros([CHUNK], tl.float32)" for n in range(count)),
        "for chunk in range(first, last + 1):",
        *indent(each),
        *(f"tl.store(sums + {n} * num_segments + segment, tl.sum(sum{n}, 0) + poison)" for n in range(count)),
    ]
    given = ["valid", "segment_ids", *inputs, "spans"]
    scalars = ["count_rows", "span_count", "num_segments"]
    return make_kernel(name, given, scalars, ["sums"], ["CHUNK", "SPANS"], body, KERNEL_NAMES)


@functools.lru_cache(maxsize=2)
def counts(pairs: bool) -> Kernel:
    """Valid tokens, sequences that have any, and pairs: one program."""
    body = [
        "offsets = tl.arange(0, CHUNK)",
        "tokens = tl.zeros([CHUNK], tl.int32)",
        "for begin in range(0, span_count, CHUNK):",
        "    inside = begin + offsets < span_count",
        "    tokens = tokens + tl.load(spans + 3 * span_count + begin + offsets, mask=inside, other=0)",
        "valid_count = tl.sum(tokens, 0).to(tl.float32)",
        "tl.store(counts, valid_count)",
        "sequences = tl.zeros([CHUNK], tl.float32)",
        "for begin in range(0, num_segments, CHUNK):",
        "    length = tl.load(sums + begin + offsets, mask=begin + offsets < num_segments, other=0.0)",
        # NaN, where a token names a segment past the last, makes the number NaN.
        "    sequences = sequences + tl.where(length > 0.0, 1.0, length)",
        "tl.store(counts + 4, tl.sum(sequences, 0))",
    ]
    if pairs:
        body += [
            "found = tl.zeros([CHUNK], tl.float32)",
            "for begin in range(0, count_pairs, CHUNK):",
            "    number = begin + offsets",
            "    there = number < count_pairs",
            *indent(_SIDES),
            "    found = found + tl.where((chosen >= 0) & (rejected >= 0), 1.0, 0.0)",
            # Without a single valid token nothing exists, not even the constant of an empty pair.
            "tl.store(counts + 8, tl.where(valid_count != 0.0, tl.sum(found, 0), 0.0))",
        ]
    else:
        body.append("tl.store(counts + 8, 0.0)")
    inputs = ["spans", "sums", *(["pairs"] if pairs else [])]
    scalars = ["span_count", "num_segments", *(["count_pairs"] if pairs else [])]
    return make_kernel("counts", inputs, scalars, ["counts"], ["CHUNK"], body, KERNEL_NAMES)


_SIDES = [
    "chosen = tl.load(pairs + 2 * number, mask=there, other=-1).to(tl.int64)",
    "rejected = tl.load(pairs + 2 * number + 1, mask=there, other=-1).to(tl.int64)",
]


# --- terms ------------------------------------------------------------------------------------------------------------


class _Counted(TermCode):
    """Counts come from the vector of ``counts``."""

    def count(self, name: str) -> str:
        self.counts.append(f"{name}_here = tl.load(counts + {COUNTED[name]})")
        return f"{name}_here"

    def number(self, slot: int, counted: str) -> str:
        """A given count, or the one counted here."""
        return self.slot(slot) if slot >= 0 else self.count(counted)

    def weights(self) -> list[str]:
        plan = self.plan
        return [
            "one = tl.full((), 1.0, tl.float32)",
            f"by_tokens = inverse({self.number(plan.num_tokens, 'valid_count')})",
            f"by_sequences = inverse({self.number(plan.num_sequences, 'sequence_count')})",
            f"by_pairs = inverse({self.number(plan.num_pairs, 'pair_count')})",
        ]

    def item_weight(self, loss: PlannedLoss, mean: str) -> str:
        """The weight of what counts once: a pair, or a sequence that its tokens do not carry."""
        if loss.reduction == "sum":
            return "1.0"
        return f"inverse({self.slot(loss.denominator)})" if loss.reduction == "constant" else mean


class PairCode(_Counted):
    """Over a chunk of pairs."""

    kind = "pair"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.gathers: dict[str, str] = {}

    def operand(self, operand: Operand) -> str:
        if operand.source not in ("chosen", "rejected"):
            return super().operand(operand)
        side, n = operand.source, operand.index
        value = f"{side}_sum{n}"
        self._gather(side, n)
        if operand.name != "mean":
            return value
        self._gather(side, 0)
        return f"({_mean(value, f'{side}_sum0')})"

    def _gather(self, side: str, n: int) -> None:
        where = f"sums + {n} * num_segments + {side}"
        self.gathers[f"{side}_sum{n}"] = f"tl.load({where}, mask=real & ({side} < num_segments), other=0.0)"

    def weight(self, loss: PlannedLoss) -> str:
        return f"{self.item_weight(loss, 'by_pairs')} * pair_value"

    def enter(self, operand: Operand, value: str, factor: str) -> list[str]:
        return self.add(operand[:3], self.guarded(value, factor)) if operand.index > 0 else []

    def lines(self) -> list[str]:
        body = [*self.weights(), *self.derivatives(), *self.values()]
        stores = [
            f"tl.store(pair_cotangents + {n} * count_pairs + number, {self.cotangents[operand[:3]]}, mask=there)"
            for n, operand in enumerate(pair_cotangents(self.plan))
        ]
        gathers = [f"{name} = {load}" for name, load in self.gathers.items()]
        return [*self.load_hyper(), *dict.fromkeys(self.counts), *gathers, *body, *stores]


@functools.lru_cache(maxsize=256)
def pairs(plan: Plan) -> Kernel:
    """Terms over pairs: their derivatives, and the first step of their reductions; one program a chunk of pairs."""
    code = PairCode(plan)
    body = [
        "chunk = tl.program_id(0)",
        "number = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)",
        "there = number < count_pairs",
        *_SIDES,
        "real = (chosen >= 0) & (rejected >= 0)",
        "exists = tl.where(tl.load(counts) != 0.0, real.to(tl.int32), 0) != 0",
        # A pair that names a segment past the last one shows.
        "wrong = (chosen >= num_segments) | (rejected >= num_segments)",
        "pair_value = tl.where(wrong, float('nan'), 1.0)",
        *code.lines(),
        *reduce_chunk(plan, "pair"),
    ]
    return make_kernel(
        "pairs",
        ["pairs", "sums", "counts", "hyper"],
        ["count_pairs", "num_segments", "chunks_pair"],
        ["pair_cotangents", "partials_pair"],
        ["CHUNK"],
        body,
        names_of(code),
    )


class SequenceCode(_Counted):
    """Over a chunk of sequences."""

    kind = "sequence"

    def operand(self, operand: Operand) -> str:
        if operand.source != "sequence":
            return super().operand(operand)
        value = f"sum{operand.index}"
        return f"({_mean(value, 'sum0')})" if operand.name == "mean" else value

    def weight(self, loss: PlannedLoss) -> str:
        """The summed weight of a sequence's tokens, or the sequence's own."""
        if not loss.carried_by_tokens:
            return self.item_weight(loss, "by_sequences")
        if loss.reduction == "token_mean":
            return "sum0 * by_tokens"
        if loss.reduction == "constant":
            return f"sum0 * inverse({self.slot(loss.denominator)})"
        if loss.reduction == "sequence_mean_token_sum":
            return "sum0 * tl.where(sum0 != 0.0, by_sequences, 0.0)"
        if loss.reduction == "sequence_mean_token_mean":
            return "tl.where(sum0 != 0.0, by_sequences, 0.0)"
        return "sum0"

    def enter(self, operand: Operand, value: str, factor: str) -> list[str]:
        return self.enter_sum(operand, self.guarded(value, factor))

    def enter_sum(self, operand: Operand, cotangent: str) -> list[str]:
        """Adds to the cotangent of a sequence sum; that of a mean is divided by the length."""
        if operand.index == 0:
            return []
        if operand.name == "mean":
            cotangent = _mean(cotangent, "sum0")
        return self.add(("sum", operand.index), cotangent)

    def lines(self) -> list[str]:
        plan = self.plan
        sides = pair_cotangents(plan)
        body = [*self.weights(), *self.derivatives(), *self.values(), *_from_pairs(sides)]
        for n, operand in enumerate(sides):
            body += self.enter_sum(operand, f"of_pairs{n}")
        stores = [
            f"tl.store(cotangents + {n} * num_segments + segment, {self.cotangents['sum', index]}, mask=inside)"
            for n, index in enumerate(sum_cotangents(plan))
        ]
        return [*self.load_hyper(), *dict.fromkeys(self.counts), *body, *stores]


def _from_pairs(sides: tuple[Operand, ...]) -> list[str]:
    """``of_pairs0 …``: what the pairs that name a sequence add to its cotangents, in the pairs' order."""
    if not sides:
        return []
    each = [
        "number = begin + numbers",
        "there = number < count_pairs",
        *_SIDES,
        "is_chosen = segment[:, None] == chosen[None, :]",
        "is_rejected = segment[:, None] == rejected[None, :]",
    ]
    for n, operand in enumerate(sides):
        each += [
            f"value = tl.load(pair_cotangents + {n} * count_pairs + number, mask=there, other=0.0)",
            f"of_pairs{n} = of_pairs{n} + tl.sum(tl.where(is_{operand.source}, value[None, :], 0.0), 1)",
        ]
    return [
        "numbers = tl.arange(0, PAIRS)",
        *(f"of_pairs{n} = tl.zeros([CHUNK], tl.float32)" for n, _ in enumerate(sides)),
        "for begin in range(0, count_pairs, PAIRS):",
        *indent(each),
    ]


@functools.lru_cache(maxsize=256)
def sequences(plan: Plan) -> Kernel:
    """Terms over sequences, and the cotangents of every sequence sum: one program a chunk of sequences."""
    code = SequenceCode(plan)
    body = [
        "chunk = tl.program_id(0)",
        "segment = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)",
        "inside = segment < num_segments",
        *(
            f"sum{n} = tl.load(sums + {n} * num_segments + segment, mask=inside, other=0.0)"
            for n in range(1 + len(plan.sums))
        ),
        "exists = inside & (sum0 != 0.0)",
        *code.lines(),
        *reduce_chunk(plan, "sequence", "tl.where(sum0 > 0.0, 1.0, sum0)"),
    ]
    paired = bool(pair_cotangents(plan))
    return make_kernel(
        "sequences",
        ["sums", "counts", "hyper", *(["pairs", "pair_cotangents"] if paired else [])],
        ["num_segments", "chunks_sequence", *(["count_pairs"] if paired else [])],
        ["cotangents", "partials_sequence"],
        ["CHUNK", "PAIRS"],
        body,
        names_of(code),
    )


class SequencedTokenCode(FoldedTokenCode, _Counted):
    """Over a chunk of tokens: derivatives, those of their sequences too, the fold, values and measures."""

    def operand(self, operand: Operand) -> str:
        if operand.source != "carried":
            return super().operand(operand)
        value = self._carried(operand.index)
        return f"({_mean(value, self._carried(0))})" if operand.name == "mean" else value

    def _carried(self, n: int) -> str:
        """A sequence's sum at each of its tokens; 0 at tokens of no sequence."""
        name = f"carried{n}"
        self.counts.append(f"{name} = tl.load(sums + {n} * num_segments + segment, mask=known, other=0.0)")
        return name

    def weight(self, loss: PlannedLoss) -> str:
        if loss.reduction == "sequence_mean_token_sum":
            return f"tl.where({self._carried(0)} != 0.0, by_sequences, 0.0)"
        if loss.reduction == "sequence_mean_token_mean":
            return f"by_sequences * inverse({self._carried(0)})"
        return super().weight(loss)

    def of_sequences(self) -> list[str]:
        lines: list[str] = []
        for n, index in enumerate(sum_cotangents(self.plan)):
            base = self.plan.sums[index - 1].base
            if base.source == "statistic":
                carried = f"tl.load(cotangents + {n} * num_segments + segment, mask=known, other=0.0)"
                lines += self.add(statistic_key(base), carried)
        return lines


@functools.lru_cache(maxsize=256)
def tokens(plan: Plan) -> Kernel:
    """Terms over tokens, and all that the write needs: one program a chunk of tokens."""
    if is_fused(plan):
        code: FoldedTokenCode = FoldedTokenCode(plan)
        segments, inputs, scalars = [], list(extra_inputs(plan)), []
    else:
        code = SequencedTokenCode(plan)
        segments, inputs, scalars = _SEGMENTS, ["segment_ids", "sums", "cotangents", "counts"], ["num_segments"]
    body = [*CHUNK_OF_TOKENS, *segments, *code.lines(), *reduce_chunk(plan, "token")]
    return make_kernel(
        "tokens",
        ["valid", "rows", "hyper", *token_names(plan), *inputs],
        ["count_rows", "size", "chunks_token", *scalars],
        ["saved", "partials_token"],
        ["CHUNK"],
        body,
        names_of(code),
    )
