"""The oracle against the hand-made cases, and its gradients against central finite differences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from duohead.reference import Reference, reference

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
TOKENS, VOCAB = 8, 5


# ----------------------------------------------------------------------------------------------------- case files


def numbers(value: Any) -> Any:
    """JSON to float64: lists may hold "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return np.array(value, dtype=np.float64) if value else np.zeros(0)
    return value


def load(path: Path) -> dict[str, Any]:
    case = json.loads(path.read_text())
    inputs = {key: numbers(value) for key, value in case["inputs"].items()}
    inputs["logits"] = inputs["logits"].astype(DTYPES[case["dtype"]])
    for name in ("labels", "segment_ids", "preference_pairs"):
        if name in inputs:
            inputs[name] = inputs[name].astype(np.int64)
    case["inputs"] = inputs
    return case


def test_there_are_cases() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    case = load(path)
    expected = case["expected"]
    tolerance = {"rtol": case["rtol"], "atol": case["atol"]}
    inputs = case["inputs"]
    before = {key: np.copy(value) for key, value in inputs.items() if isinstance(value, np.ndarray)}

    result = reference(inputs.pop("logits"), case["head"], **inputs)

    np.testing.assert_allclose(result.loss, expected["loss"], **tolerance)
    assert result.losses.keys() == expected["losses"].keys()
    for name, value in expected["losses"].items():
        np.testing.assert_allclose(result.losses[name], value, err_msg=name, **tolerance)
    for name, value in expected["metrics"].items():
        np.testing.assert_allclose(result.metrics[name], value, err_msg=name, **tolerance)
    np.testing.assert_allclose(result.logits_grad, numbers(expected["logits_grad"]), **tolerance)
    for name, value in inputs.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, before[name])


# ------------------------------------------------------------------------------------------------ finite differences


def random_inputs(seed: int = 0) -> dict[str, Any]:
    """Eight tokens: row 3 ignored and full of NaN, rows 6 and 7 in no segment, segment 2 short, segment 4 empty."""
    r = np.random.default_rng(seed)
    logits = r.normal(size=(TOKENS, VOCAB))
    labels = r.integers(0, VOCAB, TOKENS)
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    lp = exact[np.arange(TOKENS), labels]
    shift = np.array([0.1, -0.1, 0.6, 0.0, -0.7, 0.05, 0.3, -0.02])  # lp - old_logprobs
    inputs = {
        "logits": logits,
        "labels": labels,
        "teacher_logits": {"teacher": r.normal(size=(TOKENS, VOCAB)), "other": r.normal(size=(TOKENS, VOCAB))},
        "advantages": np.array([1.0, -1.0, 0.5, 9.0, -0.7, 1.2, -0.4, 0.8]),
        "old_logprobs": lp - shift,
        "ref_logprobs": lp + r.normal(size=TOKENS) * 0.4,
        "importance_weights": r.uniform(0.5, 2.0, TOKENS),
        "segment_ids": np.array([0, 0, 1, 1, 1, 2, -1, -1]),
        "preference_pairs": np.array([[0, 1], [2, 1], [1, 0], [-1, -1]]),
    }
    labels[3] = -100
    for array in (logits, *inputs["teacher_logits"].values()):
        array[3] = [np.nan, np.inf, -np.inf, 0.0, 1.0]
    for name in ("advantages", "old_logprobs", "ref_logprobs", "importance_weights"):
        inputs[name][3] = np.nan
    return inputs


def check_gradient(head: dict[str, Any], inputs: dict[str, Any]) -> Reference:
    inputs = dict(inputs)
    logits = inputs.pop("logits")
    result = reference(logits, head, **inputs)
    assert math.isfinite(result.loss)
    assert np.isfinite(result.logits_grad).all()
    step = 1e-5
    for index in zip(*np.nonzero(np.isfinite(logits)), strict=True):
        values = []
        for sign in (1, -1):
            moved = logits.copy()
            moved[index] += sign * step
            values.append(reference(moved, head, **inputs).loss)
        slope = (values[0] - values[1]) / (2 * step)
        assert result.logits_grad[index] == pytest.approx(slope, rel=1e-6, abs=2e-9), index
    assert (result.logits_grad[~np.isfinite(logits)] == 0.0).all()
    return result


