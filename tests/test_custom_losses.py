"""Losses of a user's own: on every implementation what plain autodiff of the same formula gives."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from policy_inputs import Run, assert_close, assert_same, make_inputs, run

import duohead_jax
import duohead_torch
from duohead import DPO, GRPO, GSPO, KTO, Distillation, HeadSpec, pair_loss, sequence_loss, token_loss
from duohead.fields import number
from duohead.loss import LOSS_TYPES
from duohead.namespace import exp, log, maximum, minimum, where
from duohead.terms.policy import grpo_clip, gspo_clip

LIMIT = 0.5
GAMMA = {"gamma": number(2.0, "the focusing exponent", minimum=0.0)}


@token_loss(register="focal_of_tests", hyperparameters=GAMMA)
def focal(logprob, gamma):  # type: ignore[no-untyped-def]
    """−(1 − p)^γ · log p (Lin et al., 2017)."""
    miss = maximum(1.0 - exp(logprob), 1e-12)
    factor = exp(gamma * log(miss))
    return -factor * logprob, factor * (gamma * logprob * exp(logprob) / miss - 1.0)


@token_loss
def focal_by_autodiff(logprob, gamma=2.0):  # type: ignore[no-untyped-def]
    return -exp(gamma * log(maximum(1.0 - exp(logprob), 1e-12))) * logprob


@token_loss
def several(logprob, lse, entropy, advantages, forward_kl, a, b=0.3):  # type: ignore[no-untyped-def]
    return a * logprob * advantages + lse * entropy * b + advantages * forward_kl * lse


@token_loss
def skew(jsd, is_top):  # type: ignore[no-untyped-def]
    return (1.0 + is_top) * jsd, 1.0 + is_top


def bounded(x):  # type: ignore[no-untyped-def]
    return minimum(x, LIMIT)


@pair_loss
def margin(chosen_logprob_mean, rejected_logprob_mean, gap=1.0):  # type: ignore[no-untyped-def]
    short = gap - (chosen_logprob_mean - rejected_logprob_mean)
    slope = where(short > 0.0, 1.0, 0.0)
    return maximum(short, 0.0), -slope, slope


@pair_loss
def margin_by_autodiff(chosen_logprob_mean, rejected_logprob_mean, gap=1.0):  # type: ignore[no-untyped-def]
    return maximum(gap - (chosen_logprob_mean - rejected_logprob_mean), 0.0)


@pair_loss
def long_pairs(  # type: ignore[no-untyped-def]
    chosen_ref_log_ratio_sum, rejected_entropy_mean, chosen_length, rejected_advantages_mean, rate
):
    return chosen_ref_log_ratio_sum * rejected_entropy_mean * rate + chosen_length * rejected_advantages_mean


@sequence_loss
def smooth(logprob_sum, entropy_mean, length, advantages_mean, rate=0.5):  # type: ignore[no-untyped-def]
    return bounded(advantages_mean) * exp(rate * logprob_sum / length) * entropy_mean


@sequence_loss(carried_by_tokens=True)
def own_gspo(log_ratio_mean, advantages_mean, importance_weights_mean, epsilon_low, epsilon_high):  # type: ignore[no-untyped-def]
    return gspo_clip(log_ratio_mean, advantages_mean, importance_weights_mean, epsilon_low, epsilon_high)


@token_loss
def own_grpo(logprob, old_logprobs, advantages, importance_weights, epsilon_low, epsilon_high, delta):  # type: ignore[no-untyped-def]
    return grpo_clip(logprob, old_logprobs, advantages, importance_weights, epsilon_low, epsilon_high, delta)


SPECS: dict[str, Any] = {
    "focal": focal(gamma=1.5, weight=0.7),
    "focal_by_autodiff": focal_by_autodiff(gamma=1.5, reduction="sum"),
    "several": several(a=0.4, temperature=1.3, student_temperature=0.8),
    "skew": skew(jsd_beta=0.3),
    "margin": margin(gap=0.4),
    "margin_by_autodiff": margin_by_autodiff(gap=0.4, reduction="sum"),
    "long_pairs": long_pairs(rate=0.2, weight=2.0),
    "smooth": smooth(rate=0.3),
    "smooth_sum": smooth(rate=0.3, reduction="sum"),
}


# ------------------------------------------------------------- the same formulas, written out, in torch's own autograd


def plain(name: str, inputs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """The loss of SPECS[name], from the logits of the valid rows alone."""
    rows = torch.tensor(np.flatnonzero(inputs["mask"] & (inputs["labels"] >= 0)))
    given = {key: torch.tensor(value)[rows] for key, value in inputs.items() if np.shape(value) == inputs["mask"].shape}
    ids, advantages = given["segment_ids"], given["advantages"]
    spec = SPECS[name]
    x = logits[rows] / getattr(spec, "student_temperature", 1.0)
    teacher = torch.tensor(inputs["teacher_logits"]["teacher"])[rows] / getattr(spec, "temperature", 1.0)
    log_p, log_q = x.log_softmax(-1), teacher.log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    lp = log_p[torch.arange(len(rows)), given["labels"]]
    entropy = -(p * log_p).sum(-1)

    def mean(values: torch.Tensor, segment: int) -> Any:
        chosen = values[ids == segment]
        return chosen.mean() if len(chosen) else 0.0

    pairs = [(int(c), int(r)) for c, r in inputs["preference_pairs"] if c >= 0]
    if name.startswith("focal"):
        value = -((1.0 - lp.exp()) ** spec.gamma) * lp
        return value.sum() if spec.reduction == "sum" else value.mean()
    if name == "several":
        kl = (q * (log_q - log_p)).sum(-1)
        lse = x.logsumexp(-1)
        return (spec.a * lp * advantages + lse * entropy * spec.b + advantages * kl * lse).mean()
    if name == "skew":
        mixture = spec.jsd_beta * q + (1.0 - spec.jsd_beta) * p
        kls = [(one * (one.log() - mixture.log())).sum(-1) for one in (q, p)]
        is_top = x.argmax(-1) == given["labels"]
        return ((1.0 + is_top.double()) * (spec.jsd_beta * kls[0] + (1.0 - spec.jsd_beta) * kls[1])).mean()
    if name.startswith("margin"):
        total = sum((spec.gap - (mean(lp, c) - mean(lp, r))).clamp(min=0.0) for c, r in pairs)
        return total if spec.reduction == "sum" else total / len(pairs)
    if name == "long_pairs":
        ratio = lp - given["ref_logprobs"]
        values = [
            ratio[ids == c].sum() * mean(entropy, r) * spec.rate + (ids == c).sum() * mean(advantages, r)
            for c, r in pairs
        ]
        return sum(values) / len(pairs)
    present = sorted({int(i) for i in ids if i >= 0})
    values = [
        min(float(mean(advantages, s)), LIMIT) * (spec.rate * mean(lp, s)).exp() * mean(entropy, s) for s in present
    ]
    return sum(values) if spec.reduction == "sum" else sum(values) / len(present)


def plain_gradient(name: str, inputs: dict[str, Any]) -> tuple[float, np.ndarray]:
    logits = torch.tensor(np.nan_to_num(inputs["logits"]), requires_grad=True)
    value = plain(name, inputs, logits)
    return float(value.detach()), torch.autograd.grad(value, logits)[0].numpy()


def expected(inputs: dict[str, Any]) -> Run:
    """Every loss, and the gradient of the weighted total."""
    losses, gradient, total = {}, 0.0, 0.0
    for name, spec in SPECS.items():
        losses[name], slope = plain_gradient(name, inputs)
        total += spec.weight * losses[name]
        gradient = gradient + spec.weight * slope
    return Run(total, losses, {}, {}, gradient)


@pytest.fixture(scope="module")
def inputs() -> dict[str, Any]:
    return make_inputs(21)


@pytest.fixture(scope="module")
def truth(inputs: dict[str, Any]) -> Run:
    return expected(inputs)


@pytest.mark.parametrize("implementation", ["torch eager", "torch per_loss", "jax xla"])
def test_every_implementation(implementation: str, inputs: dict[str, Any], truth: Run) -> None:
    assert_same(run(implementation, SPECS, inputs), truth, 1e-12)


def test_compiled(inputs: dict[str, Any]) -> None:
    losses = {name: SPECS[name] for name in ("focal", "margin_by_autodiff", "smooth")}
    assert_same(run("torch compiled", losses, inputs), run("torch eager", losses, inputs), 1e-12)


@pytest.mark.parametrize("implementation", ["torch eager", "jax eager"])
def test_float32(implementation: str, inputs: dict[str, Any], truth: Run) -> None:
    assert_same(run(implementation, SPECS, inputs, "float32"), truth, 1e-5)


@pytest.mark.parametrize("name", SPECS)
def test_alone(name: str, inputs: dict[str, Any], truth: Run) -> None:
    result = run("torch eager", {name: SPECS[name]}, inputs)
    assert_close(result.losses[name], truth.losses[name], 1e-12)
    assert_close(result.gradient, SPECS[name].weight * plain_gradient(name, inputs)[1], 1e-12)


def test_built_in_functions_as_users_own(inputs: dict[str, Any]) -> None:
    """The built-in terms written as a user's are the built-in losses."""
    for implementation in ("torch eager", "jax eager"):
        band = {"epsilon_low": 0.1, "epsilon_high": 0.15}
        own = {"a": own_gspo(**band), "b": own_grpo(**band, delta=1.4)}
        built_in = {"a": GSPO(**band, metrics="none"), "b": GRPO(**band, delta=1.4, metrics="none")}
        result = run(implementation, own, inputs)
        assert result.metrics == {}
        assert_same(result, run(implementation, built_in, inputs), 1e-15)


