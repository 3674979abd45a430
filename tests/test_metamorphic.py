"""What must not change, and what must change by a known factor, on every implementation.

In float64, so that a relation holds to rounding: 1e-11 of the size of what is compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from robust import everyday
from robust.core_runs import Outcome, Run
from robust.implementations import FAST, SLOW

CHOSEN = {**FAST, "jax_xla": SLOW["jax_xla"]}
TOKENS, COLUMNS = 8, 7
#: two batches each, and one where every operation is compiled first
PARAMETERS = [(name, seed) for name in CHOSEN for seed in ((1,) if name.startswith("jax") else (1, 2))]
#: the outcome of the unchanged inputs, computed once for each implementation and batch
_before: dict[tuple[str, int], Outcome] = {}


@pytest.fixture(params=PARAMETERS, ids=lambda chosen: f"{chosen[0]}-{chosen[1]}")
def chosen(request: pytest.FixtureRequest) -> tuple[str, int]:
    found: tuple[str, int] = request.param
    return found


@pytest.fixture
def run(chosen: tuple[str, int]) -> Run:
    return CHOSEN[chosen[0]]


@pytest.fixture
def given(chosen: tuple[str, int]) -> dict[str, Any]:
    return everyday.inputs(chosen[1], TOKENS, COLUMNS)


@pytest.fixture
def before(run: Run, given: dict[str, Any], chosen: tuple[str, int]) -> Outcome:
    if chosen not in _before:
        _before[chosen] = run(everyday.head(), given, "float64")
    return _before[chosen]


def same(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert np.isfinite(b).all()
    np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * max(1.0, float(np.abs(b).max(initial=0.0))))


def same_losses(after: Outcome, before: Outcome) -> None:
    same(after.loss, before.loss)
    assert after.losses.keys() == before.losses.keys()
    for name, value in before.losses.items():
        same(after.losses[name], value)


def test_a_constant_added_to_a_row(run: Run, given: dict[str, Any], before: Outcome) -> None:
    """Only the z-loss knows where zero is."""
    head = everyday.head()
    del head["losses"]["z"]
    moved = dict(given, logits=given["logits"] + np.linspace(-3.0, 5.0, TOKENS)[:, None])
    moved["teacher_logits"] = {name: array - 2.0 for name, array in given["teacher_logits"].items()}
    after = run(head, moved, "float64")
    for name in head["losses"]:
        same(after.losses[name], before.losses[name])
    same(after.gradient, run(head, given, "float64").gradient)
    # d/dc of every loss but the z-loss is 0: the gradient of a row sums to 0
    same(after.gradient.sum(-1) + 1.0, np.ones(TOKENS))


def test_vocabulary_permuted(run: Run, given: dict[str, Any], before: Outcome) -> None:
    order = np.random.default_rng(0).permutation(COLUMNS)
    position = np.argsort(order)
    moved = dict(given, logits=given["logits"][:, order])
    moved["teacher_logits"] = {name: array[:, order] for name, array in given["teacher_logits"].items()}
    moved["labels"] = np.where(given["labels"] >= 0, position[np.maximum(given["labels"], 0)], given["labels"])
    after = run(everyday.head(), moved, "float64")
    same_losses(after, before)
    same(after.gradient, before.gradient[:, order])


def test_tokens_permuted(run: Run, given: dict[str, Any], before: Outcome) -> None:
    order = np.random.default_rng(1).permutation(TOKENS)
    after = run(everyday.head(), everyday.rearrange(given, order), "float64")
    same_losses(after, before)
    same(after.gradient, before.gradient[order])
    for name, value in before.metrics.items():
        same(after.metrics[name], value)


def test_segments_renamed(run: Run, given: dict[str, Any], before: Outcome) -> None:
    names = np.array([5, 0, 3, 6])
    renamed = dict(given, segment_ids=names[given["segment_ids"]], preference_pairs=names[given["preference_pairs"]])
    after = run(everyday.head(), renamed, "float64")
    same_losses(after, before)
    same(after.gradient, before.gradient)


def test_batch_split(run: Run, given: dict[str, Any], before: Outcome) -> None:
    """With the global counts, parts add up to the whole; whole sequences and pairs stay together."""
    ids = given["segment_ids"]
    valid = (given["labels"] >= 0) & given["mask"]
    counts = {"num_tokens": int(valid.sum()), "num_sequences": len(np.unique(ids[valid])), "num_pairs": 2}
    parts = []
    for pair in given["preference_pairs"]:
        rows = np.flatnonzero(np.isin(ids, pair))
        part = everyday.rearrange(given, rows)
        parts.append(
            (rows, run(everyday.head(), dict(part, preference_pairs=pair[None], num_segments=8, **counts), "float64"))
        )
    same(sum(part.loss for _, part in parts), before.loss)
    for name, value in before.losses.items():
        same(sum(part.losses[name] for _, part in parts), value)
    gradient = np.zeros_like(before.gradient)
    for rows, part in parts:
        gradient[rows] += part.gradient
    same(gradient, before.gradient)


def test_masked_rows_of_garbage(run: Run, given: dict[str, Any], before: Outcome) -> None:
    more = everyday.rearrange(given, np.arange(TOKENS + 2) % TOKENS)
    more["num_segments"] = TOKENS
    more["mask"][[0, 1]] = False
    moved = np.r_[np.arange(2, TOKENS), 0, 1]  # rows 8 and 9 are the old 0 and 1
    for array in (more["logits"], *more["teacher_logits"].values()):
        array[:2] = [[np.nan], [np.inf]]
    for name in ("old_logprobs", "ref_logprobs", "advantages", "importance_weights"):
        more[name][:2] = np.nan
    after = run(everyday.head(), more, "float64")
    same_losses(after, before)
    same(after.gradient[2:], before.gradient[moved])
    assert (after.gradient[:2] == 0.0).all()


def test_columns_at_minus_infinity(run: Run, given: dict[str, Any]) -> None:
    """They add nothing: all but the smoothed cross-entropy, whose mean is over V columns, stay as they are."""
    head = everyday.head()
    del head["losses"]["ce"]
    wider = dict(given, logits=np.pad(given["logits"], ((0, 0), (0, 3)), constant_values=-np.inf))
    wider["teacher_logits"] = {
        name: np.pad(array, ((0, 0), (0, 3)), constant_values=-np.inf)
        for name, array in given["teacher_logits"].items()
    }
    before, after = run(head, given, "float64"), run(head, wider, "float64")
    same_losses(after, before)
    same(after.gradient[:, :COLUMNS], before.gradient)
    assert (after.gradient[:, COLUMNS:] == 0.0).all()


def test_padding_columns(run: Run, given: dict[str, Any], before: Outcome) -> None:
    """Columns past vocab_size do not exist, whatever they hold."""
    padding = np.array([1e30, np.nan, -7.0])
    wider = dict(given, vocab_size=COLUMNS)
    wider["logits"] = np.concatenate([given["logits"], np.tile(padding, (TOKENS, 1))], -1)
    wider["teacher_logits"] = {
        name: np.concatenate([array, np.tile(padding, (TOKENS, 1))], -1)
        for name, array in given["teacher_logits"].items()
    }
    after = run(everyday.head(), wider, "float64")
    same_losses(after, before)
    same(after.gradient[:, :COLUMNS], before.gradient)
    assert (after.gradient[:, COLUMNS:] == 0.0).all()


def test_doubled_loss_is_doubled_weight(run: Run, given: dict[str, Any]) -> None:
    once = {"losses": {name: everyday.LOSSES[name] for name in ("ce", "rl", "reverse", "dpo")}}
    twice = {"losses": {**once["losses"], **{name + "2": loss for name, loss in once["losses"].items()}}}
    doubled = {
        "losses": {name: dict(loss, weight=2.0 * loss.get("weight", 1.0)) for name, loss in once["losses"].items()}
    }
    a, b = run(twice, given, "float64"), run(doubled, given, "float64")
    same(a.loss, b.loss)
    same(a.gradient, b.gradient)
    for name in once["losses"]:
        same(a.losses[name], b.losses[name])
        same(a.losses[name + "2"], b.losses[name])


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_scale_by_powers_of_two(run: Run, given: dict[str, Any], factor: float) -> None:
    """A power of two moves between the logits and the scale without any rounding: the bits are the same."""
    smaller = dict(given, logits=given["logits"] / factor)
    smaller["teacher_logits"] = {name: array / factor for name, array in given["teacher_logits"].items()}
    a = run(everyday.head(), given, "float64")
    b = run(everyday.head(logits_scale_factor=factor), smaller, "float64")
    same_losses(b, a)
    same(b.gradient / factor, a.gradient)


@pytest.mark.parametrize("loss_type", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_teacher_is_student(run: Run, given: dict[str, Any], loss_type: str, scale: float) -> None:
    head = {
        "losses": {"kl": {"type": "distillation", "loss_type": loss_type, "logits_scale_factor": scale}},
        "logits_scale_factor": 3.0,
    }
    twin = dict(given, teacher_logits={"teacher": given["logits"]})
    after = run(head, twin, "float64")
    assert abs(after.loss) <= 1e-15
    assert np.abs(after.gradient).max() <= 1e-15
