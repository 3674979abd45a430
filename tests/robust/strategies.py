"""Random heads and hard inputs.

Hypothesis draws what matters (which losses and fields, what each row is like, which rows are masked, how segments
lie); the digits come from a drawn seed. Every number is exact in the dtype that will hold it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from robust.comparing import LARGEST
from robust.core_runs import TYPES, compute_of

MODELS = ("teacher", "other")
#: how a row of logits (or of a teacher) may look
ROWS = (
    "normal",
    "wide",
    "sharp",
    "huge_1e4",
    "huge_1e8",
    "huge_1e30",
    "tiny",
    "denormal",
    "constant",
    "constant_huge",
    "ties",
    "one_hot",
    "only_one_finite",
    "some_minus_inf",
    "bf16",
)
SHIFTS = (0.0, 0.05, -0.05, 0.7, -0.7, 5.0, -5.0, 90.0, -90.0, 1e4, -1e4)
ADVANTAGES = (0.0, 1.0, -1.0, 0.3, -0.3, 1e4, -1e4, 1e-6)


class Example(NamedTuple):
    """A head, its inputs as float64 arrays that are exact in ``dtype``, and that dtype."""

    head: dict[str, Any]
    inputs: dict[str, Any]
    dtype: str


def exact(array: Any, dtype: str) -> np.ndarray:
    """Rounded to a dtype, as float64; a finite number stays finite."""
    array = np.asarray(array, np.float64)
    finite = np.clip(array, -LARGEST[dtype], LARGEST[dtype])
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(array), finite, array).astype(TYPES[dtype]).astype(np.float64)


def row(kind: str, columns: int, r: np.random.Generator) -> np.ndarray:
    """One row of logits."""
    x = r.normal(size=columns)
    keep = int(r.integers(columns))
    if kind == "wide":
        return 20.0 * x
    if kind == "sharp":
        return np.where(np.arange(columns) == keep, 9.0 + np.log(columns), x)
    if kind.startswith("huge"):
        return float(kind.removeprefix("huge_")) * x
    if kind == "tiny":
        return 1e-5 * x
    if kind == "denormal":
        return 1e-41 * x
    if kind == "constant":
        return np.full(columns, x[0])
    if kind == "constant_huge":
        return np.full(columns, 1e8)
    if kind == "ties":
        return np.round(x)
    if kind == "one_hot":
        return np.where(np.arange(columns) == keep, 1.0, 0.0)
    if kind == "only_one_finite":
        return np.where(np.arange(columns) == keep, x, -np.inf)
    if kind == "some_minus_inf":
        return np.where((r.random(columns) < 0.4) & (np.arange(columns) != keep), -np.inf, x)
    return exact(x, "bfloat16") if kind == "bf16" else x


def _numbers(*values: float) -> st.SearchStrategy[float]:
    return st.sampled_from(values)


WEIGHT = _numbers(1.0, 1.0, 0.1, 1e-4, 30.0, 0.0)
SCALE = _numbers(1.0, 1.0, 1.0, 0.7, 2.0)
TOKEN_REDUCTIONS = (
    "token_mean",
    "token_mean",
    "sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "constant",
)
FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "label": {"label_smoothing": _numbers(0.0, 0.1, 0.9)},
    "z_loss": {},
    "entropy": {"weight": _numbers(1.0, -0.02, 0.0)},
    "distillation": {
        "loss_type": st.sampled_from(("cross_entropy", "forward_kl", "reverse_kl", "jsd")),
        "reference_model": st.sampled_from(MODELS),
        "temperature": _numbers(1.0, 2.0, 0.3),
        "student_temperature": _numbers(1.0, 1.0, 2.0),
        "jsd_beta": _numbers(0.0, 0.1, 0.5, 1.0),
    },
    "grpo": {
        "objective": st.sampled_from(("clip", "cispo", "sapo", "reinforce")),
        "epsilon_low": _numbers(0.2, 0.0),
        "epsilon_high": _numbers(0.28, 3.0),
        "tau_pos": _numbers(1.0, 0.1),
        "beta": _numbers(0.0, 0.1),
        "kl_estimator": st.sampled_from(("k1", "k2", "k3")),
    },
    "gspo": {"epsilon_low": _numbers(0.2, 3e-4), "epsilon_high": _numbers(0.28, 4e-4), "beta": _numbers(0.0, 0.1)},
    "dpo": {
        "loss_type": st.sampled_from(("sigmoid", "hinge", "ipo")),
        "beta": _numbers(0.1, 2.0),
        "label_smoothing": _numbers(0.0, 0.1),
    },
    "orpo": {"beta": _numbers(0.1, 1.0)},
    "simpo": {"beta": _numbers(2.0, 10.0), "margin": _numbers(0.0, 0.5)},
    "kto": {
        "beta": _numbers(0.1, 1.0),
        "desirable_weight": _numbers(1.0, 1.5),
        "reference_point": _numbers(0.0, 0.3),
    },
}
PAIR = ("dpo", "orpo", "simpo")
#: fields that only one choice of another field uses
ONLY_WITH = {
    "jsd_beta": ("loss_type", "jsd"),
    "tau_pos": ("objective", "sapo"),
}


@st.composite
def losses(draw: st.DrawFn, types: tuple[str, ...] = tuple(FIELDS)) -> dict[str, Any]:
    """One loss's configuration."""
    kind = draw(st.sampled_from(types))
    loss: dict[str, Any] = {"type": kind, "weight": draw(WEIGHT), "logits_scale_factor": draw(SCALE)}
    for name, values in FIELDS[kind].items():
        loss[name] = draw(values)
    for name, (other, choice) in ONLY_WITH.items():
        if name in loss and loss[other] != choice:
            del loss[name]
    if kind == "grpo" and loss["objective"] == "clip":
        loss["delta"] = draw(st.sampled_from((None, 4.0)))
    if kind == "grpo" and loss["objective"] in ("sapo", "reinforce"):
        del loss["epsilon_low"], loss["epsilon_high"]
    if kind in PAIR:
        reductions: tuple[str, ...] = ("token_mean", "sum", "constant")
    elif kind == "kto":
        reductions = ("sequence_mean_token_mean",)
    else:
        reductions = TOKEN_REDUCTIONS
    loss["reduction"] = draw(st.sampled_from(reductions))
    if loss["reduction"] == "constant":
        loss["denominator"] = 7.0
    return loss


