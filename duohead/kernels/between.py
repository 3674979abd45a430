"""The launches between a read and its write, in order, and the buffers that they fill: one list for both frameworks."""

from __future__ import annotations

from typing import NamedTuple

from duohead.kernels import launch, sequences
from duohead.kernels.eligible import is_fused
from duohead.kernels.launch import Launch
from duohead.kernels.layout import layout_of, saved_names
from duohead.plan import Plan

#: buffers of int32; all others are float32
INTEGERS = frozenset({"spans"})


class Over(NamedTuple):
    """How many tokens, sequences and pairs there are; ``pairs`` is None where none were given."""

    tokens: int
    sequences: int = 0
    pairs: int | None = None

    @property
    def kinds(self) -> dict[str, int]:
        """Kind → how many."""
        return {"token": self.tokens, "sequence": self.sequences, "pair": self.pairs or 0}


def scalars(over: Over) -> dict[str, int]:
    """The launches' scalars by name."""
    return {
        "count_rows": over.tokens,
        "span_count": launch.spans_of(over.tokens),
        "num_segments": over.sequences,
        "count_pairs": over.pairs or 0,
        **{f"chunks_{kind}": launch.items_of(count) for kind, count in over.kinds.items()},
    }


def shapes(over: Over, plan: Plan | None = None) -> dict[str, tuple[int, ...]]:
    """Buffer → its shape; without a plan those of ``lengths``."""
    found: dict[str, tuple[int, ...]] = {
        "spans": (sequences.SPAN_ROWS, launch.spans_of(over.tokens)),
        "sums": (1 + (0 if plan is None else len(plan.sums)), over.sequences),
        "counts": (sequences.COUNTS_SIZE,),
        "lengths": (over.tokens,),
    }
    if plan is None:
        return found
    layout = layout_of(plan)
    found |= {
        "pair_cotangents": (len(sequences.pair_cotangents(plan)), over.pairs or 0),
        "cotangents": (len(sequences.sum_cotangents(plan)), over.sequences),
        "saved": (len(saved_names(plan)), over.tokens),
    }
    return found | {
        f"partials_{kind}": (len(layout.of_kind(kind)), launch.items_of(count)) for kind, count in over.kinds.items()
    }


def lengths(over: Over, per_token: bool) -> list[Launch]:
    """The numbers of tokens and sequences, and with ``per_token`` the lengths of the tokens' sequences."""
    found = [
        launch.span_launch(sequences.spans(), over.tokens),
        launch.sum_launch(sequences.lengths(), over.sequences),
        launch.counts_launch(sequences.counts(False)),
    ]
    return [*found, launch.item_launch(sequences.carried_lengths(), over.tokens)] if per_token else found


def terms(plan: Plan, over: Over) -> list[Launch]:
    """Every term after a read alone, up to what the write needs."""
    tokens = launch.item_launch(sequences.tokens(plan), over.tokens)
    if is_fused(plan):
        return [tokens]
    return [
        launch.span_launch(sequences.spans(), over.tokens),
        launch.sum_launch(sequences.sums(plan), over.sequences),
        launch.counts_launch(sequences.counts(over.pairs is not None)),
        *([launch.item_launch(sequences.pairs(plan), over.pairs or 0)] if plan.needs_pairs else []),
        launch.item_launch(sequences.sequences(plan), over.sequences),
        tokens,
    ]
