"""What a launch needs beside its arrays: grid, block, warps, and the scalars that describe the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from duohead.kernels.bind import interpreted
from duohead.kernels.build import CHUNK
from duohead.kernels.source import Kernel
from duohead.plan import Plan


class Shape(NamedTuple):
    """A tile of ``32·warps × unroll × 8`` columns; ``ahead``: fetch the next tile into L2 while this one is added."""

    warps: int
    unroll: int
    ahead: bool

    @property
    def columns(self) -> int:
        """Columns of one tile."""
        return 32 * self.warps * self.unroll * 8


class Device(NamedTuple):
    """What the choice depends on."""

    capability: int
    processors: int


#: rows of at most this many bytes keep several programs on a processor; longer ones would overflow L2 that way
SHORT_ROW = 65536
SMALL = (Shape(1, 1, False), Shape(4, 1, False), Shape(8, 1, False), Shape(8, 2, False))
#: replaces every choice where set: tests use it to spread small vocabularies over several tiles
override: Shape | None = None


def shape_of(kind: str, plan: Plan, width: int, item_size: int, device: Device) -> Shape:
    """Block and warps of a row kernel, from measurements (docs/performance.md): few values, whatever the shapes."""
    if override is not None:
        return override
    if interpreted():
        return Shape(4, 4, False)
    for shape in SMALL:
        if width <= shape.columns * 2:
            return shape
    if kind == "write":
        return Shape(4, 4, False)
    if kind in ("statistics", "jsd"):
        return Shape(4, 2 if plan.teachers else 4, False)
    ahead, size = device.capability >= 90, width * item_size
    if plan.teachers:
        return Shape(8, 2, ahead) if size <= SHORT_ROW else Shape(32, 2, ahead)
    return Shape(8, 4, False) if size <= SHORT_ROW else Shape(32, 4, ahead)


class Launch(NamedTuple):
    """A kernel, its grid, and the compile-time constants of this launch."""

    kernel: Kernel
    grid: int
    constants: dict[str, int]
    warps: int


def unit_of(width: int, strides: Mapping[str, int]) -> int:
    """16 where all sizes and strides are multiples of it, so that whole rows are loaded in vectors; else 1."""
    return 16 if all(value % 16 == 0 for value in (width, *strides.values())) else 1


def row_launch(
    kind: str,
    kernel: Kernel,
    plan: Plan,
    width: int,
    item_size: int,
    unit: int,
    aligned: bool,
    device: Device,
    programs: int,
) -> Launch:
    """The launch of a kernel that works on rows."""
    shape = shape_of(kind, plan, width, item_size, device)
    constants = {
        "WARPS": shape.warps,
        "UNROLL": shape.unroll,
        "AHEAD": int(shape.ahead and aligned and unit == 16),
        "UNIT": unit,
    }
    return Launch(kernel, programs, constants, shape.warps)


def row_scalars(rows: int, width: int, size: int, strides: Mapping[str, int], unit: int) -> dict[str, int]:
    """The scalars of a row kernel by name; widths and strides are in units."""
    scalars = {"count_rows": rows, "width": width // unit, "size": size}
    return scalars | {f"{name}_stride": stride // unit for name, stride in strides.items()}


def chunks_of(rows: int) -> int:
    """Programs of the reduction's first step."""
    return -(-rows // CHUNK)


def check_programs(rows: int, device: Device) -> int:
    """The grid of a write that most often has nothing to do."""
    return min(rows, 2 * device.processors)


def count_launch(kernel: Kernel) -> Launch:
    """One program that counts the valid tokens."""
    return Launch(kernel, 1, {"CHUNK": 8192}, 16)


def partial_launch(kernel: Kernel, rows: int) -> Launch:
    """One program per chunk of tokens."""
    return Launch(kernel, chunks_of(rows), {"CHUNK": CHUNK}, 4)


def results_launch(kernel: Kernel) -> Launch:
    """One program for all results."""
    return Launch(kernel, 1, {"CHUNK": 64}, 1)


#: tokens per span, and per program of the sums over sequences
SPAN = 1024
#: spans searched at once
SPANS = 128
#: tokens, sequences or pairs per program of the terms between two launches
ITEMS = 128


def spans_of(rows: int) -> int:
    """Spans of tokens."""
    return -(-rows // SPAN)


def items_of(count: int) -> int:
    """Programs over tokens, sequences or pairs."""
    return -(-count // ITEMS)


def span_launch(kernel: Kernel, rows: int) -> Launch:
    """One program per span of tokens."""
    return Launch(kernel, spans_of(rows), {"CHUNK": SPAN}, 4)


def sum_launch(kernel: Kernel, num_segments: int) -> Launch:
    """One program per segment."""
    return Launch(kernel, num_segments, {"CHUNK": SPAN, "SPANS": SPANS}, 4)


def counts_launch(kernel: Kernel) -> Launch:
    """One program that counts tokens, sequences and pairs."""
    return Launch(kernel, 1, {"CHUNK": 1024}, 8)


def item_launch(kernel: Kernel, count: int) -> Launch:
    """One program per chunk of tokens, sequences or pairs."""
    constants = {"CHUNK": ITEMS, "PAIRS": 32}
    return Launch(kernel, items_of(count), {name: constants[name] for name in kernel.constants}, 4)


def arguments(kernel: Kernel, values: Mapping[str, Any]) -> list[Any]:
    """The kernel's arguments in order, by name."""
    return [values[name] for name in kernel.parameters]