def one(**loss: Any) -> dict[str, Any]:
    return {"losses": {"it": loss}}


SEQUENCE_REDUCTIONS = ("sequence_mean_token_mean", "sequence_mean_token_sum")
REDUCTIONS = ("token_mean", "sum", "constant", *SEQUENCE_REDUCTIONS)

HEADS: dict[str, dict[str, Any]] = {
    "empty": {},
    "label": one(type="label"),
    "label_smoothing": one(type="label", label_smoothing=0.3),
    "label_scaled_weighted": one(type="label", logits_scale_factor=1.7, weight=-0.4, label_smoothing=0.1),
    "softcap": {"losses": {"ce": {"type": "label"}, "h": {"type": "entropy"}}, "final_logit_softcap": 1.5},
    "head_scale": {
        "losses": {"z": {"type": "z_loss"}, "h": {"type": "entropy", "logits_scale_factor": 0.5}},
        "logits_scale_factor": 1.3,
    },
    "z_loss": one(type="z_loss", weight=0.1),
    "entropy": one(type="entropy", weight=-0.02),
    "everything": {
        "logits_scale_factor": 0.9,
        "final_logit_softcap": 4.0,
        "losses": {
            "ce": {"type": "label"},
            "kd": {"type": "distillation", "loss_type": "jsd", "weight": 0.5, "logits_scale_factor": 1.2},
            "rl": {"type": "grpo", "beta": 0.1, "weight": 2.0},
            "dpo": {"type": "dpo"},
        },
    },
}
for reduction in REDUCTIONS:
    HEADS[f"label_{reduction}"] = one(type="label", reduction=reduction, denominator=7.0)
    HEADS[f"grpo_{reduction}"] = one(type="grpo", beta=0.2, reduction=reduction, denominator=7.0)
    HEADS[f"gspo_{reduction}"] = one(type="gspo", beta=0.2, reduction=reduction, denominator=7.0, epsilon_high=0.5)
for loss_type in ("cross_entropy", "forward_kl", "reverse_kl", "jsd"):
    HEADS[f"distillation_{loss_type}"] = one(
        type="distillation",
        loss_type=loss_type,
        temperature=2.0,
        student_temperature=1.6,
        reference_model="other",
        logits_scale_factor=1.2,
        jsd_beta=0.3,
    )
for beta in (0.0, 0.5, 0.9, 1.0):
    HEADS[f"jsd_{beta}"] = one(type="distillation", loss_type="jsd", jsd_beta=beta)
for objective in ("clip", "sapo", "reinforce"):
    HEADS[f"grpo_objective_{objective}"] = one(
        type="grpo", objective=objective, epsilon_low=0.15, epsilon_high=0.28, tau_pos=1.3, tau_neg=0.8
    )
for estimator in ("k1", "k2", "k3"):
    HEADS[f"grpo_{estimator}"] = one(type="grpo", beta=0.7, kl_estimator=estimator)
HEADS["grpo_delta"] = one(type="grpo", delta=1.3, epsilon_low=0.5)
HEADS["gspo"] = one(type="gspo", epsilon_low=0.3, epsilon_high=0.3)
HEADS["gspo_clipped"] = one(type="gspo", epsilon_low=0.06, epsilon_high=0.02)
HEADS["gspo_scaled"] = one(type="gspo", logits_scale_factor=0.8, epsilon_low=0.9, epsilon_high=3.0)
for loss_type in ("sigmoid", "hinge", "ipo"):
    for smoothing in (0.0, 0.2):
        HEADS[f"dpo_{loss_type}_{smoothing}"] = one(
            type="dpo", loss_type=loss_type, label_smoothing=smoothing, beta=0.4, reference_model="ref"
        )
