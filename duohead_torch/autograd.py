"""Attaches the one combined gradient to the loss: forward saves [tokens] vectors, backward is the write."""

from __future__ import annotations

from typing import Any

import torch

from duohead_torch.runner import Setting, Written
from duohead_torch.trees import flatten, rebuild, structure


class _Once(torch.autograd.Function):
    """gradient → gradient, whose own derivative is an error."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError(
            "logits: the gradient that duohead writes cannot be differentiated again (create_graph=True); a second "
            "derivative needs the loss in plain torch operations"
        )


def refuse_second_derivative(gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The gradient, as an error for whoever differentiates it again; without this it would count as a constant."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Once.apply(gradient, logits)
    return gradient


class _Attach(torch.autograd.Function):
    """loss → loss, with d loss / d logits = upstream · write(coefficients)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: torch.Tensor,
        loss: torch.Tensor,
        runner: Any,
        setting: Setting,
        shape: Any,
        overwrite: bool,
        gradient: torch.Tensor | None,
        *saved: torch.Tensor,
    ) -> torch.Tensor:
        ctx.runner, ctx.setting, ctx.shape, ctx.overwrite = runner, setting, shape, overwrite
        ctx.gradient = gradient
        ctx.spent = False
        ctx.save_for_backward(logits, *saved)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:  # type: ignore[override]
        if ctx.overwrite and ctx.spent:
            raise RuntimeError(
                "overwrite_logits=True: the first backward wrote the gradient over the logits, a second one would need "
                "them; call with overwrite_logits=False to use retain_graph"
            )
        attached, *saved = ctx.saved_tensors
        logits = attached.detach()
        written = rebuild(ctx.shape, list(saved))
        out = None
        if ctx.overwrite:
            ctx.spent = True
            out = logits
        ready, ctx.gradient = ctx.gradient, None
        with torch.no_grad():
            if ready is not None:
                # The buffer is the caller's from now on; a second backward writes one of its own.
                gradient = ctx.runner.rescale(written, ctx.setting, logits, upstream, ready)
            else:
                gradient = ctx.runner.gradient(written, ctx.setting, logits, upstream, out=out)
        gradient = refuse_second_derivative(gradient, attached)
        return (gradient, None, None, None, None, None, None, *(None for _ in saved))


def attach(
    logits: torch.Tensor,
    loss: torch.Tensor,
    runner: Any,
    setting: Setting,
    written: tuple[Written, ...],
    overwrite: bool,
    gradient: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss as a differentiable function of the logits; ``gradient``: where the forward wrote it already."""
    return _Attach.apply(logits, loss, runner, setting, structure(written), overwrite, gradient, *flatten(written))
