"""2,000 steps with changing shapes, masks, weights and sets of losses: nothing grows.

Shapes and sets come from a bounded list, as bucketed batches do; everything else changes each step. Stated bounds,
after one round over all combinations: no new compiled program, no new trace, fewer than 200 more live Python objects,
and less than 1 MB more allocated by Python. Caches of plans and of hyperparameters on the device hold at most 256 and
64 entries; they are emptied before counting.
"""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from duohead import DPO, GRPO, GSPO, CrossEntropy, Distillation, EntropyLoss, ZLoss, prepare
from duohead_jax import monolithic_loss_and_grad as jax_loss_and_grad
from duohead_jax import xla
from duohead_torch import compiled, monolithic_loss
from duohead_torch.hyper import _cached

STEPS = 2000
SHAPES = ((4, 8), (8, 8), (6, 16))
MORE_OBJECTS = 200
MORE_BYTES = 1_000_000


def sets_of_losses(r: np.random.Generator) -> tuple[dict[str, Any], ...]:
    """Four structures whose every number is new each time."""
    weight = lambda: float(r.uniform(0.1, 2.0))  # noqa: E731
    ce = CrossEntropy(weight=weight())
    return (
        {"ce": ce, "z": ZLoss(weight=weight())},
        {"ce": ce, "kd": Distillation(loss_type="forward_kl", temperature=weight(), weight=weight())},
        {"rl": GRPO(epsilon_high=weight(), beta=weight(), weight=weight()), "h": EntropyLoss(weight=-weight())},
        {"seq": GSPO(weight=weight()), "dpo": DPO(beta=weight(), weight=weight())},
    )


def batch(r: np.random.Generator, tokens: int, columns: int) -> dict[str, np.ndarray]:
    labels = r.integers(0, columns, tokens)
    labels[r.random(tokens) < 0.2] = -100
    floats = {name: r.normal(size=tokens) for name in ("old_logprobs", "ref_logprobs", "advantages")}
    return {
        "logits": r.normal(size=(tokens, columns)).astype(np.float32),
        "labels": labels,
        "mask": r.random(tokens) < 0.9,
        "teacher_logits": r.normal(size=(tokens, columns)).astype(np.float32),
        "segment_ids": r.integers(0, 3, tokens),
        "preference_pairs": np.array([[0, 1], [2, 0]]),
        **{name: array.astype(np.float32) for name, array in floats.items()},
    }


def empty_bounded_caches() -> None:
    assert len(prepare._PLANS) <= prepare._MOST_PLANS
    assert _cached.cache_info().currsize <= (_cached.cache_info().maxsize or 0)
    prepare._PLANS.clear()
    _cached.cache_clear()
    gc.collect()


def watch(step: Callable[[np.random.Generator, int, tuple[int, int], int], float], programs: Callable[[], int]) -> None:
    """Runs all steps and compares the live objects, the memory and the programs with those after the warm-up."""
    r = np.random.default_rng(0)
    choices = list(itertools.product(range(4), SHAPES))

    def steps(count: int) -> None:
        for i in range(count):
            kind, shape = choices[i % len(choices)]
            assert np.isfinite(step(r, i, shape, kind))

    steps(2 * len(choices) + 100)  # also fills the caches of bounded size
    tracemalloc.start()
    steps(len(choices))
    empty_bounded_caches()
    objects, (bytes_before, _), programs_before = len(gc.get_objects()), tracemalloc.get_traced_memory(), programs()
    steps(STEPS)
    empty_bounded_caches()
    more_objects = len(gc.get_objects()) - objects
    more_bytes = tracemalloc.get_traced_memory()[0] - bytes_before
    tracemalloc.stop()
    assert programs() == programs_before
    assert more_objects < MORE_OBJECTS
    assert more_bytes < MORE_BYTES


@pytest.mark.slow
def test_torch_eager() -> None:
    def step(r: np.random.Generator, i: int, shape: tuple[int, int], kind: int) -> float:
        given = {name: torch.from_numpy(array) for name, array in batch(r, *shape).items()}
        logits = given.pop("logits").requires_grad_()
        losses = sets_of_losses(r)[kind]
        loss, _ = monolithic_loss(logits, losses, **given, implementation="eager")
        loss.backward()
        return float(logits.grad.sum() + loss.detach())

    watch(step, lambda: 0)


@pytest.mark.slow
def test_torch_compiled() -> None:
    """One set of losses in two shapes: one program for each half, compiled again only for the second shape."""

    def step(r: np.random.Generator, i: int, shape: tuple[int, int], kind: int) -> float:
        tokens = 4 if kind % 2 else 7
        given = batch(r, tokens, 16)
        logits = torch.from_numpy(given["logits"]).requires_grad_()
        loss, _ = monolithic_loss(
            logits,
            sets_of_losses(r)[0],
            labels=torch.from_numpy(given["labels"]),
            mask=torch.from_numpy(given["mask"]),
            implementation="compiled",
        )
        loss.backward()
        return float(logits.grad.sum() + loss.detach())

    def programs() -> int:
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        cached = compiled._evaluate_program.cache_info().currsize + compiled._gradient_program.cache_info().currsize
        return frames + cached

    watch(step, programs)


@pytest.mark.slow
def test_jax() -> None:
    """One trace for each set and shape, whatever the numbers."""

    def step(r: np.random.Generator, i: int, shape: tuple[int, int], kind: int) -> float:
        given = {name: jnp.asarray(array) for name, array in batch(r, *shape).items()}
        (loss, _), gradient = jax_loss_and_grad(
            given.pop("logits"), sets_of_losses(r)[kind], **given, implementation="xla"
        )
        return float(np.asarray(gradient).sum() + np.asarray(loss))

    before = xla.loss_and_grad._cache_size()  # other tests of this process have traced theirs
    watch(step, xla.loss_and_grad._cache_size)
    assert xla.loss_and_grad._cache_size() - before <= 4 * len(SHAPES) + 4
    jax.clear_caches()