HEADS["dpo_sum"] = one(type="dpo", reduction="sum")
HEADS["simpo"] = one(type="simpo")
HEADS["simpo_margin"] = one(type="simpo", beta=1.4, margin=1.1, reduction="sum")
HEADS["orpo"] = one(type="orpo", beta=0.3)
HEADS["kto"] = one(type="kto", beta=0.5, desirable_weight=1.3, undesirable_weight=0.6, reference_point=-0.4)
HEADS["kto_sum"] = one(type="kto", reduction="sum")


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_gradient(head: dict[str, Any]) -> None:
    result = check_gradient(head, random_inputs())
    assert (np.abs(result.logits_grad).sum(-1) > 0).any()


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_gradient_reference_free(kind: str) -> None:
    check_gradient(one(type=kind, beta=0.6), {**random_inputs(), "ref_logprobs": None})


@pytest.mark.parametrize("name", ["label_smoothing", "entropy", "z_loss", *(n for n in HEADS if n.startswith("d"))])
def test_gradient_with_columns_at_minus_infinity(name: str) -> None:
    inputs = random_inputs()
    for t in (0, 1, 4):
        inputs["logits"][t, (inputs["labels"][t] + 2) % VOCAB] = -np.inf
        for teacher in inputs["teacher_logits"].values():
            teacher[t, (inputs["labels"][t] + 2) % VOCAB] = -np.inf
    if "reverse" not in name:
        for teacher in inputs["teacher_logits"].values():
            teacher[2, 1] = -np.inf
            teacher[0, (inputs["labels"][0] + 2) % VOCAB] = -np.inf
    check_gradient(HEADS[name], inputs)


@pytest.mark.parametrize("name", ["label_smoothing", "softcap", "distillation_jsd", "everything"])
def test_gradient_with_padding_columns(name: str) -> None:
    inputs = random_inputs()
    plain = reference(inputs.pop("logits"), HEADS[name], **inputs)
    padded = np.concatenate([random_inputs()["logits"], np.full((TOKENS, 2), 50.0)], axis=1)
    padded[5, -1] = np.nan
    result = check_gradient(HEADS[name], {**inputs, "logits": padded, "vocab_size": VOCAB})
    assert result.loss == plain.loss
    np.testing.assert_array_equal(result.logits_grad[:, :VOCAB], plain.logits_grad)
    assert (result.logits_grad[:, VOCAB:] == 0.0).all()


def test_gradient_with_global_counts_and_overrides() -> None:
    counts = {"num_tokens": 31, "num_sequences": 11, "num_pairs": 9}
    overrides = {"logits_scale_factor": 1.1, "final_logit_softcap": 3.0}
    check_gradient(HEADS["everything"], {**random_inputs(), **counts, **overrides})
    for name in ("kto", "gspo_sequence_mean_token_mean", "label_sequence_mean_token_sum"):
        local = reference(**random_inputs(), head=HEADS[name])
        scaled = check_gradient(HEADS[name], {**random_inputs(), **counts})
        if name != "gspo_sequence_mean_token_mean":
            assert scaled.loss == pytest.approx(local.loss * 3 / 11, rel=1e-13)


# ------------------------------------------------------------------------- values, written out a second time


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


KEEP = np.arange(TOKENS) != 3
INPUTS = random_inputs()
LP = log_softmax(INPUTS["logits"][KEEP])[np.arange(7), INPUTS["labels"][KEEP]]
LOG_RATIO = LP - INPUTS["old_logprobs"][KEEP]
DELTA = INPUTS["ref_logprobs"][KEEP] - LP
ADVANTAGES, IMPORTANCE = INPUTS["advantages"][KEEP], INPUTS["importance_weights"][KEEP]
SUMS = np.array([-DELTA[:2].sum(), -DELTA[2:4].sum(), -DELTA[4]])  # of lp - ref, by segment
MEANS = np.array([LP[:2].mean(), LP[2:4].mean(), LP[4]])
LOG_ODDS = np.log(np.exp(MEANS) / (1 - np.exp(MEANS)))
PAIRS = ((0, 1), (2, 1), (1, 0))


def pair_mean(value: Any) -> float:
    return sum(value(c, r) for c, r in PAIRS) / len(PAIRS)


