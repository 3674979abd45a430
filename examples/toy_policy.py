"""What the GRPO and DPO examples share: a tiny task, its reward, and a plot. NumPy alone.

The task is counting: after a prompt token each next token should be the one before plus one, modulo the vocabulary.
The policy is a table of embeddings and one hidden layer, ``logits = tanh(token[previous] + position[t]) @ out``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

VOCAB, LENGTH, WIDTH = 16, 8, 32
PROMPTS, GROUP = 16, 8


def parameters(seed: int = 0) -> dict[str, np.ndarray]:
    """The policy's initial weights, float32."""
    r = np.random.default_rng(seed)
    shapes = {"token": (VOCAB, WIDTH), "position": (LENGTH, WIDTH), "out": (WIDTH, VOCAB)}
    return {name: (0.3 * r.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def previous(prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    """The token before each completion token: the prompt, then the completion shifted by one."""
    return np.concatenate([prompts[:, None], completions[:, :-1]], axis=1)


def reward(prompts: np.ndarray, completions: np.ndarray) -> np.ndarray:
    """The share of steps that count up by one, per completion."""
    return (completions == (previous(prompts, completions) + 1) % VOCAB).mean(-1)


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards relative to their group of completions of one prompt, in standard deviations."""
    groups = rewards.reshape(-1, GROUP)
    centred = groups - groups.mean(-1, keepdims=True)
    return (centred / (groups.std(-1, keepdims=True) + 1e-4)).reshape(-1).astype(np.float32)


def prompts_of_groups(r: np.random.Generator) -> np.ndarray:
    return np.repeat(r.integers(0, VOCAB, PROMPTS), GROUP)


def segment_ids(sequences: int) -> np.ndarray:
    """Which sequence each token belongs to, ``(sequences, LENGTH)``."""
    return np.repeat(np.arange(sequences)[:, None], LENGTH, axis=1)


def preference_batch(r: np.random.Generator, pairs: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(prompts, completions, pairs): in each pair the chosen completion makes fewer mistakes than the rejected one."""
    prompts = np.repeat(r.integers(0, VOCAB, pairs), 2)
    completions = np.empty((2 * pairs, LENGTH), np.int64)
    mistakes = np.tile([4, 5], pairs)
    before = prompts.copy()
    wrong = np.argsort(r.random((2 * pairs, LENGTH)), axis=1) < mistakes[:, None]
    for t in range(LENGTH):
        slip = np.where(wrong[:, t], r.integers(1, VOCAB, 2 * pairs), 0)
        completions[:, t] = (before + 1 + slip) % VOCAB
        before = completions[:, t]
    order = np.arange(2 * pairs).reshape(pairs, 2)
    return prompts, completions, order


def arguments(description: str, steps: int, picture: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help=f"optimiser steps (default {steps})")
    parser.add_argument("--plot", type=Path, default=None, help=f"write the curves to a picture, such as {picture}")
    return parser.parse_args()


def progress(step: int, steps: int, values: dict[str, float]) -> None:
    """One line every tenth of the way, and at the end."""
    if step % max(1, steps // 10) == 0 or step == steps - 1:
        print(f"step {step + 1:4d}/{steps}  " + "  ".join(f"{name} {value:8.4f}" for name, value in values.items()))


def plot(path: Path | None, title: str, curves: dict[str, list[float]]) -> None:
    """One panel per curve; without matplotlib, a line that says so."""
    if path is None:
        return
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no picture (pip install duohead[demo])")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(3.2 * len(curves), 2.6), layout="constrained")
    for axis, (name, values) in zip(axes, curves.items(), strict=True):
        axis.plot(values, color="#2a6f97")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"wrote {path}")
