"""Sums over sequences and pairs in kernels: many spans and chunks, any order of tokens, hard ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from duohead import DPO, GRPO, GSPO, KTO, ORPO, CrossEntropy, EntropyLoss, SimPO
from duohead.kernels import launch
from duohead_torch import monolithic_loss_and_grad

LOSSES = {
    "ce": CrossEntropy(),
    "rl": GRPO(beta=0.1, reduction="sequence_mean_token_mean"),
    "sums": GRPO(reduction="sequence_mean_token_sum", metrics="none"),
    "seq": GSPO(beta=0.1, weight=0.5),
    "seq_mean": GSPO(reduction="sequence_mean_token_mean"),
    "h": EntropyLoss(weight=-0.1),
    "dpo": DPO(),
    "ipo": DPO(loss_type="ipo", reduction="sum"),
    "simpo": SimPO(),
    "orpo": ORPO(reduction="constant", denominator=3.0),
    "kto": KTO(),
}


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few dozen tokens are several spans, and several chunks."""
    monkeypatch.setattr(launch, "SPAN", 16)
    monkeypatch.setattr(launch, "SPANS", 2)
    monkeypatch.setattr(launch, "ITEMS", 8)


METRICS = ("entropy", "accuracy", "num_tokens")


def inputs_of(tokens: int, vocab: int, segments: int, pairs: int, order: str, seed: int = 0) -> dict[str, Any]:
    r = np.random.default_rng(seed)
    ids = np.sort(r.integers(-1, segments, tokens))
    if order == "shuffled":
        r.shuffle(ids)
    if order == "with gaps":
        ids = np.where(ids % 3 == 1, -1, ids)
    labels = r.integers(0, vocab, tokens)
    labels[::7] = -100
    chosen = r.integers(-1, segments, (pairs, 2))
    return {
        "logits": torch.tensor(r.normal(size=(tokens, vocab)), dtype=torch.float32),
        "labels": torch.tensor(labels),
        "advantages": torch.tensor(r.normal(size=tokens), dtype=torch.float32),
        "old_logprobs": torch.tensor(-r.uniform(1, 4, tokens), dtype=torch.float32),
        "ref_logprobs": torch.tensor(-r.uniform(1, 4, tokens), dtype=torch.float32),
        "segment_ids": torch.tensor(ids),
        "preference_pairs": torch.tensor(chosen),
        "num_segments": segments,
    }


