"""Sets of losses and random inputs for the interpreter's tests, and the comparison with the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np

from duohead.reference import reference
from duohead.spec import HeadSpec

CE = {"ce": {"type": "label"}}
Z = {"z": {"type": "z_loss", "weight": 0.1}}
SETS: dict[str, dict[str, Any]] = {
    "ce_z": {"losses": CE | Z},
    "smoothed": {
        "losses": {"ce": {"type": "label", "label_smoothing": 0.1}},
        "metrics": ["entropy", "accuracy", "perplexity", "mean_logprob", "num_tokens"],
    },
    "entropy": {
        "losses": CE | {"h": {"type": "entropy", "weight": -0.3, "reduction": "sum"}},
        "final_logit_softcap": 3.0,
    },
    "scales": {
        "losses": {
            "ce": {"type": "label", "label_smoothing": 0.2},
            "cold": {"type": "label", "logits_scale_factor": 2.0, "reduction": "constant", "denominator": 3.0},
            "h": {"type": "entropy", "logits_scale_factor": 0.5},
        },
        "logits_scale_factor": 0.7,
    },
    "grpo": {"losses": CE | Z | {"rl": {"type": "grpo", "epsilon_high": 0.28, "beta": 0.05, "delta": 3.0}}},
    "objectives": {
        "losses": {
            "cispo": {"type": "grpo", "objective": "cispo", "reduction": "sequence_mean_token_mean"},
            "sapo": {"type": "grpo", "objective": "sapo", "reduction": "sequence_mean_token_sum"},
            "plain": {"type": "grpo", "objective": "reinforce", "beta": 0.1, "kl_estimator": "k2"},
        }
    },
    "kd": {
        "losses": CE
        | {
            "forward": {"type": "distillation", "loss_type": "forward_kl", "temperature": 2.0, "weight": 0.5},
            "soft": {"type": "distillation", "temperature": 0.5, "student_temperature": 1.5},
            "reverse": {"type": "distillation", "loss_type": "reverse_kl", "reference_model": "other", "weight": 0.3},
        }
    },
    "jsd": {"losses": CE | {"kd": {"type": "distillation", "loss_type": "jsd", "jsd_beta": 0.3}}},
    "sequences": {
        "losses": CE
        | {
            "seq": {"type": "gspo", "beta": 0.1},
            "dpo": {"type": "dpo"},
            "h": {"type": "entropy"},
            "rl": {"type": "grpo"},
        }
    },
    "sequences_jsd": {"losses": {"kto": {"type": "kto"}, "kd": {"type": "distillation", "loss_type": "jsd"}}},
}


def random_inputs(name: str, vocab: int, seed: int = 0, tokens: int = 6) -> dict[str, Any]:
    """Inputs of one set: row 2 is masked and full of NaN, the last two rows belong to no sequence."""
    r = np.random.default_rng(seed)
    logits = r.normal(0.0, 2.0, (tokens, vocab))
    labels = r.integers(0, vocab, tokens)
    labels[2] = -100
    logits[2] = np.nan
    found: dict[str, Any] = {"logits": logits, "labels": labels}
    losses = SETS[name]["losses"].values()
    kinds = {loss["type"] for loss in losses}
    if kinds & {"grpo", "gspo", "kto", "dpo"}:
        found["advantages"] = r.normal(size=tokens)
        found["old_logprobs"] = -r.uniform(0.5, 6.0, tokens)
        found["ref_logprobs"] = -r.uniform(0.5, 6.0, tokens)
        found["segment_ids"] = np.array([0, 0, 0, 1, 1, -1])[:tokens]
    if "dpo" in kinds:
        found["preference_pairs"] = np.array([[0, 1]])
    models = {loss.get("reference_model", "teacher") for loss in losses if loss["type"] == "distillation"}
    if models:
        found["teacher_logits"] = {model: r.normal(0.0, 2.0, (tokens, vocab)) for model in sorted(models)}
    return found


def rounded(inputs: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The inputs as that dtype holds them, in float64, for the oracle."""
    import torch

    def through(array: Any) -> Any:
        return torch.tensor(array).to(getattr(torch, dtype)).to(torch.float64).numpy()

    found = dict(inputs)
    found["logits"] = through(inputs["logits"])
    if "teacher_logits" in inputs:
        found["teacher_logits"] = {model: through(array) for model, array in inputs["teacher_logits"].items()}
    return found


def oracle(name: str, inputs: dict[str, Any]) -> Any:
    inputs = dict(inputs)
    return reference(inputs.pop("logits"), HeadSpec.from_dict(SETS[name]).to_dict(), **inputs)


#: rounding of the gradient: Triton's interpreter cuts bfloat16 off where a GPU rounds
ROUNDING = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}


def check(dtype: str, wanted: Any, loss: Any, losses: Any, metrics: Any, gradient: Any) -> None:
    """Scalars to float32's accuracy, the gradient to its dtype's."""
    close = {"rtol": 2e-5, "atol": 2e-6}
    np.testing.assert_allclose(np.float64(loss), wanted.loss, **close)
    assert set(losses) == set(wanted.losses)
    for key, value in wanted.losses.items():
        np.testing.assert_allclose(np.float64(losses[key]), value, err_msg=key, **close)
    for key, value in metrics.items():
        np.testing.assert_allclose(np.float64(value), wanted.metrics[key], err_msg=key, rtol=1e-4, atol=1e-5)
    tolerance = ROUNDING[dtype]
    # float16 has no numbers below 6e-8
    np.testing.assert_allclose(gradient, wanted.logits_grad, rtol=tolerance, atol=1e-7 if dtype == "float16" else 3e-7)
