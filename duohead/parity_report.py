"""A parity run as text for people and as JSON for machines."""

from __future__ import annotations

from typing import Any, NamedTuple

from duohead.parity_compare import Difference, Tolerances
from duohead.parity_inputs import HALF
from duohead.parity_runs import Outcome
from duohead.table import table


class Parity(NamedTuple):
    """Everything about one run; ``faults`` is empty where all agree."""

    config: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    frameworks: dict[str, str]
    missing: dict[str, str]
    tolerances: Tolerances
    reference: Outcome
    outcomes: list[Outcome]
    against: list[Difference]
    pairs: list[Difference]
    faults: list[str]


def as_text(parity: Parity) -> str:
    """The report: what was run, each loss against the reference, the implementations among themselves, the verdict."""
    blocks = [_heading(parity), _losses(parity), _gradients(parity)]
    if parity.pairs:
        blocks.append(_pairs(parity))
    return "\n\n".join([*blocks, verdict(parity)])


def _heading(parity: Parity) -> str:
    frameworks = ", ".join(f"{name} {found}" for name, found in parity.frameworks.items())
    lines = [
        f"{parity.config}: {parity.dtype} logits {list(parity.shape)} {parity.source}",
        f"frameworks: {frameworks}",
        f"reference:  {parity.reference.name}",
    ]
    lines += [f"not run:    {name} ({reason})" for name, reason in parity.missing.items()]
    return "\n".join(lines)


def _losses(parity: Parity) -> str:
    header = ["value", "reference", *(item.first for item in parity.against)]
    values = {**parity.reference.losses, "total": parity.reference.loss}
    rows = [
        [name, f"{value:.9g}", *(_number(item.scalars[name]) for item in parity.against)]
        for name, value in values.items()
    ]
    count = len(parity.outcomes[0].metrics)
    if count:
        rows.append([f"{count} metrics", "", *(_number(item.worst_metric) for item in parity.against)])
    return "Each value's difference to the reference, relative:\n" + table(header, rows)


_GRADIENT = ("relative rms", "largest difference", "differing entries")


def _gradient_cells(difference: Difference, parity: Parity) -> list[str]:
    cells = [_number(difference.gradient_rms), _number(difference.gradient_max), str(difference.differing)]
    return [*cells, str(difference.beyond)] if parity.dtype in HALF else cells


def _gradient_header(parity: Parity) -> list[str]:
    places = parity.tolerances.places
    return [*_GRADIENT, f"beyond {places} last place(s)"] if parity.dtype in HALF else list(_GRADIENT)


def _gradients(parity: Parity) -> str:
    entries = parity.reference.gradient.size
    rounded = f", rounded to {parity.dtype}" if parity.dtype in HALF else ""
    rows = [[item.first, *_gradient_cells(item, parity)] for item in parity.against]
    title = f"The gradient's difference to the reference{rounded} ({entries} entries):"
    return f"{title}\n" + table(["gradient", *_gradient_header(parity)], rows)


def _pairs(parity: Parity) -> str:
    rows = [
        [
            f"{item.first} – {item.second}",
            _number(item.worst_scalar),
            _number(item.worst_metric),
            *_gradient_cells(item, parity),
        ]
        for item in parity.pairs
    ]
    return "Between implementations, the worst value, the worst metric and the gradient:\n" + table(
        ["pair", "values", "metrics", *_gradient_header(parity)], rows
    )


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def verdict(parity: Parity) -> str:
    """One line where all agree, else one for each disagreement."""
    if parity.faults:
        return "\n".join(f"MISMATCH: {fault}" for fault in parity.faults)
    tolerances = parity.tolerances
    half = f"gradients within {tolerances.places} last place(s)" if parity.dtype in HALF else "gradients likewise (rms)"
    return (
        f"AGREE: {len(parity.outcomes)} implementations, values within {tolerances.reference:.0e} of the reference and "
        f"{tolerances.between:.0e} of each other, {half}"
    )


def as_json(parity: Parity) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "agree": not parity.faults,
        "faults": parity.faults,
        "config": parity.config,
        "dtype": parity.dtype,
        "shape": list(parity.shape),
        "frameworks": parity.frameworks,
        "not_run": parity.missing,
        "tolerances": parity.tolerances._asdict(),
        "reference": {
            "name": parity.reference.name,
            "total": parity.reference.loss,
            "losses": parity.reference.losses,
            "metrics": parity.reference.metrics,
        },
        "implementations": {
            item.name: {"total": item.loss, "losses": item.losses, "metrics": item.metrics} for item in parity.outcomes
        },
        "against_reference": [item._asdict() for item in parity.against],
        "between": [item._asdict() for item in parity.pairs],
    }
