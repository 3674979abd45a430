"""Runs the engine's two halves, the evaluation and the write, in eager mode; ``compiled.py`` compiles the same two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from duohead import engine
from duohead.plan import Plan
from duohead.statistics import Columns, Inputs
from duohead_torch import namespace


class Job(NamedTuple):
    """One pass with its arrays: everything that evaluation and write share."""

    plan: Plan
    hyper: tuple[torch.Tensor, ...]
    inputs: Inputs


def valid_rows(labels: torch.Tensor | None, mask: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Which rows exist: the mask and a label that is not negative."""
    if labels is None:
        return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device) if mask is None else mask
    return labels >= 0 if mask is None else (labels >= 0) & mask


class Setting(NamedTuple):
    """What is the same for every pass of a call, and static."""

    columns: Columns
    collectives: Any
    split_vocab: bool
    split_sequences: bool


def evaluate(job: Job, setting: Setting, logits: torch.Tensor) -> engine.Evaluation:
    """Everything but the gradient."""
    return engine.evaluate(
        namespace,
        job.plan,
        job.hyper,
        logits,
        job.inputs,
        setting.columns,
        setting.collectives,
        setting.split_vocab,
        setting.split_sequences,
    )


class Written(NamedTuple):
    """What the write of one pass needs beside the logits."""

    job: Job
    normalisers: Any
    coefficients: Any


def gradient(
    written: tuple[Written, ...], setting: Setting, logits: torch.Tensor, upstream: torch.Tensor
) -> torch.Tensor:
    """The combined gradient of all passes, summed in the compute dtype."""
    passes = [(item.job.plan, item.job.hyper, item.job.inputs, item.normalisers, item.coefficients) for item in written]
    return engine.combined_gradient(namespace, passes, logits, setting.columns, upstream)


class EagerRunner:
    """Runs the halves as they stand. It is also what is traced inside a user's own torch.compile."""

    name = "eager"

    def gives_gradient(self, jobs: tuple[Job, ...], setting: Setting) -> bool:
        """Whether one launch evaluates and writes the gradient: no, both halves read the logits."""
        return False

    def evaluate(self, jobs: tuple[Job, ...], setting: Setting, logits: torch.Tensor) -> list[engine.Evaluation]:
        return [evaluate(job, setting, logits) for job in jobs]

    def gradient(
        self,
        written: tuple[Written, ...],
        setting: Setting,
        logits: torch.Tensor,
        upstream: torch.Tensor,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """The gradient in the logits' dtype, rounded once; ``out`` takes (or adds) it in place."""
        total = gradient(written, setting, logits, upstream)
        if out is None:
            return total.to(logits.dtype)
        if accumulate:
            return out.add_(total.to(out.dtype)) if out.dtype == total.dtype else out.copy_(out + total)
        return out.copy_(total)