def test_beside_built_in_losses(inputs: dict[str, Any]) -> None:
    built_in = {"dpo": DPO(), "kto": KTO(), "kd": Distillation(loss_type="forward_kl")}
    both = run("torch eager", {**SPECS, **built_in}, inputs)
    one, other = run("torch eager", SPECS, inputs), run("torch eager", built_in, inputs)
    assert both.losses == pytest.approx({**one.losses, **other.losses}, rel=1e-13)
    np.testing.assert_allclose(both.gradient, one.gradient + other.gradient, rtol=1e-11, atol=1e-14)


def test_compiles_for_a_gpu() -> None:
    """The kernel takes a user's function as it takes the built-in ones; no GPU is needed to see that it compiles."""
    pytest.importorskip("triton")
    from test_triton_compile import compiled, constants_of

    from duohead.checks import given_inputs
    from duohead.kernels import build
    from duohead.plan import make_plan

    plan, _ = make_plan({"focal": focal(), "skew": skew()}, given_inputs({"labels": True}, {"teacher": True}, {}))
    kernel = build.fused(plan, build.Flags(labels=True, padded=False))
    assert ".visible .entry" in compiled(kernel, constants_of(), 4).asm["ptx"]


# ------------------------------------------------------------------------------------------------------ as a loss type


