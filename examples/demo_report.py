"""The demo's table and picture."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from duohead.table import table

History = list[dict[str, float]]


class Report(NamedTuple):
    """Each loss by step in both frameworks, and seconds per step by (framework, implementation)."""

    torch: History
    jax: History
    seconds: dict[tuple[str, str], float]


def differences(report: Report, name: str) -> list[float]:
    """|torch − JAX| of a loss at every step."""
    return [abs(a[name] - b[name]) for a, b in zip(report.torch, report.jax, strict=True)]


def as_text(report: Report) -> str:
    """Losses by step, the largest difference of each, and the time of a step."""
    names = list(report.torch[0])
    last = len(report.torch) - 1
    steps = sorted({round(last * part / 5) for part in range(6)})
    header = ["step", *(f"{name} {framework}" for name in names for framework in ("torch", "jax"))]
    rows = [
        [str(step), *(f"{history[step][name]:.6f}" for name in names for history in (report.torch, report.jax))]
        for step in steps
    ]
    apart = [[name, f"{max(differences(report, name)):.1e}"] for name in names]
    times = [[*which, f"{1e3 * seconds:.1f}"] for which, seconds in report.seconds.items()]
    return "\n\n".join(
        [
            table(header, rows),
            table(["loss", f"largest |torch − jax| over {last + 1} steps"], apart),
            table(["framework", "implementation", "ms per training step"], times),
            "(In JAX the step is one jit, in which XLA shares the softmax of the separate losses again.)",
        ]
    )


def draw(report: Report, path: Path) -> None:
    """Both frameworks' curves over each other, and below them their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(report.torch[0])
    steps = range(len(report.torch))
    figure, axes = pyplot.subplots(
        2, len(names), figsize=(4.2 * len(names), 5.2), sharex=True, squeeze=False, height_ratios=(3, 2)
    )
    for column, name in enumerate(names):
        curves, apart = axes[0][column], axes[1][column]
        curves.plot(steps, [values[name] for values in report.torch], color="tab:orange", linewidth=4, alpha=0.5)
        curves.plot(steps, [values[name] for values in report.jax], color="tab:blue", linewidth=1.2)
        curves.legend(["PyTorch", "JAX"], frameon=False)
        curves.set_title(TITLES.get(name, name))
        shown = [max(value, FLOOR) for value in differences(report, name)]
        apart.plot(steps, shown, ".", color="tab:gray", markersize=4)
        apart.set_yscale("log")
        apart.set_ylim(FLOOR, 1.0)
        apart.set_xlabel("step")
    axes[0][0].set_ylabel("unweighted loss")
    axes[1][0].set_ylabel("|PyTorch − JAX|")
    figure.suptitle("One language model, trained from the same weights in both frameworks")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


#: below it two float32 losses are the same number, and a logarithm needs something to show
FLOOR = 1e-8
TITLES = {
    "ce": "cross-entropy, nats",
    "z": "z-loss, nats²",
    "kd": "forward KL to the teacher, nats",
}