@st.composite
def heads(draw: st.DrawFn, types: tuple[str, ...] = tuple(FIELDS)) -> dict[str, Any]:
    """One to four losses over a shared head."""
    count = draw(st.integers(1, 4))
    head: dict[str, Any] = {
        "losses": {f"loss{i}": draw(losses(types)) for i in range(count)},
        "logits_scale_factor": draw(SCALE),
        "final_logit_softcap": draw(st.sampled_from((None, None, 30.0, 2.0))),
    }
    if draw(st.booleans()):
        head["metrics"] = ["entropy", "accuracy", "perplexity", "mean_logprob", "num_tokens"]
    return head


@st.composite
def inputs(draw: st.DrawFn, dtype: str, tokens: int, columns: int, rows: tuple[str, ...] = ROWS) -> dict[str, Any]:
    """Every input that a head may need. Masked rows hold NaN and inf everywhere."""
    r = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    compute = compute_of(dtype)
    kinds = [draw(st.sampled_from(rows)) for _ in range(tokens)]
    logits = np.array([row(kind, columns, r) for kind in kinds]).reshape(tokens, columns)
    # A teacher's row is its own, or the student's.
    teachers = {}
    for model in MODELS:
        own = np.array([row(kind, columns, r) for kind in r.permutation(kinds)]).reshape(tokens, columns)
        teachers[model] = np.where(r.random((tokens, 1)) < 0.2, logits, own)
    vocab = draw(st.sampled_from((columns, columns, max(columns - 1, 1))))
    # A row of nothing but −inf has no softmax; test_robust_edges looks at it.
    for array in (logits, *teachers.values()):
        array[np.isneginf(array[:, :vocab]).all(-1), 0] = 0.5
    labels = r.integers(0, vocab, tokens)
    edge = draw(st.sampled_from(("random", "first", "last", "top")))
    if edge != "random":
        labels = {"first": 0 * labels, "last": 0 * labels + vocab - 1, "top": logits[:, :vocab].argmax(-1)}[edge]
    ignored = np.array([draw(st.sampled_from((False, False, False, True))) for _ in range(tokens)], bool)
    labels = np.where(ignored, draw(st.sampled_from((-100, -1))), labels)
    mask = np.array([draw(st.sampled_from((True, True, True, True, False))) for _ in range(tokens)], bool)

    with np.errstate(all="ignore"):
        real = np.clip(logits[:, :vocab], -1e4, 1e4)
        lp = real - np.logaddexp.reduce(real, -1, keepdims=True)
    lp = np.nan_to_num(lp[np.arange(tokens), np.maximum(labels, 0)])
    found: dict[str, Any] = {
        "logits": exact(logits, dtype),
        "labels": labels,
        "mask": mask,
        "teacher_logits": {model: exact(array, dtype) for model, array in teachers.items()},
        "old_logprobs": lp - r.choice(SHIFTS, tokens),
        "ref_logprobs": lp + r.choice(SHIFTS, tokens),
        "importance_weights": r.choice((1.0, 0.5, 2.0, 0.0), tokens),
        "segment_ids": _segments(draw(st.sampled_from(("one", "single", "unsorted", "gaps", "none"))), tokens, r),
        "preference_pairs": r.integers(-1, tokens, (draw(st.integers(1, 3)), 2)),
        "advantages": r.choice(ADVANTAGES, tokens),
    }
    gone = ~mask | (labels < 0)
    garbage = np.array([np.nan, np.inf, -np.inf, 1e30])
    for array in (found["logits"], *found["teacher_logits"].values()):
        array[gone] = garbage[r.integers(0, 4, array[gone].shape)]
    for name in ("old_logprobs", "ref_logprobs", "importance_weights", "advantages"):
        found[name] = exact(found[name], compute)
        found[name][gone] = garbage[r.integers(0, 3, int(gone.sum()))]
    if draw(st.booleans()):
        del found["importance_weights"]
    if vocab < columns:
        found["vocab_size"] = vocab
    for name in ("num_tokens", "num_sequences", "num_pairs"):
        if draw(st.sampled_from((False, False, True))):
            found[name] = 11
    return found


def _segments(kind: str, tokens: int, r: np.random.Generator) -> np.ndarray:
    """Which sequence each token belongs to: all in one, one each, in any order, with empty ones, or partly in none."""
    if kind == "one":
        return np.zeros(tokens, np.int64)
    if kind == "single":
        return r.permutation(tokens)
    if kind == "unsorted":
        return r.integers(0, max(tokens // 2, 1), tokens)
    if kind == "gaps":
        return r.integers(0, tokens, tokens)
    return np.where(r.random(tokens) < 0.5, -1, r.integers(0, tokens, tokens))


@st.composite
def examples(
    draw: st.DrawFn,
    shapes: tuple[tuple[int, int], ...] = ((1, 1), (1, 3), (3, 2), (4, 5), (6, 9)),
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16", "float16", "float64"),
    types: tuple[str, ...] = tuple(FIELDS),
    rows: tuple[str, ...] = ROWS,
) -> Example:
    """A head with its inputs."""
    dtype = draw(st.sampled_from(dtypes))
    tokens, columns = draw(st.sampled_from(shapes))
    return Example(draw(heads(types)), draw(inputs(dtype, tokens, columns, rows)), dtype)
