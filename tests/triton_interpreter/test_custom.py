"""Losses of a user's own in the kernel: what the array code gives, in one launch, or (autodiff, sequences) in two."""

from __future__ import annotations

from typing import Any

import pytest
from policy_inputs import assert_same, make_inputs, run
from test_custom_losses import SPECS

from duohead.kernels.eligible import why_not

SETS: dict[str, tuple[str, ...]] = {
    "one launch": ("focal", "skew"),
    "by autodiff": ("focal_by_autodiff", "several"),
    "sequences and pairs": ("focal", "margin", "long_pairs", "smooth"),
}


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_against_the_array_code(names: tuple[str, ...]) -> None:
    losses: dict[str, Any] = {name: SPECS[name] for name in names}
    assert why_not(losses) == {}
    inputs = make_inputs(31, tokens=8, vocab=300)
    assert_same(run("torch triton", losses, inputs, "float32"), run("torch eager", losses, inputs, "float32"), 1e-5)
