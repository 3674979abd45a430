"""Hyperparameters as scalar tensors, so that changing a number never changes a program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch


def hyper_tensors(values: Sequence[Any], logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One scalar tensor per hyperparameter, on the logits' device and in their compute dtype."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if torch.compiler.is_compiling():
        # Adding to a tensor keeps a number that changes from step to step symbolic in the graph; the stack keeps those
        # in use that nothing reads (num_tokens beside a sum, say), which Dynamo would make constants.
        zero = torch.zeros((), dtype=torch.float64, device=logits.device)
        return torch.stack([_scalar(value, zero) for value in values]).to(dtype).unbind()
    if any(isinstance(value, torch.Tensor) for value in values):
        return tuple(_scalar(value, torch.zeros((), dtype=dtype, device=logits.device)).to(dtype) for value in values)
    return _cached(tuple(float(value) for value in values), dtype, logits.device)


def symbolic_scale(value: Any, logits: torch.Tensor) -> Any:
    """The head's scale, under torch.compile as a tensor.

    What the plan multiplies and divides by it is then tensor arithmetic: torch 2.11 makes a constant of a number that
    another one is divided by.
    """
    if not torch.compiler.is_compiling():
        return value
    return _scalar(value, torch.zeros((), dtype=torch.float64, device=logits.device))


def _scalar(value: Any, zero: torch.Tensor) -> torch.Tensor:
    return value.detach() + zero if isinstance(value, torch.Tensor) else zero + value


@functools.lru_cache(maxsize=64)
def _cached(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """One copy to the device for all of them, kept while they do not change."""
    return torch.tensor(values, dtype=dtype, device=device).unbind()
