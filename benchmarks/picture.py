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
    "two": "cross-entropy + z\n+ GRPO + GSPO + DPO",
}


def main() -> None:
    """One group of bars a set of losses."""
    records = [item for item in json.loads((DOCS / "h200.json").read_text()) if item.get("shape") == SHAPE]

    def ratio(item: str, name: str, form: str | None) -> float | None:
        # Liger's cross-entropy has a z-loss, and no other set of these.
        key = (item, name if form or name != "ce+z" else None, form)
        found = [r["ratio"] for r in records if (r["item"], r.get("set"), r.get("form")) == key]
        return found[-1] if found else None

    bars = (
        ("duohead, the kernel", "time", "grad", "#1b6ca8"),
        ("duohead, one torch.compile", "time", "compiled", "#7fb2d9"),
        ("each loss compiled alone", "time", "per_loss", "#b0b0b0"),
        ("Liger", "liger", None, "#d98f4e"),
        ("optax under jit", "jax", "optax", "#8d7bb0"),
    )
    figure, axes = plt.subplots(figsize=(9, 3.8))
    for n, (label, item, form, colour) in enumerate(bars):
        values = [ratio(item, name, form) for name in SETS]
        drawn = [(i, value) for i, value in enumerate(values) if value is not None]
        places = [i + (n - 1) * 0.18 for i, _ in drawn]
        found = axes.bar(places, [value for _, value in drawn], 0.17, label=label, color=colour)
        axes.bar_label(found, fmt="%.2f", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.text(3.6, 1.15, "device copy", fontsize=8, ha="right")
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