def test_a_decorated_function_is_a_dataclass_and_a_type() -> None:
    spec = focal(weight=0.5)
    assert spec.gamma == 2.0
    assert dataclasses.replace(spec, gamma=3.0) == focal(gamma=3.0, weight=0.5)
    assert hash(spec) == hash(focal(weight=0.5))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(spec).startswith("focal(weight=0.5")
    assert focal.__doc__.startswith("−(1 − p)^γ")
    head = HeadSpec.from_dict({"losses": {"f": {"type": "focal_of_tests", "gamma": 1.0}}})
    assert head.losses["f"] == focal(gamma=1.0)


def test_numbers_are_runtime_values_in_jax(inputs: dict[str, Any]) -> None:
    """A jitted step takes the specs as arguments and is traced once, whatever the hyperparameters."""
    arrays = {key: jnp.asarray(value) for key, value in inputs.items() if isinstance(value, np.ndarray)}
    traces = []

    @jax.jit
    def step(losses: Any) -> jax.Array:
        traces.append(1)
        return duohead_jax.monolithic_loss(losses=losses, num_segments=5, **arrays).loss

    values = [float(step({"m": margin(gap=gap), "f": focal(gamma=gap)})) for gap in (0.1, 0.2, 2.0)]
    assert len(traces) == 1
    for gap, value in zip((0.1, 0.2, 2.0), values, strict=True):
        assert value == pytest.approx(run("torch eager", {"m": margin(gap=gap), "f": focal(gamma=gap)}, inputs).loss)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo warns of itself
