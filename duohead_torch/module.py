"""A head's losses as an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from duohead.spec import HeadSpec
from duohead_torch.api import Result, monolithic_loss


class MonolithicLoss(torch.nn.Module):
    """The losses of a HeadSpec (or its configuration, a YAML file or YAML text) as a module without parameters.

    >>> from duohead import CrossEntropy, ZLoss
    >>> head = MonolithicLoss(HeadSpec(losses={"ce": CrossEntropy(), "z": ZLoss(weight=1e-4)}))
    >>> loss, aux = head(torch.zeros(2, 8), labels=torch.tensor([1, 2]), implementation="eager")
    >>> round(float(aux.losses["ce"]), 4)
    2.0794
    """

    def __init__(self, spec: HeadSpec | Mapping[str, Any] | str | Path) -> None:
        super().__init__()
        self.spec = HeadSpec.of(spec)

    def forward(self, logits: torch.Tensor, **inputs: Any) -> Result:
        """The arguments of ``monolithic_loss`` beside the losses."""
        return monolithic_loss(logits, self.spec, **inputs)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}: {loss.type}" for name, loss in self.spec.losses.items())
