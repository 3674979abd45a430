"""Wrong input is one clear error: the same table in both frameworks, each fault by its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import duohead_jax
import duohead_torch
from duohead import (
    DPO,
    GRPO,
    GSPO,
    KTO,
    ORPO,
    CrossEntropy,
    Distillation,
    EntropyLoss,
    HeadSpec,
    SimPO,
    ZLoss,
)

TOKENS, VOCAB = 4, 5
IMPLEMENTATIONS = ("torch eager", "torch per_loss", "jax xla", "jax per_loss")
FLOATS = np.linspace(-1.0, 1.0, TOKENS).astype(np.float32)
LABELS = np.array([0, 1, 4, -100])
LOGITS = np.linspace(-2.0, 2.0, TOKENS * VOCAB).reshape(TOKENS, VOCAB).astype(np.float32)
POLICY = {"advantages": FLOATS, "old_logprobs": FLOATS}
SEGMENTS = {"segment_ids": np.array([0, 0, 1, 1])}
PAIRS = {**SEGMENTS, "preference_pairs": np.array([[0, 1]])}


def convert(framework: str, value: Any) -> Any:
    """NumPy arrays in a tree become the framework's; the rest stays."""
    if isinstance(value, dict):
        return {name: convert(framework, item) for name, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.tensor(value) if framework == "torch" else jnp.asarray(value)
    return value


def call(implementation: str, losses: Any, **arguments: Any) -> Any:
    framework, _, name = implementation.partition(" ")
    arguments = {"logits": LOGITS, "labels": LABELS, **arguments}
    module = duohead_torch if framework == "torch" else duohead_jax
    return module.monolithic_loss(losses=losses, implementation=name, **convert(framework, arguments))


CE = {"ce": CrossEntropy()}
KD = {"kd": Distillation(reference_model="big")}
CALLS: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    # name: (losses, arguments, error, message)
    "label_too_large": (
        CE,
        {"labels": np.array([0, VOCAB, 1, 2])},
        ValueError,
        r"labels: must be < 5 \(the vocabulary\), got 5",
    ),
    "label_in_the_padding": (CE, {"vocab_size": 4}, ValueError, r"labels: must be < 4 \(the vocabulary\), got 4"),
    "labels_shape": (
        CE,
        {"labels": LABELS[:2]},
        ValueError,
        r"labels: must have the logits' token shape \(4,\), got int64 of shape \(2,\)",
    ),
    "labels_float": (CE, {"labels": FLOATS}, TypeError, r"labels: must be integer, got float32 of shape \(4,\)"),
    "labels_bool": (CE, {"labels": LABELS >= 0}, TypeError, r"labels: must be integer, got bool of shape \(4,\)"),
    "labels_list": (CE, {"labels": [0, 1, 2, 3]}, TypeError, r"labels: must be .*got .*list"),
    "labels_missing": (CE, {"labels": None}, ValueError, r"labels: loss 'ce' \(label\) needs them, none were given"),
    "labels_missing_for_policy": (
        {"rl": GRPO()},
        {"labels": None, **POLICY},
        ValueError,
        r"labels: loss 'rl' \(grpo\) needs them",
    ),
    "labels_missing_for_pairs": (
        {"pref": DPO()},
        {"labels": None, **PAIRS},
        ValueError,
        r"labels: loss 'pref' \(dpo\) needs them",
    ),
    "labels_missing_for_metrics": (
        {"z": ZLoss()},
        {"labels": None, "metrics": ("accuracy",)},
        ValueError,
        "labels: a metric or token output that was asked for needs them",
    ),
    "mask_shape": (CE, {"mask": np.ones((TOKENS, 1), bool)}, ValueError, r"mask: must have the logits' token shape"),
    "mask_integer": (CE, {"mask": LABELS}, TypeError, r"mask: must be bool, got int64 of shape \(4,\)"),
    "logits_integer": (CE, {"logits": LOGITS.astype(np.int64)}, TypeError, r"logits: must be one of float32, .*int64"),
    "logits_list": (CE, {"logits": [[0.0]]}, TypeError, r"logits: must be .*list"),
    "logits_scalar": (CE, {"logits": np.array(1.0, np.float32)}, ValueError, r"logits: must have shape"),
    "vocabulary_empty": (
        CE,
        {"logits": LOGITS[:, :0]},
        ValueError,
        r"logits: the vocabulary \(last dimension\) is empty, got float32 of shape \(4, 0\)",
    ),
    "vocab_size_too_large": (CE, {"vocab_size": 6}, ValueError, r"vocab_size: must be at most .* 5, got 6"),
    "vocab_size_zero": (CE, {"vocab_size": 0}, ValueError, r"vocab_size: must be at least 1, got 0"),
    "teacher_missing": (
        KD,
        {},
        ValueError,
        r"teacher_logits: loss 'kd' \(distillation\) needs the teacher 'big', given: none",
    ),
    "teacher_of_another_name": (
        KD,
        {"teacher_logits": {"small": LOGITS}},
        ValueError,
        r"teacher_logits: loss 'kd' \(distillation\) needs the teacher 'big', given: 'small'",
    ),
    "teacher_shape": (KD, {"teacher_logits": {"big": LOGITS[:, :3]}}, ValueError, r"teacher_logits\['big'\]: must"),
    "teacher_integer": (
        KD,
        {"teacher_logits": {"big": LOGITS.astype(np.int64)}},
        TypeError,
        r"teacher_logits\['big'\]: must be .*int64",
    ),
    "one_array_for_two_teachers": (
        {**KD, "kd2": Distillation(reference_model="small")},
        {"teacher_logits": LOGITS},
        ValueError,
        r"teacher_logits: a bare array where the losses name several models \(big, small\)",
    ),
    "advantages_missing": (
        {"rl": GRPO(objective="reinforce", metrics="none")},
        {},
        ValueError,
        r"advantages: loss 'rl' \(grpo\) needs it, none was given",
    ),
    "old_logprobs_missing": (
        {"rl": GRPO()},
        {"advantages": FLOATS},
        ValueError,
        r"old_logprobs: loss 'rl' \(grpo\) needs it, none was given",
    ),
    "ref_logprobs_missing": (
        {"rl": GRPO(beta=0.1)},
        POLICY,
        ValueError,
        r"ref_logprobs: loss 'rl' \(grpo\) needs it, none was given",
    ),
    "ref_logprobs_of_another_name": (
        {"rl": GRPO(beta=0.1, reference_model="base")},
        {**POLICY, "ref_logprobs": {"other": FLOATS}},
        ValueError,
        r"ref_logprobs: loss 'rl' \(grpo\) needs the reference 'base', given: other",
    ),
    "ref_logprobs_ambiguous": (
        {"rl": GRPO(beta=0.1)},
        {**POLICY, "ref_logprobs": {"a": FLOATS, "b": FLOATS}},
        ValueError,
        r"ref_logprobs: loss 'rl' \(grpo\) has no reference_model, and several were given: a, b",
    ),
    "old_logprobs_integer": (
        {"rl": GRPO()},
        {**POLICY, "old_logprobs": LABELS},
        TypeError,
        r"old_logprobs: must be floating point, got int64",
    ),
    "importance_weights_shape": (
        {"rl": GRPO()},
        {**POLICY, "importance_weights": FLOATS[:3]},
        ValueError,
        r"importance_weights: must have the logits' token shape",
    ),
    "advantages_per_segment_alone": (
        {"rl": GRPO()},
        {**POLICY, "advantages": FLOATS[:2]},
        ValueError,
        r"advantages: one per segment \(float32 of shape \(2,\)\) needs segment_ids",
    ),
    "segment_ids_missing": (
        {"seq": GSPO()},
        POLICY,
        ValueError,
        r"segment_ids: loss 'seq' \(gspo\) needs it, none was given",
    ),
    "segment_ids_missing_for_reduction": (
        {"ce": CrossEntropy(reduction="sequence_mean_token_mean")},
        {},
        ValueError,
        r"segment_ids: loss 'ce' \(label\) needs it for reduction 'sequence_mean_token_mean'",
    ),
    "segment_ids_missing_for_kto": ({"k": KTO()}, {"advantages": FLOATS}, ValueError, r"segment_ids: loss 'k' \(kto\)"),
    "segment_ids_float": (
        {"seq": GSPO()},
        {**POLICY, "segment_ids": FLOATS},
        TypeError,
        r"segment_ids: must be integer, got float32",
    ),
    "segment_id_too_large": (
        {"seq": GSPO()},
        {**POLICY, "segment_ids": np.array([0, 1, 2, 7]), "num_segments": 3, "validate": True},
        ValueError,
        r"segment_ids: must be < num_segments = 3",
    ),
    "pairs_missing": (
        {"pref": SimPO()},
        SEGMENTS,
        ValueError,
        r"preference_pairs: loss 'pref' \(simpo\) needs it, none was given",
    ),
    "pairs_shape": (
        {"pref": ORPO()},
        {**SEGMENTS, "preference_pairs": np.array([0, 1])},
        ValueError,
        r"preference_pairs: must have shape \(pairs, 2\), got int64 of shape \(2,\)",
    ),
    "pairs_float": (
        {"pref": ORPO()},
        {**SEGMENTS, "preference_pairs": np.zeros((1, 2), np.float32)},
        TypeError,
        r"preference_pairs: must be integer, got float32",
    ),
    "pair_past_the_segments": (
        {"pref": ORPO()},
        {**SEGMENTS, "preference_pairs": np.array([[0, 9]]), "num_segments": 2, "validate": True},
        ValueError,
        r"preference_pairs: must be < num_segments = 2, got 9",
    ),
    "losses_not_a_mapping": ([CrossEntropy()], {}, TypeError, r"losses: must be a mapping from name to loss .*list"),
    "losses_of_dicts": ({"ce": {"type": "label"}}, {}, TypeError, r"losses\['ce'\]: must be a loss such as .*dict"),
    "losses_of_classes": ({"ce": CrossEntropy}, {}, TypeError, r"losses\['ce'\]: must be a loss such as"),
    "losses_name_with_slash": ({"a/b": CrossEntropy()}, {}, ValueError, r"losses: a name is a non-empty .*'a/b'"),
    "losses_named_head": ({"head": CrossEntropy()}, {}, ValueError, r"losses: a name .* not 'head', got 'head'"),
    "metric_unknown": (CE, {"metrics": ("acuracy",)}, ValueError, r"metrics: got 'acuracy'; did you mean 'accuracy'\?"),
    "metrics_string": (CE, {"metrics": "entropy"}, TypeError, r"metrics: must be a sequence of names, got the string"),
    "token_output_unknown": (CE, {"tokens": ("logprob",)}, ValueError, r"tokens: got 'logprob'; did you mean 'logpr"),
    "scale_zero": (CE, {"logits_scale_factor": 0.0}, ValueError, r"logits_scale_factor: must be a number > 0, got 0.0"),
    "scale_text": (CE, {"logits_scale_factor": "2"}, TypeError, r"logits_scale_factor: must be a number > 0, got '2'"),
    "scale_vector": (CE, {"logits_scale_factor": FLOATS}, TypeError, r"logits_scale_factor: must be a number > 0"),
    "softcap_negative": (CE, {"final_logit_softcap": -1.0}, ValueError, r"final_logit_softcap: must be a number > 0"),
    "count_negative": (CE, {"num_tokens": -1}, ValueError, r"num_tokens: must be a number >= 0, got -1"),
    "count_nan": (CE, {"num_tokens": float("nan")}, ValueError, r"num_tokens: must be a number >= 0, got nan"),
    "count_text": (CE, {"num_sequences": "many"}, TypeError, r"num_sequences: must be a number >= 0, got 'many'"),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, implementation: str) -> None:
    losses, arguments, error, message = CALLS[name]
    if implementation == "jax xla" and name.startswith("label_"):
        arguments = {**arguments, "validate": True}
    with pytest.raises(error, match=message):
        call(implementation, losses, **arguments)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_table_starts_from_good_calls(implementation: str) -> None:
    everything = {
        "ce": CrossEntropy(),
        "kd": Distillation(),
        "rl": GRPO(beta=0.1),
        "seq": GSPO(),
        "pref": ORPO(),
    }
    loss = call(implementation, everything, teacher_logits=LOGITS, ref_logprobs=FLOATS, **POLICY, **PAIRS).loss
    assert np.isfinite(float(loss))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_unknown_implementation(framework: str) -> None:
    with pytest.raises(ValueError, match=r"implementation: got 'fast'.*eager|implementation: got 'fast'.*xla"):
        call(f"{framework} fast", CE)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_unknown_argument(framework: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'label'"):
        call(f"{framework} auto", CE, label=LABELS)


# ---------------------------------------------------------------------------------------------------------- spec values

SPECS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "weight_negative": (lambda: CrossEntropy(weight=-0.1), ValueError, r"weight: must be a number >= 0, got -0.1"),
    "weight_nan": (lambda: ZLoss(weight=float("nan")), ValueError, r"weight: must be a number >= 0, got nan"),
    "weight_infinite": (lambda: ZLoss(weight=float("inf")), ValueError, r"weight: must be a number >= 0, got inf"),
    "weight_text": (lambda: ZLoss(weight="0.1"), TypeError, r"weight: must be a number >= 0, got '0.1'"),
    "weight_bool": (lambda: ZLoss(weight=True), TypeError, r"weight: must be a number >= 0, got True"),
    "weight_none": (lambda: ZLoss(weight=None), TypeError, r"weight: must be a number >= 0, got None"),
    "weight_list": (lambda: ZLoss(weight=[1.0]), TypeError, r"weight: must be a number >= 0, got \[1.0\]"),
    "weight_vector": (lambda: ZLoss(weight=np.ones(2)), TypeError, r"weight: must be a number >= 0"),
    "entropy_weight_nan": (lambda: EntropyLoss(weight=float("nan")), ValueError, r"weight: must be a number, got nan"),
    "temperature_zero": (
        lambda: Distillation(temperature=0.0),
        ValueError,
        r"temperature: must be a number > 0, got 0.0",
    ),
    "student_temperature_negative": (
        lambda: Distillation(student_temperature=-1),
        ValueError,
        r"student_temperature: must be a number > 0, got -1",
    ),
    "jsd_beta_above_one": (
        lambda: Distillation(loss_type="jsd", jsd_beta=1.5),
        ValueError,
        r"jsd_beta: must be a number >= 0 and <= 1, got 1.5",
    ),
    "loss_type_unknown": (
        lambda: Distillation(loss_type="forward_lk"),
        ValueError,
        r"loss_type: got 'forward_lk'; did you mean 'forward_kl'\?",
    ),
    "reference_model_number": (lambda: Distillation(reference_model=3), TypeError, r"reference_model: must be a name"),
    "smoothing_one": (
        lambda: CrossEntropy(label_smoothing=1.0),
        ValueError,
        r"label_smoothing: must be a number >= 0 and < 1, got 1.0",
    ),
    "reduction_unknown": (lambda: CrossEntropy(reduction="mean"), ValueError, r"reduction: got 'mean'"),
    "denominator_missing": (
        lambda: CrossEntropy(reduction="constant"),
        ValueError,
        r"denominator: the `constant` reduction needs one",
    ),
    "denominator_without_use": (
        lambda: CrossEntropy(denominator=3.0),
        ValueError,
        r"denominator: only the `constant` reduction uses it",
    ),
    "scale_zero": (lambda: ZLoss(logits_scale_factor=0), ValueError, r"logits_scale_factor: must be a number > 0"),
    "epsilon_negative": (lambda: GRPO(epsilon_low=-0.2), ValueError, r"epsilon_low: must be a number >= 0 and <= 1"),
    "delta_without_clip": (
        lambda: GRPO(objective="cispo", delta=2.0),
        ValueError,
        r"delta: only the `clip` objective uses it, objective is 'cispo'",
    ),
    "pair_reduction": (
        lambda: DPO(reduction="sequence_mean_token_mean"),
        ValueError,
        r"reduction: got 'sequence_mean_token_mean'; did you mean 'token_mean'\?",
    ),
    "field_unknown": (lambda: ZLoss(wieght=1.0), TypeError, r"unexpected keyword argument 'wieght'"),
    "head_losses_unknown_key": (
        lambda: HeadSpec.from_dict({"losses": {"z": {"type": "z_loss", "wieght": 1.0}}}),
        ValueError,
        r"losses\.z\.wieght: unknown key.*did you mean 'weight'\?",
    ),
    "head_unknown_type": (
        lambda: HeadSpec.from_dict({"losses": {"z": {"type": "zloss"}}}),
        ValueError,
        r"losses\.z\.type: got 'zloss'; did you mean 'z_loss'\?",
    ),
    "head_temperature_zero": (
        lambda: HeadSpec.from_dict({"losses": {"kd": {"type": "distillation", "temperature": 0}}}),
        ValueError,
        r"losses\.kd\.temperature: must be a number > 0, got 0",
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs(name: str) -> None:
    make, error, message = SPECS[name]
    with pytest.raises(error, match=message):
        make()


def test_an_entropy_weight_may_be_negative() -> None:
    assert EntropyLoss(weight=-0.5).weight == -0.5


# ------------------------------------------------------------------------------------------------ wrong, and visible


@pytest.mark.parametrize("implementation", ["torch compiled", "jax xla", "jax jit"])
def test_a_label_past_the_vocabulary_shows_as_nan(implementation: str) -> None:
    """Compiled code cannot raise: that row is NaN, the others are as they were, and ``validate=True`` raises."""
    labels = np.array([0, VOCAB, 1, 2])
    if implementation == "jax jit":
        loss, aux = jax.jit(
            lambda x, y: duohead_jax.monolithic_loss(x, CE, labels=y, tokens=("logprobs",)),
        )(LOGITS, labels)
    else:
        loss, aux = call(implementation, CE, labels=labels, tokens=("logprobs",))
        with pytest.raises(ValueError, match=r"labels: must be < 5 \(the vocabulary\), got 5"):
            call(implementation, CE, labels=labels, validate=True)
    assert np.isnan(float(loss))
    assert np.isnan(np.asarray(aux.tokens["logprobs"])).tolist() == [False, True, False, False]


def test_a_masked_label_past_the_vocabulary_is_nothing() -> None:
    labels, mask = np.array([0, VOCAB, 1, 2]), np.array([True, False, True, True])
    for implementation in IMPLEMENTATIONS:
        loss = call(implementation, CE, labels=labels, mask=mask, validate=True).loss
        assert np.isfinite(float(loss))


def test_validation_inside_a_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="validate: not possible under a transformation"):
        jax.jit(lambda y: call("jax xla", CE, labels=y, validate=True))(LABELS)


# ------------------------------------------------------------------------------------------------ torch and JAX alone


@pytest.mark.parametrize("name", ["logits", "labels", "mask", "advantages", "segment_ids"])
def test_torch_refuses_numpy_arrays(name: str) -> None:
    arguments: dict[str, Any] = {
        "logits": torch.tensor(LOGITS),
        "labels": torch.tensor(LABELS),
        "mask": torch.ones(TOKENS, dtype=torch.bool),
        "advantages": torch.tensor(FLOATS),
        "segment_ids": torch.zeros(TOKENS, dtype=torch.int64),
    }
    arguments[name] = arguments[name].numpy()
    with pytest.raises(TypeError, match=rf"{name}: must be a torch tensor, got numpy\.ndarray"):
        duohead_torch.monolithic_loss(losses=CE, implementation="eager", **arguments)


def test_another_device() -> None:
    elsewhere = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="labels: must be on the logits' device cpu, got meta"):
        duohead_torch.monolithic_loss(torch.tensor(LOGITS), labels=elsewhere, implementation="compiled")


OUTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "accumulate_into_nothing": ({"accumulate": True}, ValueError, "accumulate: needs out"),
    "out_shape": ({"out": LOGITS[:2]}, ValueError, r"out: must have the logits' shape"),
    "grad_scale_text": ({"grad_scale": "2"}, TypeError, r"grad_scale: must be a number, got '2'"),
    "grad_scale_vector": ({"grad_scale": FLOATS}, TypeError, r"grad_scale: must be a number"),
    "grad_scale_nan": ({"grad_scale": float("nan")}, ValueError, r"grad_scale: must be a number, got nan"),
    "out_integer": ({"out": LOGITS.astype(np.int64)}, TypeError, r"out: must be one of float32, .*, got int64"),
    "out_list": ({"out": [[0.0]]}, TypeError, r"out: must be .*, got .*list"),
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", OUTS)
def test_loss_and_grad(name: str, framework: str) -> None:
    arguments, error, message = OUTS[name]
    module = duohead_torch if framework == "torch" else duohead_jax
    with pytest.raises(error, match=message):
        module.monolithic_loss_and_grad(
            **convert(framework, {"logits": LOGITS, "losses": CE, "labels": LABELS, **arguments})
        )


def test_out_elsewhere() -> None:
    logits, labels = torch.tensor(LOGITS), torch.tensor(LABELS)
    with pytest.raises(ValueError, match="out: must be on the logits' device cpu, got meta"):
        duohead_torch.monolithic_loss_and_grad(logits, CE, labels=labels, out=logits.to("meta"))
    with pytest.raises(TypeError, match=r"out: must be a torch tensor, got numpy\.ndarray"):
        duohead_torch.monolithic_loss_and_grad(logits, CE, labels=labels, out=LOGITS)