def test_numbers_are_runtime_values_in_torch(inputs: dict[str, Any]) -> None:
    """In a user's own torch.compile: no graph break, and no recompilation when a number changes."""
    arrays = {key: torch.tensor(value) for key, value in inputs.items() if isinstance(value, np.ndarray)}
    logits = torch.nan_to_num(arrays.pop("logits")).requires_grad_()

    def step(x: torch.Tensor, gap: torch.Tensor) -> torch.Tensor:
        losses = {"m": margin(gap=gap), "s": smooth(rate=gap)}
        return duohead_torch.monolithic_loss(x, losses, num_segments=5, **arrays).loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for gap in (0.1, 0.9):
            value = compiled(logits, torch.tensor(gap, dtype=torch.float64))
            (gradient,) = torch.autograd.grad(value, logits)
            result = run("torch eager", {"m": margin(gap=gap), "s": smooth(rate=gap)}, inputs)
            assert float(value.detach()) == pytest.approx(result.loss, rel=1e-12)
            assert_close(gradient.numpy(), result.gradient, 1e-12)


# ------------------------------------------------------------------------------------------------------------ refusals


def unknown_operand(logprobs):  # type: ignore[no-untyped-def]
    return -logprobs, -1.0


def unknown_sum(reward_sum, logprob_sum):  # type: ignore[no-untyped-def]
    return reward_sum * logprob_sum


def of_a_sequence(logprob_sum):  # type: ignore[no-untyped-def]
    return logprob_sum


def of_nothing(advantages, gamma):  # type: ignore[no-untyped-def]
    return advantages * gamma


def too_few(logprob, entropy):  # type: ignore[no-untyped-def]
    return logprob * entropy, entropy


def too_many(logprob, advantages):  # type: ignore[no-untyped-def]
    return logprob * advantages, advantages, logprob


def nothing_back(logprob):  # type: ignore[no-untyped-def]
    exp(logprob)


def with_numpy(logprob):  # type: ignore[no-untyped-def]
    return np.exp(logprob)


def with_builtin(logprob):  # type: ignore[no-untyped-def]
    return max(logprob, 0.0)


def calls_builtin(logprob):  # type: ignore[no-untyped-def]
    return with_builtin(logprob)


def named_weight(logprob, weight=1.0):  # type: ignore[no-untyped-def]
    return logprob * weight, weight


def keyword_only(logprob, *, gamma=1.0):  # type: ignore[no-untyped-def]
    return logprob * gamma, gamma


def text_default(logprob, how="mean"):  # type: ignore[no-untyped-def]
    return logprob, 1.0


def of_entropy(entropy, rate=1.0):  # type: ignore[no-untyped-def]
    return rate * entropy, rate


def closing_over() -> Any:
    factor = 2.0

    def closed(logprob):  # type: ignore[no-untyped-def]
        return factor * logprob, factor

    return closed


