"""How many examples a run drew, and in what time: recorded on the tests, summed up at the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROPERTY = "robust_examples"


@contextmanager
def counted(record_property: Callable[[str, Any], None]) -> Iterator[dict[str, int]]:
    """``counts["drawn"] += 1`` for each example; what stands there at the end is reported, with the seconds it took."""
    counts = {"drawn": 0}
    begin = time.perf_counter()
    try:
        yield counts
    finally:
        record_property(PROPERTY, (counts["drawn"], time.perf_counter() - begin))


def summary(reports: list[Any]) -> str | None:
    """The line for the end of a run; works with several workers, since properties travel with the reports."""
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    found = [value for report in calls for name, value in report.user_properties if name == PROPERTY]
    if not found:
        return None
    drawn, seconds = sum(n for n, _ in found), sum(s for _, s in found)
    return f"robustness: {drawn} examples in {seconds:.0f} s ({len(found)} tests)"
