"""The demo's training step in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from demo_model import BETA_1, BETA_2, EPSILON, LEARNING_RATE, Weights

from duohead.loss import Loss
from duohead_torch import monolithic_loss
from duohead_torch.compiled import compiler_fault

__all__ = ["Trainer", "compiler_fault", "logits_of"]


def logits_of(weights: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """``[rows, length]`` token ids → ``[rows, length, vocab]``."""
    x = weights["embedding"][tokens]
    window = weights["mixing"].shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, window - 1, 0))
    mixed = sum(weights["mixing"][k] * padded[:, k : k + x.shape[1]] for k in range(window))
    x = x + torch.tanh(mixed @ weights["inner"]) @ weights["outer"]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weights["gain"]
    return x @ weights["embedding"].T


class Trainer:
    """Trains a model's weights on batches, with a teacher where one is given."""

    def __init__(self, weights: Weights, losses: Mapping[str, Loss], teacher: Weights | None = None) -> None:
        self.weights = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
        self.teacher = None if teacher is None else {name: torch.tensor(array) for name, array in teacher.items()}
        self.losses = losses
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=LEARNING_RATE, betas=(BETA_1, BETA_2), eps=EPSILON)

    def step(self, tokens: np.ndarray, labels: np.ndarray, implementation: str = "auto") -> dict[str, float]:
        """One step of training; each loss, unweighted, before it."""
        ids = torch.from_numpy(tokens)
        teacher_logits = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher_logits = logits_of(self.teacher, ids)
        loss, aux = monolithic_loss(
            logits_of(self.weights, ids),
            self.losses,
            labels=torch.from_numpy(labels),
            teacher_logits=teacher_logits,
            implementation=implementation,
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {name: float(value) for name, value in aux.losses.items()}

    def trained(self) -> Weights:
        """The weights as NumPy arrays."""
        return {name: tensor.detach().numpy().copy() for name, tensor in self.weights.items()}