@pytest.mark.parametrize(
    ("decorator", "function", "message"),
    [
        (token_loss, unknown_operand, "parameter 'logprobs' is no operand of a token; did you mean 'logprob'?"),
        (sequence_loss, unknown_sum, "parameter 'reward_sum' is no operand of a sequence; .*logprob_sum"),
        (token_loss, of_a_sequence, "'logprob_sum' is an operand of a sequence: use @sequence_loss"),
        (pair_loss, of_a_sequence, "'logprob_sum' is an operand of a sequence: use @sequence_loss"),
        (token_loss, of_nothing, "no parameter that depends on the logits"),
        (token_loss, too_few, "returns 2 values: it should return its value and 2 derivatives, .*logprob, entropy"),
        (token_loss, too_many, "returns 3 values: it should return its value and 1 derivatives, .*logprob"),
        (token_loss, nothing_back, "returns nothing"),
        (token_loss, with_numpy, "uses 'np', a module: a term may use exp, log, where"),
        (token_loss, with_builtin, "uses the builtin 'max'; use maximum"),
        (token_loss, calls_builtin, "calls_builtin: with_builtin uses the builtin 'max'"),
        (token_loss, named_weight, "'weight' has the name of something that every loss has"),
        (token_loss, keyword_only, "'gamma' must be a plain positional one"),
        (token_loss, text_default, "the default of 'how' must be a number"),
        (token_loss, closing_over(), "closes over .*factor"),
        (token_loss, lambda logprob: -logprob, "must be a plain function with a name"),
        (token_loss, 3.0, "must be a plain function"),
    ],
)
def test_refused_when_decorated(decorator: Any, function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        decorator(function)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: several(), "a: several needs this hyperparameter, a number; none was given"),
        (lambda: focal(gamma=-1.0), "gamma: must be a number >= 0, got -1.0"),
        (lambda: focal(gamma="2"), "gamma: must be a number >= 0, got '2'"),
        (lambda: focal(gama=2.0), "unexpected keyword argument 'gama'"),
        (lambda: skew(jsd_beta=1.0), "jsd_beta: must be a number > 0 and < 1"),
        (lambda: margin(reduction="sequence_mean_token_sum"), "reduction: got 'sequence_mean_token_sum'"),
        (lambda: smooth(reduction="sequence_mean_token_sum"), "reduction: got 'sequence_mean_token_sum'"),
        (
            lambda: HeadSpec.from_dict({"losses": {"f": {"type": "focal_of_tests", "gamm": 1}}}),
            "losses.f.gamm: unknown",
        ),
        (lambda: token_loss(register="focal_of_tests")(focal_by_autodiff.term.function), "registered already"),
        (lambda: token_loss(hyperparameters=GAMMA)(of_entropy), "hyperparameters: 'gamma' is no hyperparameter of it"),
        (lambda: token_loss(hyperparameters={"rate": 2.0})(of_entropy), r"'rate' must be duohead.fields.number\(...\)"),
        (lambda: token_loss(hyperparameters={"rate": GAMMA["gamma"]})(of_entropy), "'rate' has a default in the sign"),
    ],
)
def test_refused_when_made(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_refused_when_called(inputs: dict[str, Any]) -> None:
    def call(losses: Any, **changed: Any) -> None:
        run("torch eager", losses, {**inputs, **changed})

    with pytest.raises(
        ValueError, match=r"teacher_logits: loss 'it' \(skew\) needs the teacher 'teacher', given: none"
    ):
        call({"it": skew()}, teacher_logits=None)
    with pytest.raises(ValueError, match=r"advantages: loss 'it' \(several\) needs it"):
        call({"it": several(a=1.0)}, advantages=None)
    with pytest.raises(ValueError, match=r"preference_pairs: loss 'it' \(margin\) needs it"):
        call({"it": margin()}, preference_pairs=None)
    with pytest.raises(ValueError, match=r"segment_ids: loss 'it' \(smooth\) needs it"):
        call({"it": smooth()}, segment_ids=None)
    with pytest.raises(ValueError, match=r"labels: loss 'it' \(focal_of_tests\) needs them"):
        call({"it": focal()}, labels=None)


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_on_losses_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/custom_losses.md runs, in order, and its derivatives are the values' own."""
    text = (Path(__file__).parent.parent / "docs" / "custom_losses.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 5
    monkeypatch.setattr("duohead.loss.LOSS_TYPES", dict(LOSS_TYPES))  # what is registered here stays here
    page: dict[str, Any] = {"__name__": "custom_losses_page"}
    torch.manual_seed(0)
    exec("\n".join(blocks), page)
    assert np.isfinite(float(page["loss"].detach()))
    for name, operands in (("focal", (-0.7, 1.5)), ("margin", (-1.0, -1.4, 1.0)), ("margin", (-1.0, -3.0, 1.0))):
        term = page[name].term
        _, *slopes = term.bound["numpy"](*map(np.float64, operands))
        for position, slope in enumerate(slopes):
            moved = [list(map(np.float64, operands)) for _ in range(2)]
            moved[0][position] += 1e-6
            moved[1][position] -= 1e-6
            higher, lower = (term.bound["numpy"](*one)[0] for one in moved)
            assert slope == pytest.approx((higher - lower) / 2e-6, abs=1e-8)