def test_accumulating_into_the_logits_is_refused() -> None:
    logits = torch.tensor(LOGITS)
    with pytest.raises(ValueError, match="accumulate: out is the logits themselves"):
        duohead_torch.monolithic_loss_and_grad(logits, CE, labels=torch.tensor(LABELS), out=logits, accumulate=True)


STATISTICS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown": ({"statistics": ("logprobs",)}, ValueError, r"statistics: got 'logprobs'; did you mean 'logprob'\?"),
    "labels": ({"labels": None}, ValueError, r"labels: the statistic 'logprob' needs them, none were given"),
    "teacher": ({"statistics": ("jsd",)}, ValueError, r"teacher_logits: the statistic 'jsd' needs one teacher, got 0"),
    "temperature": ({"temperature": 0.0}, ValueError, r"temperature: must be a number > 0, got 0.0"),
    "vocabulary": ({"logits": LOGITS[:, :0]}, ValueError, r"logits: the vocabulary \(last dimension\) is empty"),
    "mask": ({"mask": LABELS}, TypeError, r"mask: must be bool, got int64"),
}


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", STATISTICS)
def test_token_statistics(name: str, framework: str) -> None:
    arguments, error, message = STATISTICS[name]
    module = duohead_torch if framework == "torch" else duohead_jax
    with pytest.raises(error, match=message):
        module.token_statistics(**convert(framework, {"logits": LOGITS, "labels": LABELS, **arguments}))
