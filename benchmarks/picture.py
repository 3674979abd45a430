"""Draws docs/benchmark.png from the records of an H200 run (docs/h200.json): ``python benchmarks/picture.py``."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHAPE = [8192, 128256]
SETS = {
    "ce+z": "cross-entropy\n+ z-loss",
    "rl": "+ entropy + GRPO,\nall metrics, KL",
    "kd": "cross-entropy + z\n+ KL to a teacher",
}


def main() -> None:
    """One group of bars a set of losses."""
    records = [item for item in json.loads((DOCS / "h200.json").read_text()) if item.get("shape") == SHAPE]

    def ratio(item: str, name: str, form: str) -> float | None:
        found = [r["ratio"] for r in records if (r["item"], r.get("set"), r.get("form")) == (item, name, form)]
        return found[-1] if found else None

    bars = (
        ("duohead, the kernel (PyTorch)", "time", "grad", "#1b6ca8"),
        ("duohead under jit (JAX, XLA)", "jax", "xla", "#7fb2d9"),
        ("optax under jit", "jax", "optax", "#b0b0b0"),
    )
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for n, (label, item, form, colour) in enumerate(bars):
        values = [ratio(item, name, form) for name in SETS]
        drawn = [(i, value) for i, value in enumerate(values) if value is not None]
        places = [i + (n - 1) * 0.27 for i, _ in drawn]
        found = axes.bar(places, [value for _, value in drawn], 0.25, label=label, color=colour)
        axes.bar_label(found, fmt="%.2f", fontsize=8)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.text(2.42, 1.05, "device copy", fontsize=8, ha="right")
    axes.set_xticks(range(len(SETS)), SETS.values())
    axes.set_ylabel("time / time of a device copy")
    axes.set_title("value and gradient of 8192 × 128256 bfloat16 logits on an H200", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "benchmark.png", dpi=130)


if __name__ == "__main__":
    main()
