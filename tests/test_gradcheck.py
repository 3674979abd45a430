"""Derivatives against finite differences, in float64 and away from the clip edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers import to_jax, to_torch
from jax.test_util import check_grads
from robust import everyday
from robust.core_runs import head_spec

import duohead_jax
import duohead_torch
from duohead.token_statistics import ALL

TOKENS, COLUMNS = 5, 4


def random_head(seed: int) -> dict[str, Any]:
    """Four of the families at random, with a random scale and softcap; seed 0: all of them.

    CISPO's ratio is a constant to the derivative but not to finite differences: it has a test of its own.
    """
    every = {name: loss for name, loss in everyday.LOSSES.items() if name != "cispo"}
    if seed == 0:
        return {"losses": every, "final_logit_softcap": 5.0}
    r = np.random.default_rng(seed)
    names = r.choice(list(every), 4, replace=False)
    settings = {"logits_scale_factor": r.choice([1.0, 0.7]), "final_logit_softcap": r.choice([None, 5.0])}
    return {"losses": {str(name): everyday.LOSSES[str(name)] for name in names}, **settings}


def call(seed: int) -> tuple[Any, dict[str, Any]]:
    head = random_head(seed)
    given = everyday.inputs(40 + seed, TOKENS, COLUMNS)
    del given["logits"]
    # Ratios stay away from 1 ± ε whatever the softcap does: far from old_logprobs on both sides, or in the middle.
    logits = everyday.inputs(40 + seed, TOKENS, COLUMNS)["logits"]
    x = logits if head["final_logit_softcap"] is None else 5.0 * np.tanh(logits / 5.0)
    x = x * head.get("logits_scale_factor", 1.0)
    lp = (x - np.logaddexp.reduce(x, -1, keepdims=True))[np.arange(TOKENS), np.maximum(given["labels"], 0)]
    given["old_logprobs"] = lp - np.array([0.05, -0.1, 0.6, 0.1, -0.7])
    return head, {**given, "logits": logits}


@pytest.mark.parametrize("seed", range(7))
def test_torch_total(seed: int) -> None:
    head, given = call(seed)
    given = to_torch(given, "float64")
    logits = given.pop("logits").requires_grad_()

    def total(values: torch.Tensor) -> torch.Tensor:
        return duohead_torch.monolithic_loss(values, head_spec(head), **given, implementation="eager").loss

    assert torch.autograd.gradcheck(total, (logits,), eps=1e-6, atol=1e-8, rtol=1e-6)


def test_cispo_where_its_ratio_is_clipped() -> None:
    """Outside the band the clipped ratio is a constant for both."""
    head, given = call(1)
    given["old_logprobs"] = given["old_logprobs"] + np.array([0.9, -0.9, 0.9, -0.9, 1.5])
    given = to_torch(given, "float64")
    logits = given.pop("logits").requires_grad_()
    spec = head_spec({**head, "losses": {"cispo": everyday.LOSSES["cispo"]}})

    def total(values: torch.Tensor) -> torch.Tensor:
        return duohead_torch.monolithic_loss(values, spec, **given, implementation="eager").loss

    assert torch.autograd.gradcheck(total, (logits,), eps=1e-6, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_jax_total(seed: int) -> None:
    head, given = call(seed)
    given = to_jax(given, "float64")
    logits = given.pop("logits")

    @jax.jit
    def total(values: jax.Array) -> jax.Array:
        return duohead_jax.monolithic_loss(values, head_spec(head), **given, implementation="xla").loss

    check_grads(total, (logits,), order=1, modes=["rev"], atol=1e-8, rtol=1e-6, eps=1e-6)


def statistics_inputs() -> tuple[dict[str, Any], dict[str, Any]]:
    given = everyday.inputs(3, TOKENS, COLUMNS)
    arrays = {"logits": given["logits"], "labels": given["labels"], "mask": given["mask"]}
    arrays["teacher_logits"] = {"teacher": given["teacher_logits"]["teacher"]}
    settings = {"temperature": 1.5, "student_temperature": 0.8, "final_logit_softcap": 4.0, "logits_scale_factor": 1.3}
    return arrays, settings


@pytest.mark.parametrize(("name", "beta"), [*((name, 0.3) for name in ALL), ("jsd", 0.0), ("jsd", 1.0)])
def test_torch_statistic(name: str, beta: float) -> None:
    """Each statistic by itself, with a cotangent of its own for every token."""
    arrays, settings = statistics_inputs()
    given = to_torch(arrays, "float64")
    logits = given.pop("logits").requires_grad_()

    def values(x: torch.Tensor) -> torch.Tensor:
        found = duohead_torch.token_statistics(x, statistics=(name,), jsd_beta=beta, **given, **settings)
        return getattr(found, name)

    assert torch.autograd.gradcheck(values, (logits,), eps=1e-6, atol=1e-8, rtol=1e-6)


def mixture(found: Any, exp: Any) -> Any:
    """A loss of a user's own: every statistic, and products of them."""
    return (
        exp(found.logprob) * found.entropy
        + found.lse * found.mean_logprob
        + found.teacher_cross_entropy * found.forward_kl
        + found.reverse_kl * found.jsd
    ).sum()


def test_torch_statistics_together() -> None:
    arrays, settings = statistics_inputs()
    given = to_torch(arrays, "float64")
    logits = given.pop("logits").requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return mixture(duohead_torch.token_statistics(x, statistics=ALL, **given, **settings), torch.exp)

    assert torch.autograd.gradcheck(loss, (logits,), eps=1e-6, atol=1e-8, rtol=1e-6)


def test_jax_statistics() -> None:
    """Every statistic by itself and all together, in one compiled program."""
    arrays, settings = statistics_inputs()
    given = to_jax(arrays, "float64")
    logits = given.pop("logits")
    weights = jnp.asarray(np.random.default_rng(0).normal(size=(len(ALL), TOKENS)))

    @jax.jit
    def losses(x: jax.Array) -> jax.Array:
        found = duohead_jax.token_statistics(x, statistics=ALL, **given, **settings)
        single = [(w * getattr(found, name)).sum() for w, name in zip(weights, ALL, strict=True)]
        return jnp.stack([*single, mixture(found, jnp.exp)])

    check_grads(losses, (logits,), order=1, modes=["rev"], atol=1e-8, rtol=1e-6, eps=1e-6)