def run(arrays: dict[str, Any], implementation: str, losses: Any = LOSSES) -> Any:
    arrays = dict(arrays)
    logits = arrays.pop("logits")
    if implementation == "eager":
        logits = logits.double()
        arrays = {key: value.double() if _floating(value) else value for key, value in arrays.items()}
    (loss, aux), gradient = monolithic_loss_and_grad(
        logits, losses, implementation=implementation, metrics=METRICS, **arrays
    )
    return loss, aux, gradient


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def assert_equal_to_eager(arrays: dict[str, Any], losses: Any = LOSSES) -> None:
    loss, aux, gradient = run(arrays, "triton", losses)
    wanted, exact, right = run(arrays, "eager", losses)
    close = {"rtol": 2e-5, "atol": 2e-6, "check_dtype": False}
    torch.testing.assert_close(loss, wanted, **close)
    assert set(aux.metrics) == set(exact.metrics)
    for key, value in (exact.losses | exact.metrics).items():
        torch.testing.assert_close((aux.losses | aux.metrics)[key], value, msg=key, **close)
    for key, part in exact.parts.items():
        assert type(aux.parts[key]) is type(part)
        np.testing.assert_allclose(np.array(aux.parts[key], float), np.array(part, float), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(gradient, right, rtol=2e-5, atol=2e-7, check_dtype=False)


@pytest.mark.parametrize("order", ["sorted", "shuffled", "with gaps"])
def test_more_than_one_span_and_chunk(order: str) -> None:
    assert_equal_to_eager(inputs_of(110, 5, 20, 40, order))


@pytest.mark.parametrize(("segments", "pairs"), [(1, 1), (1, 0), (5, 40), (40, 3)])
def test_few(segments: int, pairs: int) -> None:
    assert_equal_to_eager(inputs_of(37, 6, segments, pairs, "shuffled", seed=segments))


@pytest.mark.parametrize("order", ["sorted", "shuffled", "with gaps"])
@pytest.mark.parametrize("names", [("rl",), ("rl", "sums", "h"), ("tokens",)], ids=" ".join)
def test_one_launch_that_needs_lengths_or_their_number(names: tuple[str, ...], order: str) -> None:
    losses = LOSSES | {"tokens": GRPO()}
    arrays = inputs_of(70, 5, 20, 0, order, seed=3)
    del arrays["preference_pairs"]
    assert_equal_to_eager(arrays, {name: losses[name] for name in names})
    _, aux, _ = run(arrays | {"num_segments": 18}, "triton", {name: losses[name] for name in names})
    assert aux.metrics[f"{names[0]}/num_segments"].isnan()
    assert aux.losses[names[0]].isnan() == (names != ("tokens",))


def test_segments_default_to_the_number_of_tokens_and_inputs_may_be_of_segments() -> None:
    arrays = inputs_of(30, 6, 4, 3, "shuffled")
    assert_equal_to_eager({key: value for key, value in arrays.items() if key != "num_segments"})
    assert_equal_to_eager(arrays | {"advantages": torch.tensor([1.0, -2.0, 0.5, 0.0])})


def test_given_counts_replace_those_counted() -> None:
    assert_equal_to_eager(inputs_of(30, 6, 4, 3, "sorted") | {"num_tokens": 77.0, "num_sequences": 9.0, "num_pairs": 5})


def test_tokens_of_several_dimensions_and_narrow_integers() -> None:
    arrays = inputs_of(24, 6, 4, 3, "shuffled")
    shaped = {key: value.reshape(4, 6, *value.shape[1:]) for key, value in arrays.items() if _per_token(value)}
    shaped["segment_ids"] = shaped["segment_ids"].to(torch.int32)
    shaped["preference_pairs"] = arrays["preference_pairs"].to(torch.int32)
    assert_equal_to_eager(arrays | shaped)


def _per_token(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape[0] == 24


@pytest.mark.parametrize("what", ["nothing valid", "no tokens"])
def test_nothing(what: str) -> None:
    arrays = inputs_of(0 if what == "no tokens" else 9, 6, 4, 3, "sorted")
    arrays["labels"] = torch.full_like(arrays["labels"], -100)
    arrays["logits"] = torch.full_like(arrays["logits"], float("nan"))
    loss, aux, gradient = run(arrays, "triton")
    assert loss == 0
    assert not any(value.isnan() for value in (*aux.losses.values(), *aux.metrics.values()))
    assert not gradient.any()


def test_the_same_bits_again_and_for_any_number_of_segments() -> None:
    arrays = inputs_of(70, 5, 20, 12, "shuffled")
    loss, aux, gradient = run(arrays, "triton")
    for number in (20, 21, 70):
        other, other_aux, same = run(arrays | {"num_segments": number}, "triton")
        assert torch.equal(other, loss)
        assert all(torch.equal(other_aux.losses[key], value) for key, value in aux.losses.items())
        assert torch.equal(same, gradient)


def test_what_names_no_segment_shows() -> None:
    """An id past the segments makes every sequence loss NaN, a pair that names one every pair loss; no other."""
    arrays = inputs_of(24, 6, 4, 3, "shuffled")
    arrays["advantages"] += 0.01
    _, aux, _ = run(arrays | {"num_segments": 3}, "triton")
    assert {name for name, value in aux.losses.items() if not value.isnan()} == {"ce", "h"}
    assert aux.metrics["seq/num_segments"].isnan()
    assert aux.metrics["seq/ratio_new_old"].isnan()
    _, compiled, _ = run(arrays | {"num_segments": 3}, "compiled")
    for name, value in compiled.metrics.items():
        assert value.isnan() == aux.metrics[name].isnan(), name
    _, aux, _ = run(arrays | {"preference_pairs": torch.tensor([[0, 1], [1, 9]])}, "triton")
    assert {name for name, value in aux.losses.items() if value.isnan()} == {"dpo", "ipo", "simpo", "orpo"}


def test_a_nan_stays_in_its_own_sequence() -> None:
    arrays = inputs_of(40, 6, 8, 0, "sorted")
    losses = {"seq": GSPO(reduction="sum", metrics="none")}
    hit = int((arrays["labels"] >= 0).nonzero()[20])
    arrays["logits"][hit, 2] = float("nan")
    loss, _, gradient = run(arrays, "triton", losses)
    own = (arrays["segment_ids"] == arrays["segment_ids"][hit]) & (arrays["labels"] >= 0)
    assert loss.isnan()
    assert torch.equal(gradient.isnan().any(1), own)
