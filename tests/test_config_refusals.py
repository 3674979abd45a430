"""Every configuration that is wrong is refused when it is read, and says what and where and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duohead import HeadSpec, losses_from_config, token_loss
from duohead.loss import LOSS_TYPES

#: (configuration, error, its whole message); TYPES are the registered types
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown head key": ({"loss": {}}, ValueError, "loss: unknown key of the head; did you mean 'losses'?"),
    "misspelt head key": (
        {"loss_implementaton": "auto"},
        ValueError,
        "loss_implementaton: unknown key of the head; did you mean 'loss_implementation'?",
    ),
    "unknown head key far": (
        {"optimizer": {}},
        ValueError,
        "optimizer: unknown key of the head; valid: final_logit_softcap, logits_scale_factor, "
        "loss_implementation, losses, metrics, tokens, vocab_size",
    ),
    "beside head": ({"head": {}, "losses": {}}, ValueError, "losses: stands beside `head`; 'losses' belongs under it"),
    "beside head misspelt": (
        {"head": {}, "logit_scale_factor": 2.0},
        ValueError,
        "logit_scale_factor: stands beside `head`; 'logits_scale_factor' belongs under it",
    ),
    "head not mapping": ({"head": [1]}, TypeError, "head: must be a mapping, got [1]"),
    "config not mapping": ([1, 2], TypeError, "configuration: must be a mapping, got [1, 2]"),
    "losses list": (
        {"losses": [{"type": "label"}]},
        TypeError,
        "losses: must be a mapping from name to loss, got [{'type': 'label'}]",
    ),
    "implementation": (
        {"loss_implementation": "tritn"},
        ValueError,
        "loss_implementation: got 'tritn'; did you mean 'triton'?",
    ),
    "implementation eager": (
        {"loss_implementation": "eager"},
        ValueError,
        "loss_implementation: got 'eager'; valid: auto, compiled, per_loss, triton",
    ),
    "scale 0": ({"logits_scale_factor": 0}, ValueError, "logits_scale_factor: must be a number > 0, got 0"),
    "scale text": ({"logits_scale_factor": "2"}, TypeError, "logits_scale_factor: must be a number > 0, got '2'"),
    "softcap": (
        {"final_logit_softcap": -30.0},
        ValueError,
        "final_logit_softcap: must be a number > 0 or null, got -30.0",
    ),
    "vocab float": ({"vocab_size": 100.5}, TypeError, "vocab_size: must be a whole number >= 1 or null, got 100.5"),
    "vocab 0": ({"vocab_size": 0}, ValueError, "vocab_size: must be a whole number >= 1 or null, got 0"),
    "vocab bool": ({"vocab_size": True}, TypeError, "vocab_size: must be a whole number >= 1 or null, got True"),
    "head metric": ({"metrics": ["acuracy"]}, ValueError, "metrics: got 'acuracy'; did you mean 'accuracy'?"),
    "head metric string": (
        {"metrics": "accuracy"},
        TypeError,
        "metrics: must be a list of entropy, accuracy, perplexity, mean_logprob, num_tokens, got 'accuracy'",
    ),
    "tokens": ({"tokens": ["logprob"]}, ValueError, "tokens: got 'logprob'; did you mean 'logprobs'?"),
    "loss not mapping": (
        {"losses": {"ce": "label"}},
        TypeError,
        "losses.ce: must be a mapping with a type, got 'label'",
    ),
    "type missing": (
        {"losses": {"ce": {"weight": 1.0}}},
        ValueError,
        "losses.ce.type: missing; a loss names its type, one of TYPES",
    ),
    "type unknown": (
        {"losses": {"z": {"type": "zloss"}}},
        ValueError,
        "losses.z.type: got 'zloss'; did you mean 'z_loss'?",
    ),
    "type far": ({"losses": {"z": {"type": "mse"}}}, ValueError, "losses.z.type: got 'mse'; valid: TYPES_OR_GROUP"),
    "type null": ({"losses": {"z": {"type": None}}}, ValueError, "losses.z.type: got None; valid: TYPES_OR_GROUP"),
    "key unknown": (
        {"losses": {"rl": {"type": "grpo", "epsilon": 0.2}}},
        ValueError,
        "losses.rl.epsilon: unknown key of 'grpo'; did you mean 'epsilon_low'?",
    ),
    "key of another": (
        {"losses": {"ce": {"type": "label", "temperature": 2.0}}},
        ValueError,
        "losses.ce.temperature: unknown key of 'label'; valid: denominator, label_smoothing, "
        "logits_scale_factor, reduction, weight",
    ),
    "epsilon_low": (
        {"losses": {"rl": {"type": "grpo", "epsilon_low": 1.5}}},
        ValueError,
        "losses.rl.epsilon_low: must be a number >= 0 and <= 1, got 1.5",
    ),
    "weight negative": (
        {"losses": {"ce": {"type": "label", "weight": -1.0}}},
        ValueError,
        "losses.ce.weight: must be a number >= 0, got -1.0",
    ),
    "weight text": (
        {"losses": {"ce": {"type": "label", "weight": "1"}}},
        TypeError,
        "losses.ce.weight: must be a number >= 0, got '1'",
    ),
    "weight bool": (
        {"losses": {"ce": {"type": "label", "weight": True}}},
        TypeError,
        "losses.ce.weight: must be a number >= 0, got True",
    ),
    "weight nan": (
        {"losses": {"ce": {"type": "label", "weight": float("nan")}}},
        ValueError,
        "losses.ce.weight: must be a number >= 0, got nan",
    ),
    "weight inf": (
        {"losses": {"ce": {"type": "label", "weight": float("inf")}}},
        ValueError,
        "losses.ce.weight: must be a number >= 0, got inf",
    ),
    "weight null": (
        {"losses": {"ce": {"type": "label", "weight": None}}},
        TypeError,
        "losses.ce.weight: must be a number >= 0, got None",
    ),
    "smoothing 1": (
        {"losses": {"ce": {"type": "label", "label_smoothing": 1.0}}},
        ValueError,
        "losses.ce.label_smoothing: must be a number >= 0 and < 1, got 1.0",
    ),
    "reduction": (
        {"losses": {"ce": {"type": "label", "reduction": "mean"}}},
        ValueError,
        "losses.ce.reduction: got 'mean'; did you mean 'token_mean'?",
    ),
    "pair reduction": (
        {"losses": {"dpo": {"type": "dpo", "reduction": "sequence_mean_token_mean"}}},
        ValueError,
        "losses.dpo.reduction: got 'sequence_mean_token_mean'; did you mean 'token_mean'?",
    ),
    "denominator missing": (
        {"losses": {"ce": {"type": "label", "reduction": "constant"}}},
        ValueError,
        "losses.ce.denominator: the `constant` reduction needs one, a number > 0",
    ),
    "denominator alone": (
        {"losses": {"ce": {"type": "label", "denominator": 8}}},
        ValueError,
        "losses.ce.denominator: only the `constant` reduction uses it, reduction is 'token_mean'",
    ),
    "delta": (
        {"losses": {"rl": {"type": "grpo", "objective": "cispo", "delta": 3.0}}},
        ValueError,
        "losses.rl.delta: only the `clip` objective uses it, objective is 'cispo'",
    ),
    "objective": (
        {"losses": {"rl": {"type": "grpo", "objective": "ppo"}}},
        ValueError,
        "losses.rl.objective: got 'ppo'; did you mean 'sapo'?",
    ),
    "estimator": (
        {"losses": {"rl": {"type": "gspo", "kl_estimator": "k4"}}},
        ValueError,
        "losses.rl.kl_estimator: got 'k4'; did you mean 'k3'?",
    ),
    "metrics": (
        {"losses": {"rl": {"type": "grpo", "metrics": "all"}}},
        ValueError,
        "losses.rl.metrics: got 'all'; valid: auto, basic, none",
    ),
    "metrics list": (
        {"losses": {"rl": {"type": "grpo", "metrics": ["kl_new_old"]}}},
        ValueError,
        "losses.rl.metrics: got ['kl_new_old']; valid: auto, basic, none",
    ),
    "distance": (
        {"losses": {"kd": {"type": "distillation", "loss_type": "forward"}}},
        ValueError,
        "losses.kd.loss_type: got 'forward'; did you mean 'forward_kl'?",
    ),
    "teacher null": (
        {"losses": {"kd": {"type": "distillation", "reference_model": None}}},
        TypeError,
        "losses.kd.reference_model: must be a name, the name of the teacher in `teacher_logits`, got None",
    ),
    "teacher empty": (
        {"losses": {"kd": {"type": "distillation", "reference_model": ""}}},
        TypeError,
        "losses.kd.reference_model: must be a name, the name of the teacher in `teacher_logits`, got ''",
    ),
    "temperature": (
        {"losses": {"kd": {"type": "distillation", "temperature": 0.0}}},
        ValueError,
        "losses.kd.temperature: must be a number > 0, got 0.0",
    ),
    "jsd_beta": (
        {"losses": {"kd": {"type": "distillation", "loss_type": "jsd", "jsd_beta": 1.2}}},
        ValueError,
        "losses.kd.jsd_beta: must be a number >= 0 and <= 1, got 1.2",
    ),
    "dpo beta": (
        {"losses": {"dpo": {"type": "dpo", "beta": 0}}},
        ValueError,
        "losses.dpo.beta: must be a number > 0, got 0",
    ),
    "several references": (
        {
            "losses": {
                "a": {"type": "dpo", "reference_model": "x"},
                "b": {"type": "dpo", "reference_model": "y"},
                "rl": {"type": "grpo", "beta": 0.1},
            }
        },
        ValueError,
        "losses.rl.reference_model: missing; the other losses name several references (x, y), so 'grpo' "
        "must name its own",
    ),
    "slash": (
        {"losses": {"a/b": {"type": "label"}}},
        ValueError,
        "losses: a name is a non-empty string without '/', and not 'head', got 'a/b'",
    ),
    "named head": (
        {"losses": {"head": {"type": "label"}}},
        ValueError,
        "losses: a name is a non-empty string without '/', and not 'head', got 'head'",
    ),
    "number name": (
        {"losses": {1: {"type": "label"}}},
        ValueError,
        "losses: a name is a non-empty string without '/', and not 'head', got 1",
    ),
    "empty name": (
        {"losses": {"": {"type": "label"}}},
        ValueError,
        "losses: a name is a non-empty string without '/', and not 'head', got ''",
    ),
    "use_triton flat": (
        {"losses": {"ce": {"type": "label", "use_triton": True}}},
        ValueError,
        "losses.ce.use_triton: a loss has no implementation of its own, all share one pass; set "
        "loss_implementation on the head",
    ),
    "use_triton on child": (
        {"losses": {"g": {"type": "monolithic", "losses": {"ce": {"type": "label", "use_triton": False}}}}},
        ValueError,
        "losses.g.losses.ce.use_triton: a loss has no implementation of its own, all share one pass; "
        "set loss_implementation on the head",
    ),
    "use_triton head": (
        {"use_triton": True, "losses": {"ce": {"type": "label"}}},
        ValueError,
        "use_triton: belongs to {type: monolithic}; elsewhere it is loss_implementation",
    ),
    "use_triton value": (
        {"losses": {"g": {"type": "monolithic", "use_triton": "yes", "losses": {"ce": {"type": "label"}}}}},
        TypeError,
        "losses.g.use_triton: must be true, false or null, got 'yes'",
    ),
    "group key": (
        {"losses": {"g": {"type": "monolithic", "weight": 2.0, "losses": {"ce": {"type": "label"}}}}},
        ValueError,
        "losses.g.weight: unknown key of 'monolithic'; valid: losses, type, use_triton",
    ),
    "group empty": (
        {"losses": {"g": {"type": "monolithic", "losses": {}}}},
        ValueError,
        "losses.g.losses: missing; a monolithic group needs at least one loss",
    ),
    "group in group": (
        {
            "losses": {
                "g": {
                    "type": "monolithic",
                    "losses": {"h": {"type": "monolithic", "losses": {"ce": {"type": "label"}}}},
                }
            }
        },
        ValueError,
        "losses.g.losses.h.type: a monolithic group holds losses, not another group",
    ),
    "group collides": (
        {"losses": {"ce": {"type": "label"}, "g": {"type": "monolithic", "losses": {"ce": {"type": "z_loss"}}}}},
        ValueError,
        "losses.g.losses.ce: the name is taken by losses.ce; all losses of a head share one space of names",
    ),
    "flat collides": (
        {"losses": {"g": {"type": "monolithic", "losses": {"ce": {"type": "z_loss"}}}, "ce": {"type": "label"}}},
        ValueError,
        "losses.ce: the name is taken by losses.g.losses.ce; all losses of a head share one space of names",
    ),
    "mixed scales": (
        {
            "losses": {
                "g": {
                    "type": "monolithic",
                    "losses": {"ce": {"type": "label"}, "z": {"type": "z_loss", "logits_scale_factor": 2.0}},
                }
            }
        },
        ValueError,
        "losses.g.losses.z.logits_scale_factor: a monolithic group has one scale, got 2.0 here and 1.0 "
        "in losses.g.losses.ce; flat losses may differ",
    ),
    "mixed scales head": (
        {
            "type": "monolithic",
            "losses": {"ce": {"type": "label"}, "z": {"type": "z_loss", "logits_scale_factor": 2.0}},
        },
        ValueError,
        "losses.z.logits_scale_factor: a monolithic group has one scale, got 2.0 here and 1.0 in "
        "losses.ce; flat losses may differ",
    ),
    "groups disagree": (
        {
            "losses": {
                "g": {"type": "monolithic", "use_triton": True, "losses": {"ce": {"type": "label"}}},
                "h": {"type": "monolithic", "use_triton": False, "losses": {"z": {"type": "z_loss"}}},
            }
        },
        ValueError,
        "losses.h.use_triton: false disagrees with losses.g.use_triton: true; the losses of a head share one pass",
    ),
    "group and head disagree": (
        {
            "loss_implementation": "per_loss",
            "losses": {"g": {"type": "monolithic", "use_triton": True, "losses": {"ce": {"type": "label"}}}},
        },
        ValueError,
        "losses.g.use_triton: true disagrees with loss_implementation: per_loss; the losses of a head share one pass",
    ),
    "child error": (
        {"losses": {"g": {"type": "monolithic", "losses": {"ce": {"type": "label", "weigth": 1}}}}},
        ValueError,
        "losses.g.losses.ce.weigth: unknown key of 'label'; did you mean 'weight'?",
    ),
    "head type": (
        {"type": "label"},
        ValueError,
        "type: must be 'monolithic' where losses stand beside it, got 'label'",
    ),
    "losses type": (
        {"losses": {"type": "label"}},
        ValueError,
        "losses.type: must be 'monolithic' where losses stand beside it, got 'label'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_this_message(name: str) -> None:
    config, error, message = REFUSED[name]
    message = message.replace("TYPES_OR_GROUP", ", ".join(sorted((*LOSS_TYPES, "monolithic"))))
    message = message.replace("TYPES", ", ".join(sorted(LOSS_TYPES)))
    with pytest.raises(error) as caught:
        HeadSpec.from_dict(config)
    assert str(caught.value) == message


def test_there_are_many() -> None:
    assert len(REFUSED) >= 60


@pytest.mark.parametrize("name", ["epsilon_low", "use_triton on child", "key unknown"])
def test_the_same_in_a_document_and_through_every_door(name: str) -> None:
    config, error, message = REFUSED[name]
    for read in (HeadSpec.from_dict, HeadSpec.of, losses_from_config):
        with pytest.raises(error) as caught:
            read({"head": config, "optimizer": {"lr": 1.0}})
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("losses: {a: {type: label}, a: {type: z_loss}}", "YAML text, line 1: a: given twice"),
        ("losses:\n  a: {type: label\n", "YAML text, line 3: expected ',' or '}', but got '<stream end>'"),
        ("losses: {no: {type: label}}", "losses: a name is a non-empty string without '/', and not 'head', got False"),
        ("losses: {rl: {type: grpo, beta: 1e}}", "losses.rl.beta: must be a number >= 0, got '1e'"),
        ("not a mapping", "configuration: must be a mapping, got 'not a mapping'"),
    ],
)
def test_yaml_refused(text: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        HeadSpec.from_yaml(text)
    assert str(caught.value) == message


def test_yaml_source_that_is_no_text() -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.yaml"):
        HeadSpec.from_yaml("missing.yaml")
    with pytest.raises(FileNotFoundError, match="missing"):
        HeadSpec.from_yaml(Path("missing"))
    with pytest.raises(TypeError, match="configuration: must be YAML text or the path of a file, got 3"):
        HeadSpec.from_yaml(3)  # type: ignore[arg-type]


def test_python_faults_of_a_spec() -> None:
    with pytest.raises(TypeError, match=r"losses: must be a mapping from name to loss or a HeadSpec, got list"):
        HeadSpec(losses=[])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"losses\['ce'\]: must be a loss such as CrossEntropy\(\), got dict"):
        HeadSpec(losses={"ce": {"type": "label"}})  # type: ignore[dict-item]


@pytest.fixture
def registered() -> Any:
    """Names of types to forget after the test."""
    before = set(LOSS_TYPES)
    yield
    for name in set(LOSS_TYPES) - before:
        del LOSS_TYPES[name]


def cubed(logprob):  # type: ignore[no-untyped-def]
    return -(logprob**3), -3.0 * logprob * logprob


def needs_a_number(lse, margin):  # type: ignore[no-untyped-def]
    return lse * margin, margin


def refusal(read: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        read()
    return str(caught.value)


@pytest.mark.usefixtures("registered")
def test_a_set_that_the_kernel_cannot_take() -> None:
    token_loss(cubed, register="cubed")
    config = {"loss_implementation": "triton", "losses": {"ce": {"type": "label"}, "odd": {"type": "cubed"}}}
    expected = (
        "loss_implementation: 'triton' cannot take losses.odd (cubed): cubed uses **, //, % or @: write products out"
    )
    assert refusal(lambda: HeadSpec.from_dict(config)) == expected
    group = {"losses": {"g": {"type": "monolithic", "use_triton": True, "losses": {"odd": {"type": "cubed"}}}}}
    assert refusal(lambda: HeadSpec.from_dict(group)) == expected
    assert HeadSpec.from_dict({**config, "loss_implementation": "auto"}).plan().groups[0].why == (
        "auto: the kernel cannot take odd (cubed): cubed uses **, //, % or @: write products out"
    )
    assert HeadSpec.from_dict({"loss_implementation": "triton"}).plan().implementation == "triton"


@pytest.mark.usefixtures("registered")
def test_a_registered_term_that_needs_a_number() -> None:
    token_loss(needs_a_number, register="needs_a_number")
    message = refusal(lambda: HeadSpec.from_dict({"losses": {"m": {"type": "needs_a_number"}}}))
    assert message == "losses.m.margin: needs_a_number needs this hyperparameter, a number; none was given"


def test_a_type_without_a_name_is_not_written() -> None:
    head = HeadSpec(losses={"m": token_loss(needs_a_number)(margin=2.0)})
    assert refusal(head.to_dict) == (
        "losses.m: needs_a_number has no name in configurations; register it with duohead.register, "
        "or with register= of the decorator that made it"
    )


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_call_without_the_teacher(framework: str) -> None:
    from config_inputs import inputs_for, run_jax, run_torch

    head = HeadSpec.from_yaml("losses: {kd: {type: distillation, reference_model: big}, ce: {type: label}}")
    inputs = inputs_for(head)
    run = run_torch if framework == "torch" else run_jax
    implementation = "eager" if framework == "torch" else "xla"
    expected = "teacher_logits: loss 'kd' (distillation) needs the teacher 'big', given: "
    without = {name: value for name, value in inputs.items() if name != "teacher_logits"}
    assert refusal(lambda: run(head, without, implementation)) == expected + "none"
    other = {**inputs, "teacher_logits": {"small": inputs["teacher_logits"]["big"]}}
    assert refusal(lambda: run(head, other, implementation)) == expected + "'small'"
