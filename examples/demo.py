"""Trains one small language model from identical weights in PyTorch and in JAX, and shows that they stay together.

    python examples/demo.py [--data FILE] [--steps N] [--picture FILE]

Cross-entropy, z-loss and distillation from a teacher that is trained first, all three in one pass over the logits. The
text is the Python standard library's own source unless a file is given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import demo_jax
import demo_torch
import numpy as np
from demo_model import initial_weights
from demo_report import Report, as_text, draw
from demo_text import Vocabulary, batches, standard_library
from tqdm import tqdm

from duohead import CrossEntropy, Distillation, ZLoss

VOCABULARY, ROWS, LENGTH = 16384, 4, 64
WIDTH, TEACHER_WIDTH = 64, 96
TEMPERATURE = 2.0
LOSSES = {
    "ce": CrossEntropy(),
    "z": ZLoss(weight=1e-4),
    "kd": Distillation(
        loss_type="forward_kl",
        temperature=TEMPERATURE,
        student_temperature=TEMPERATURE,
        weight=0.5 * TEMPERATURE**2,
    ),
}
TIMED = {
    "torch": ("compiled", "eager", "per_loss"),
    "jax": ("xla", "per_loss"),
}

Batches = list[tuple[np.ndarray, np.ndarray]]


def train(trainer: demo_torch.Trainer | demo_jax.Trainer, data: Batches, title: str) -> list[dict[str, float]]:
    """Every batch once; each loss by step."""
    history = []
    with tqdm(data, desc=f"{title:16}", unit="step") as bar:
        for tokens, labels in bar:
            history.append(trainer.step(tokens, labels))
            bar.set_postfix({name: f"{value:.3f}" for name, value in history[-1].items()})
    return history


def time_steps(
    trainers: dict[str, demo_torch.Trainer | demo_jax.Trainer], data: Batches
) -> dict[tuple[str, str], float]:
    """Median seconds of a training step for each implementation.

    They take turns, so that a busy moment of the machine meets all; the first turn compiles and is left out.
    """
    variants = [(framework, name) for framework, names in TIMED.items() for name in names]
    if demo_torch.compiler_fault() is not None:
        variants.remove(("torch", "compiled"))
    seconds: dict[tuple[str, str], list[float]] = {variant: [] for variant in variants}
    for tokens, labels in tqdm(data, desc=f"{'time':16}", unit="turn"):
        for framework, name in variants:
            start = time.perf_counter()
            trainers[framework].step(tokens, labels, name)
            seconds[framework, name].append(time.perf_counter() - start)
    return {variant: statistics.median(found[1:]) for variant, found in seconds.items()}


def run(text: str, steps: int, picture: Path) -> Report:
    """The whole demo; the picture is written and the table printed."""
    vocabulary = Vocabulary(text, VOCABULARY)
    tokens = vocabulary.encode(text)
    print(f"{len(text) / 1e6:.1f} MB of text, {len(tokens):,} tokens, a vocabulary of {len(vocabulary):,}")
    data = batches(tokens, steps, ROWS, LENGTH, seed=1)

    teacher = demo_torch.Trainer(initial_weights(len(vocabulary), TEACHER_WIDTH, seed=2), {"ce": CrossEntropy()})
    train(teacher, batches(tokens, steps, ROWS, LENGTH, seed=3), "teacher")

    start = initial_weights(len(vocabulary), WIDTH, seed=4)
    in_torch = demo_torch.Trainer(start, LOSSES, teacher.trained())
    in_jax = demo_jax.Trainer(start, LOSSES, teacher.trained())
    torch_history = train(in_torch, data, "student, PyTorch")
    jax_history = train(in_jax, data, "student, JAX")

    again = batches(tokens, 1 + min(steps, 5), ROWS, LENGTH, seed=5)
    seconds = time_steps({"torch": in_torch, "jax": in_jax}, again)
    report = Report(torch_history, jax_history, seconds)
    draw(report, picture)
    print(f"\n{as_text(report)}\n\npicture: {picture}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path, help="a text file (default: the standard library's source)")
    parser.add_argument("--steps", type=int, default=100, help="of the teacher and of each student")
    parser.add_argument("--picture", type=Path, default=Path("docs/demo.png"))
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: must be at least 1, got {options.steps}")
    text = standard_library() if options.data is None else options.data.read_text(encoding="utf-8", errors="replace")
    run(text, options.steps, options.picture)


if __name__ == "__main__":
    main()