VALUES: dict[str, tuple[dict[str, Any], float]] = {
    "sum": ({"type": "label", "reduction": "sum"}, -LP.sum()),
    "constant": ({"type": "label", "reduction": "constant", "denominator": 40}, -LP.sum() / 40),
    "sequence_mean_token_mean": ({"type": "label", "reduction": "sequence_mean_token_mean"}, -MEANS.mean()),
    "sequence_mean_token_sum": ({"type": "label", "reduction": "sequence_mean_token_sum"}, -LP[:5].sum() / 3),
    "hinge": (
        {"type": "dpo", "loss_type": "hinge", "beta": 0.4},
        pair_mean(lambda c, r: max(0.0, 1 - 0.4 * (SUMS[c] - SUMS[r]))),
    ),
    "dpo_smoothing": (
        {"type": "dpo", "label_smoothing": 0.2},
        pair_mean(
            lambda c, r: (
                -0.8 * math.log(sigmoid(0.1 * (SUMS[c] - SUMS[r]))) - 0.2 * math.log(sigmoid(0.1 * (SUMS[r] - SUMS[c])))
            )
        ),
    ),
    "simpo": ({"type": "simpo"}, pair_mean(lambda c, r: -math.log(sigmoid(2.0 * (MEANS[c] - MEANS[r]) - 0.5)))),
    "orpo": (
        {"type": "orpo", "beta": 0.3},
        pair_mean(lambda c, r: -MEANS[c] - 0.3 * math.log(sigmoid(LOG_ODDS[c] - LOG_ODDS[r]))),
    ),
    "kto": (
        {"type": "kto", "desirable_weight": 2.0, "undesirable_weight": 3.0, "reference_point": 0.1},
        (2.0 * (1 - sigmoid(0.1 * (SUMS[2] - 0.1))) + 3.0 * (1 - sigmoid(0.1 * (0.1 - SUMS[1])))) / 3,
    ),
    "reinforce": ({"type": "grpo", "objective": "reinforce"}, -(IMPORTANCE * ADVANTAGES * LP).mean()),
    "k1": (
        {"type": "grpo", "objective": "reinforce", "beta": 0.5, "kl_estimator": "k1"},
        (-IMPORTANCE * ADVANTAGES * LP - 0.5 * DELTA).mean(),
    ),
    "k2": (
        {"type": "grpo", "objective": "reinforce", "beta": 0.5, "kl_estimator": "k2"},
        (-IMPORTANCE * ADVANTAGES * LP + 0.25 * DELTA**2).mean(),
    ),
    "grpo_default_band": (
        {"type": "grpo"},
        -(
            IMPORTANCE * np.minimum(np.exp(LOG_RATIO) * ADVANTAGES, np.clip(np.exp(LOG_RATIO), 0.8, 1.2) * ADVANTAGES)
        ).mean(),
    ),
    "gspo": (
        # sequence means: log-ratio 0, -0.05, 0.05; advantage 0, -0.1, 1.2; two tokens in no sequence
        {"type": "gspo", "epsilon_high": 0.02},
        (0.1 * math.exp(-0.05) * IMPORTANCE[2:4].mean() * 2 - 1.2 * 1.02 * IMPORTANCE[4]) / 7,
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_value(name: str) -> None:
    loss, expected = VALUES[name]
    assert reference(**random_inputs(), head=one(**loss)).loss == pytest.approx(expected, rel=1e-12)


def test_teacher_is_scaled_and_not_capped() -> None:
    head = one(type="distillation", loss_type="forward_kl", temperature=2.0, student_temperature=0.7)
    head["losses"]["it"]["logits_scale_factor"] = 1.5
    inputs = random_inputs()
    result = reference(**inputs, head=head, logits_scale_factor=0.8, final_logit_softcap=0.9)
    logp = log_softmax(1.2 * 0.9 * np.tanh(inputs["logits"][KEEP] / 0.9) / 0.7)
    logq = log_softmax(1.2 * inputs["teacher_logits"]["teacher"][KEEP] / 2.0)
    assert result.loss == pytest.approx((np.exp(logq) * (logq - logp)).sum(-1).mean(), rel=1e-12)
    head["losses"]["it"].update(loss_type="jsd", jsd_beta=0.3)
    result = reference(**inputs, head=head, logits_scale_factor=0.8, final_logit_softcap=0.9)
    log_mix = np.log(0.3 * np.exp(logq) + 0.7 * np.exp(logp))
    expected = 0.3 * np.exp(logq) * (logq - log_mix) + 0.7 * np.exp(logp) * (logp - log_mix)
    assert result.loss == pytest.approx(expected.sum(-1).mean(), rel=1e-12)


# ------------------------------------------------- what finite differences do not see: constants, edges, conventions


def test_cispo_is_reinforce_with_the_clipped_ratio_as_a_constant() -> None:
    inputs = random_inputs()
    lp = reference(inputs["logits"], {}, labels=inputs["labels"]).tokens["logprobs"]
    clipped = np.clip(np.exp(lp - inputs["old_logprobs"]), 0.8, 1.28)
    cispo = reference(**inputs, head=one(type="grpo", objective="cispo", epsilon_high=0.28))
    inputs["advantages"] = inputs["advantages"] * clipped
    plain = check_gradient(one(type="grpo", objective="reinforce"), inputs)
    assert cispo.loss == pytest.approx(plain.loss, rel=1e-13)
    np.testing.assert_allclose(cispo.logits_grad, plain.logits_grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_edges_of_the_band_belong_to_it(kind: str, advantage: float) -> None:
    """Epsilon 0 and old = new: r = 1 is both edges, and the gradient is the unclipped one."""
    logits = np.zeros((1, 2))
    old = reference(logits, {}, labels=[0]).tokens["logprobs"]
    inputs = {"labels": [0], "old_logprobs": old, "advantages": [advantage], "segment_ids": [0]}
    result = reference(logits, one(type=kind, epsilon_low=0.0, epsilon_high=0.0, delta=1.0), **inputs)
    np.testing.assert_allclose(result.logits_grad, [[-0.5 * advantage, 0.5 * advantage]])
    assert result.metrics["it/clipped_ratio_fraction"] == 0.0
    beyond = {**inputs, "old_logprobs": old - math.copysign(1e-9, advantage)}
    result = reference(logits, one(type=kind, epsilon_low=0.0, epsilon_high=0.0), **beyond)
    assert (result.logits_grad == 0.0).all()
    assert result.metrics[f"it/clip_{'high' if advantage > 0 else 'low'}_fraction"] == 1.0


def test_hinge_at_its_corner_has_no_gradient() -> None:
    lp = math.log(0.5)
    inputs = {"labels": [0, 0], "segment_ids": [0, 1], "preference_pairs": [[0, 1]]}
    head = one(type="dpo", loss_type="hinge", beta=1.0)
    result = reference(np.zeros((2, 2)), head, ref_logprobs=[lp - 1.0, lp], **inputs)
    assert result.loss == pytest.approx(0.0, abs=1e-15)
    assert (result.logits_grad == 0.0).all()


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_a_ratio_past_every_bound_is_finite(objective: str, advantage: float) -> None:
    inputs = {"labels": [0], "advantages": [advantage], "ref_logprobs": [0.0]}
    for old in (-1e4, 1e4, -np.inf):
        head = one(type="grpo", objective=objective, beta=0.1)
        result = reference(np.zeros((1, 3)), head, old_logprobs=[old], **inputs)
        assert math.isfinite(result.loss)
        assert np.isfinite(result.logits_grad).all()
        assert all(math.isfinite(v) for k, v in result.metrics.items() if k != "it/old_logprobs" or old != -np.inf)
    clamped = reference(np.zeros((1, 3)), one(type="grpo"), old_logprobs=[-300.0], labels=[0], advantages=[-1.0])
    assert clamped.loss == pytest.approx(math.exp(80.0))
    np.testing.assert_allclose(clamped.logits_grad, math.exp(80.0) * np.array([[2, -1, -1]]) / 3)


def test_orpo_at_probability_one_is_finite() -> None:
    inputs = {"labels": [0, 0], "segment_ids": [0, 1], "preference_pairs": [[0, 1]]}
    result = reference(np.array([[800.0, 0.0], [0.0, 0.0]]), one(type="orpo"), **inputs)
    assert math.isfinite(result.loss)
    assert np.isfinite(result.logits_grad).all()


def test_two_huge_equal_logits() -> None:
    result = reference(np.full((1, 2), 1e15), one(type="label"), labels=[0])
    assert result.loss == math.log(2.0)


def test_a_label_on_a_missing_column_is_an_infinite_loss() -> None:
    logits = np.array([[-np.inf, 0.0, 0.0]])
    assert reference(logits, {}, labels=[0]).loss == np.inf
    head = {"losses": {"ce": {"type": "label", "weight": 0.0}, "z": {"type": "z_loss"}}}
    result = reference(logits, head, labels=[0])
    assert result.losses["ce"] == np.inf
    assert result.loss == pytest.approx(math.log(2.0) ** 2)
    np.testing.assert_allclose(result.logits_grad, [[0.0, math.log(2.0), math.log(2.0)]])


@pytest.mark.parametrize("name", HEADS)
def test_no_valid_token(name: str) -> None:
    inputs = random_inputs()
    inputs["mask"] = np.zeros(TOKENS, bool)
    result = reference(**inputs, head=HEADS[name])
    assert result.loss == 0.0
    assert not any(result.losses.values())
    assert (result.logits_grad == 0.0).all()
    assert not any(result.metrics.values())
    assert np.isnan(result.tokens["lse"]).all()


def test_no_token_at_all() -> None:
    result = reference(np.zeros((0, 4)), {}, labels=np.zeros(0, int))
    assert result.loss == 0.0
    assert result.logits_grad.shape == (0, 4)


def test_a_mask_is_the_same_as_ignored_labels() -> None:
    inputs = random_inputs()
    masked = reference(**inputs, mask=np.arange(TOKENS) != 1, head=HEADS["everything"])
    inputs["labels"] = np.where(np.arange(TOKENS) == 1, -1, inputs["labels"])
    ignored = reference(**inputs, head=HEADS["everything"])
    assert masked.loss == ignored.loss
    np.testing.assert_array_equal(masked.logits_grad, ignored.logits_grad)


def test_without_labels_the_mask_alone_counts() -> None:
    logits = np.array([[0.0, 0.0], [np.nan, 0.0], [1.0, 1.0]])
    result = reference(logits, one(type="entropy"), mask=[True, False, True])
    assert result.loss == pytest.approx(math.log(2.0))
    assert np.isnan(result.tokens["logprobs"]).all()
    np.testing.assert_allclose(result.tokens["lse"], [math.log(2.0), np.nan, 1.0 + math.log(2.0)])
    assert reference(logits[::2], one(type="z_loss")).losses["it"] > 0


def test_batched_tokens_are_flattened() -> None:
    inputs = random_inputs()
    flat = reference(**inputs, head=HEADS["everything"])
    for name, value in inputs.items():
        if name == "teacher_logits":
            inputs[name] = {key: array.reshape(2, 4, VOCAB) for key, array in value.items()}
        elif name != "preference_pairs":
            inputs[name] = value.reshape(2, 4, *value.shape[1:])
    batched = reference(**inputs, head=HEADS["everything"])
    assert batched.loss == flat.loss
    assert batched.tokens["entropy"].shape == (2, 4)
    np.testing.assert_array_equal(batched.logits_grad.reshape(TOKENS, VOCAB), flat.logits_grad)


def test_advantages_by_segment_are_carried_by_the_tokens() -> None:
    inputs = random_inputs()
    by_segment = np.array([0.5, -1.5, 0.25, 99.0])
    ids = inputs["segment_ids"]
    for kind in ("grpo", "gspo", "kto"):
        inputs["advantages"] = np.where(ids >= 0, by_segment[ids], 0.0)
        carried = reference(**inputs, head=one(type=kind))
        inputs["advantages"] = by_segment
        given = reference(**inputs, num_segments=4, head=one(type=kind))
        assert given.loss == carried.loss
        assert given.metrics == carried.metrics
        np.testing.assert_array_equal(given.logits_grad, carried.logits_grad)


@pytest.mark.parametrize("name", ["label", "everything", "grpo_sequence_mean_token_mean", "kto", "gspo"])
def test_micro_batches_with_global_counts_add_up(name: str) -> None:
    """Split between sequences; a pair's two sequences stay together."""
    inputs = random_inputs()
    inputs["preference_pairs"] = np.array([[0, 1]])
    whole = reference(**inputs, head=HEADS[name])
    counts = {"num_tokens": 7, "num_sequences": 3, "num_pairs": 1}
    total, gradients = 0.0, []
    for rows in (slice(0, 5), slice(5, 8)):
        part = {
            key: {k: v[rows] for k, v in value.items()} if isinstance(value, dict) else value[rows]
            for key, value in inputs.items()
            if key != "preference_pairs"
        }
        part["preference_pairs"] = inputs["preference_pairs"] if rows.start == 0 else np.array([[-1, -1]])
        result = reference(**part, **counts, head=HEADS[name])
        total += result.loss
        gradients.append(result.logits_grad)
    assert total == pytest.approx(whole.loss, rel=1e-13)
    np.testing.assert_allclose(np.concatenate(gradients), whole.logits_grad, rtol=1e-12, atol=1e-16)


def test_a_loss_alone_is_its_share_of_the_whole() -> None:
    head = HEADS["everything"]
    whole = reference(**random_inputs(), head=head)
    gradient = np.zeros((TOKENS, VOCAB))
    for name, loss in head["losses"].items():
        part = reference(**random_inputs(), head={**head, "losses": {name: loss}})
        assert part.losses[name] == whole.losses[name]
        gradient += part.logits_grad
    np.testing.assert_allclose(whole.logits_grad, gradient, rtol=1e-14, atol=1e-16)


# ------------------------------------------------------------------------------------------------------- metrics


def test_policy_metrics() -> None:
    inputs = random_inputs()
    result = reference(**inputs, head=one(type="grpo", epsilon_high=0.28, kl_estimator="k2"))
    keep = np.arange(TOKENS) != 3
    lp, old = result.tokens["logprobs"][keep], inputs["old_logprobs"][keep]
    ref, advantages = inputs["ref_logprobs"][keep], inputs["advantages"][keep]
    r = np.exp(lp - old)
    expected = {
        "new_logprobs": lp.mean(),
        "old_logprobs": old.mean(),
        "ratio_new_old": r.mean(),
        "ratio_new_old_min": r.min(),
        "ratio_new_old_max": r.max(),
        "ratio_new_old_sum": r.sum(),
        "ratio_new_old_squared_sum": (r**2).sum(),
        "kl_new_old": (r - np.log(r) - 1).mean(),
        "clipped_ratio_fraction": 3 / 7,
        "clip_low_fraction": 1 / 7,
        "clip_high_fraction": 1 / 7,
        "advantage": advantages.mean(),
        "advantage_min": -1.0,
        "advantage_max": 1.2,
        "kl_ref": ((ref - lp) ** 2 / 2).mean(),
        "entropy": result.tokens["entropy"][keep].mean(),
        "num_tokens": 7.0,
        "num_segments": 3.0,
    }
    assert result.metrics == pytest.approx({f"it/{name}": value for name, value in expected.items()})

    basic = reference(**inputs, head=one(type="grpo", metrics="basic")).metrics
    assert "it/entropy" not in basic
    assert len(basic) == len(result.metrics) - 1
    assert reference(**inputs, head=one(type="grpo", metrics="none")).metrics == {}
    few = {key: inputs[key] for key in ("logits", "labels", "advantages")}
    assert reference(**few, head=one(type="grpo", objective="reinforce")).metrics.keys() == {
        f"it/{name}"
        for name in ("new_logprobs", "advantage", "advantage_min", "advantage_max", "entropy", "num_tokens")
    }


def test_gspo_metrics_are_the_sequences() -> None:
    inputs = random_inputs()
    result = reference(**inputs, head=one(type="gspo"))
    # log-ratio sequence means 0.0 (two tokens), -0.05 (two) and 0.05 (one); two tokens in no sequence carry 0
    r = np.exp([0.0, 0.0, -0.05, -0.05, 0.05, 0.0, 0.0])
    assert result.metrics["it/ratio_new_old"] == pytest.approx(r.mean())
    assert result.metrics["it/ratio_new_old_min"] == pytest.approx(r.min())
    assert result.metrics["it/kl_new_old"] == pytest.approx((r - np.log(r) - 1).mean())
    assert result.metrics["it/advantage"] == pytest.approx((0.0 - 0.1 - 0.1 + 1.2) / 7)
    assert result.metrics["it/advantage_min"] == pytest.approx(-0.1)


def test_preference_metrics() -> None:
    inputs = random_inputs()
    result = reference(**inputs, head=one(type="dpo", beta=0.4))
    over = result.tokens["logprobs"] - inputs["ref_logprobs"]
    sums = np.array([over[0] + over[1], over[2] + over[4], over[5]])
    chosen, rejected = 0.4 * sums[[0, 2, 1]], 0.4 * sums[[1, 1, 0]]
    assert result.metrics == pytest.approx(
        {
            "it/rewards_chosen": chosen.mean(),
            "it/rewards_rejected": rejected.mean(),
            "it/margin": (chosen - rejected).mean(),
            "it/accuracy": (chosen > rejected).mean(),
        }
    )
    lp = result.tokens["logprobs"]
    means = np.array([lp[:2].mean(), (lp[2] + lp[4]) / 2, lp[5]])
    for kind, beta in (("simpo", 2.0), ("orpo", 0.1)):
        metrics = reference(**inputs, head=one(type=kind)).metrics
        assert metrics["it/rewards_chosen"] == pytest.approx(beta * means.mean())
        assert metrics["it/accuracy"] == (means[[0, 2, 1]] > means[[1, 1, 0]]).mean()
    # segment 0 has mean advantage 0 and is neither; 1 is undesirable, 2 desirable
    kto = reference(**inputs, head=one(type="kto", beta=0.4)).metrics
    assert kto == pytest.approx(
        {
            "it/rewards_chosen": 0.4 * sums[2],
            "it/rewards_rejected": 0.4 * sums[1],
            "it/margin": 0.4 * (sums[2] - sums[1]),
        }
    )


def test_head_metrics() -> None:
    logits = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 0.0], [np.nan, 0.0, 0.0]])
    names = ["entropy", "accuracy", "perplexity", "mean_logprob", "num_tokens"]
    head = {"metrics": [f"head/{name}" for name in names], "logits_scale_factor": 2.0}
    result = reference(logits, head, labels=[1, 0, -1])
    lp = result.tokens["logprobs"][:2]
    assert result.metrics == pytest.approx(
        {
            "head/entropy": result.tokens["entropy"][:2].mean(),
            "head/accuracy": 0.5,
            "head/perplexity": math.exp(-lp.mean()),
            "head/mean_logprob": lp.mean(),
            "head/num_tokens": 2.0,
        }
    )
    assert lp[0] == pytest.approx(2.0 - math.log(2 * math.exp(2.0) + 1.0))


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.full(TOKENS, VOCAB)}, "label 5"),
        ({"labels": np.full(TOKENS, VOCAB - 1), "vocab_size": VOCAB - 1}, "label 4"),
        ({"old_logprobs": None}, "'rl' needs old_logprobs"),
        ({"ref_logprobs": None}, "'rl' needs ref_logprobs"),
        ({"advantages": np.zeros(3), "segment_ids": None}, "advantages have shape"),
        ({"segment_ids": None}, "'dpo' needs segment_ids"),
        ({"teacher_logits": {"other": np.zeros((TOKENS, VOCAB))}}, "no 'teacher'"),
        ({"num_segments": 1}, "segment id 1"),
        ({"labels": None, "mask": np.arange(TOKENS) != 3}, "'ce' needs labels"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference(**{**random_inputs(), **change}, head=HEADS["everything"])


def test_reference_models_by_name() -> None:
    inputs = random_inputs()
    bare = reference(**inputs, head=one(type="dpo")).loss
    inputs["ref_logprobs"] = {"a": inputs["ref_logprobs"], "b": np.zeros(TOKENS)}
    assert reference(**inputs, head=one(type="dpo", reference_model="a")).loss == bare
    assert reference(**inputs, head=one(type="dpo", reference_model="b")).loss != bare
    with pytest.raises(ValueError, match="no 'c'"):
        reference(**inputs, head=one(type="dpo", reference_model="c"))
    inputs["teacher_logits"] = inputs["teacher_logits"]["other"]
    alone = reference(**inputs, head=one(type="distillation")).loss
    assert alone == reference(**random_inputs(), head=one(type="distillation", reference_model="other")).loss
