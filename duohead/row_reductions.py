"""Vectors that become scalars, collected so that each kind of reduction runs once over a stack of them."""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any


class Reduced(NamedTuple):
    """Where the scalar of a vector will be: the stack (operation, what the vector is over) and its row."""

    operation: str
    over: str
    row: int


class RowReductions:
    """Sums, minima and maxima of many vectors over tokens, sequences or pairs, each in one operation."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.stacks: dict[tuple[str, str], list[Array]] = {}
        self.results: dict[tuple[str, str], Array] = {}

    def add(self, operation: str, over: str, vector: Array) -> Reduced:
        """Enters a vector for ``sum``, ``min`` or ``max``; vectors over the same things have the same shape."""
        rows = self.stacks.setdefault((operation, over), [])
        rows.append(vector)
        return Reduced(operation, over, len(rows) - 1)

    def run(self) -> None:
        """Reduces every stack."""
        reduce = {"sum": self.xp.sum_rows, "min": self.xp.min_rows, "max": self.xp.max_rows}
        for key, rows in self.stacks.items():
            self.results[key] = reduce[key[0]](self.xp.stack(rows))

    def value(self, where: Reduced) -> Array:
        """The scalar, once ``run`` has been called."""
        return self.results[where.operation, where.over][where.row]
