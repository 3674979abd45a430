"""Accuracy counts the label that is largest, whatever the scale and the cap: a compiler may contract x·s − max(x·s)."""

from __future__ import annotations

import numpy as np
import pytest
from config_inputs import run_jax, run_torch

from duohead import HeadSpec


@pytest.mark.parametrize("run", [run_jax, run_torch], ids=["xla", "eager"])
@pytest.mark.parametrize("scale", [1.0, 0.3, 1.25])
@pytest.mark.parametrize("cap", [None, 1.0, 30.0])
def test_largest_label_is_right(run: object, scale: float, cap: float | None) -> None:
    random = np.random.default_rng(0)
    logits = random.standard_normal((24, 7)).astype(np.float32).astype(np.float64)
    labels = logits.argmax(-1)
    labels[::3] = logits.argmin(-1)[::3]
    logits[5] = 2.0  # a tie counts as right
    head = HeadSpec(metrics=("accuracy",), logits_scale_factor=scale, final_logit_softcap=cap)
    implementation = "xla" if run is run_jax else "eager"
    scalars, _ = run(head, {"logits": logits, "labels": labels}, implementation)  # type: ignore[operator]
    assert scalars["head/accuracy"] == pytest.approx(16 / 24, rel=1e-6)
