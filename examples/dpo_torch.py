"""DPO in PyTorch, sharing its softmax with a z-loss. A toy policy learns which of two completions counts better.

python examples/dpo_torch.py --steps 60 --plot docs/dpo.png
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import toy_policy as toy

from duohead import DPO, ZLoss
from duohead_torch import monolithic_loss, token_statistics

LOSSES = {"dpo": DPO(beta=0.1), "z": ZLoss(weight=1e-4)}
RATE = 4.0
Weights = dict[str, torch.Tensor]


def logits_of(weights: Weights, previous: torch.Tensor) -> torch.Tensor:
    return torch.tanh(weights["token"][previous] + weights["position"]) @ weights["out"]


def batch_of(reference: Weights, r: np.random.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The tokens before, and the labels, sequences, pairs and reference log-probabilities of fresh pairs."""
    prompts, completions, pairs = toy.preference_batch(r)
    previous, labels = torch.tensor(toy.previous(prompts, completions)), torch.tensor(completions)
    with torch.no_grad():
        ref = token_statistics(logits_of(reference, previous), labels, statistics=("logprob",)).logprob
    return previous, {
        "labels": labels,
        "segment_ids": torch.tensor(toy.segment_ids(len(prompts))),
        "preference_pairs": torch.tensor(pairs),
        "ref_logprobs": ref,
    }


def train(steps: int, implementation: str = "auto", seed: int = 0) -> dict[str, list[float]]:
    """Trains from scratch; the curves of loss and metrics on pairs not seen before, one value a step."""
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in toy.parameters(seed).items()}
    reference = {name: value.detach().clone() for name, value in weights.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    r = np.random.default_rng(seed)
    curves: dict[str, list[float]] = {"loss": [], "accuracy": [], "margin": []}
    for step in range(steps):
        previous, batch = batch_of(reference, r)
        loss, aux = monolithic_loss(logits_of(weights, previous), LOSSES, **batch, implementation=implementation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values: dict[str, Any] = {
            "loss": aux.losses["dpo"],
            **{n: aux.metrics[f"dpo/{n}"] for n in ("accuracy", "margin")},
        }
        for name, value in values.items():
            curves[name].append(float(value))
        toy.progress(step, steps, {name: found[-1] for name, found in curves.items()})
    return curves


if __name__ == "__main__":
    options = toy.arguments("DPO on a toy policy, in PyTorch", 60, "docs/dpo.png")
    toy.plot(options.plot, "DPO on a counting task", train(options.steps))
