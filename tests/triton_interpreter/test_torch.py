"""The kernels' values and gradients from PyTorch, in Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from helpers import case_names, load_case, numbers, to_torch
from triton_interpreter.sets import SETS, check, oracle, random_inputs, rounded

from duohead import DPO, CrossEntropy, EntropyLoss, ZLoss
from duohead.spec import HeadSpec
from duohead_torch import monolithic_loss, monolithic_loss_and_grad

CASES = [name for name in case_names() if load_case(name)["dtype"] != "float64"]
LOSSES = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}


def run(head: Any, arrays: dict[str, Any], **more: Any) -> Any:
    """(loss, aux, gradient) through autograd."""
    arrays = dict(arrays)
    logits = arrays.pop("logits").requires_grad_()
    loss, aux = monolithic_loss(logits, head, implementation="triton", **arrays, **more)
    loss.backward()
    return loss.detach(), aux, logits.grad


def both(head: Any, arrays: dict[str, Any]) -> Any:
    """The same through autograd and without it: they must agree bit for bit."""
    loss, aux, gradient = run(head, arrays)
    rest = {key: value for key, value in arrays.items() if key != "logits"}
    logits = arrays["logits"].detach()
    before = logits.clone()
    (other, _), same = monolithic_loss_and_grad(logits, head, implementation="triton", **rest)
    torch.testing.assert_close(other, loss, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(same, gradient, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return loss, aux, gradient


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = load_case(name)
    loss, aux, gradient = both(HeadSpec.from_dict(case["head"]), to_torch(case["inputs"], case["dtype"]))
    expected, tolerance = case["expected"], {"rtol": case["rtol"], "atol": case["atol"]}
    np.testing.assert_allclose(loss, expected["loss"], **tolerance)
    for key, value in expected["losses"].items():
        np.testing.assert_allclose(aux.losses[key], value, err_msg=key, **tolerance)
    for key, value in expected["metrics"].items():
        np.testing.assert_allclose(aux.metrics[key], value, err_msg=key, **tolerance)
    np.testing.assert_allclose(gradient.double(), np.array(numbers(expected["logits_grad"])), **tolerance)


@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 600])
@pytest.mark.parametrize("name", SETS)
def test_against_the_oracle(name: str, vocab: int) -> None:
    dtype = {7: "float16", 257: "bfloat16"}.get(vocab, "float32")
    inputs = rounded(random_inputs(name, vocab, seed=vocab), dtype)
    loss, aux, gradient = both(HeadSpec.from_dict(SETS[name]), to_torch(inputs, dtype))
    check(dtype, oracle(name, inputs), loss, aux.losses, aux.metrics, gradient.double().numpy())


@pytest.mark.parametrize("name", ["smoothed", "entropy", "kd", "jsd"])
@pytest.mark.parametrize("empty", [slice(0, 300), slice(250, 600), slice(0, 600, 2)], ids=["first", "last", "even"])
def test_tiles_of_minus_infinity(name: str, empty: slice) -> None:
    inputs = random_inputs(name, 600)
    # Odd, and where columns are finite.
    inputs["labels"][[0, 1, 3, 4, 5]] = [1, 99, 249, 11, 241] if empty.start == 250 else [301, 399, 555, 311, 441]
    head = dict(SETS[name])
    if name == "entropy":
        head = {"losses": head["losses"]}  # a cap makes −∞ finite
    inputs["logits"][:, empty] = -np.inf
    for teacher in inputs.get("teacher_logits", {}).values():
        teacher[:, empty] = -np.inf
    from duohead.reference import reference

    rest = {key: value for key, value in inputs.items() if key != "logits"}
    wanted = reference(inputs["logits"], head, **rest)
    loss, aux, gradient = both(HeadSpec.from_dict(head), to_torch(inputs, "float32"))
    check("float32", wanted, loss, aux.losses, aux.metrics, gradient.double().numpy())
    assert not gradient[:, empty].any()


@pytest.mark.parametrize("name", ["ce_z", "grpo", "kd", "sequences"])
def test_upstream_and_second_backward(name: str) -> None:
    arrays = to_torch(rounded(random_inputs(name, 600), "bfloat16"), "bfloat16")
    head = HeadSpec.from_dict(SETS[name])
    _, _, once = run(head, arrays)
    logits = arrays.pop("logits").detach().requires_grad_()
    loss, _ = monolithic_loss(logits, head, implementation="triton", **arrays)
    (loss * 2.0).backward(retain_graph=True)
    twice, logits.grad = logits.grad, None
    # Powers of two scale exactly.
    assert torch.equal(twice, once * 2.0)
    loss.backward(retain_graph=True)
    assert torch.equal(logits.grad, once)
    assert logits.grad.data_ptr() != twice.data_ptr()
    _, scaled = monolithic_loss_and_grad(logits.detach(), head, implementation="triton", grad_scale=2.0, **arrays)
    assert torch.equal(scaled, twice)


@pytest.mark.parametrize("name", ["ce_z", "sequences"])
def test_accumulate_and_overwrite(name: str) -> None:
    arrays = to_torch(random_inputs(name, 600), "float32")
    head = HeadSpec.from_dict(SETS[name])
    logits = arrays.pop("logits")
    (_, gradient) = monolithic_loss_and_grad(logits, head, implementation="triton", **arrays)
    out = torch.full_like(logits, 3.0)
    _, same = monolithic_loss_and_grad(logits, head, implementation="triton", out=out, accumulate=True, **arrays)
    assert same is out
    torch.testing.assert_close(out, gradient + 3.0, rtol=0, atol=3e-7)
    x = logits.clone()
    _, same = monolithic_loss_and_grad(x, head, implementation="triton", out=x, **arrays)
    assert same is x
    assert torch.equal(x, gradient)
    base = logits.clone().requires_grad_()
    copy = base * 1.0
    loss, _ = monolithic_loss(copy, head, implementation="triton", overwrite_logits=True, **arrays)
    loss.backward(retain_graph=True)
    assert torch.equal(base.grad, gradient)
    assert torch.equal(copy.detach(), gradient)
    with pytest.raises(RuntimeError, match="overwrite_logits=True: the first backward"):
        loss.backward()


def test_value_only_writes_nothing_of_the_logits_size(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(4, 600), torch.tensor([1, 2, 599, 0])
    sizes: list[int] = []
    for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty"), (torch, "empty_like")):
        original = getattr(owner, name)

        def spy(*arguments: Any, original: Any = original, **keywords: Any) -> torch.Tensor:
            made = original(*arguments, **keywords)
            sizes.append(made.numel())
            return made

        monkeypatch.setattr(owner, name, spy)
    value, _ = monolithic_loss(logits, LOSSES, labels=labels, implementation="triton")
    assert sizes
    assert max(sizes) < logits.numel()
    (wanted, _), _ = monolithic_loss_and_grad(logits, LOSSES, labels=labels, implementation="triton")
    assert max(sizes) == logits.numel()
    assert torch.equal(value, wanted)


@pytest.mark.parametrize("name", ["ce_z", "smoothed", "grpo", "kd"])
def test_nan_is_visible_in_its_row_alone(name: str) -> None:
    arrays = to_torch(random_inputs(name, 600), "float32")
    arrays["logits"][0, 17] = float("nan")
    loss, _, gradient = run(HeadSpec.from_dict(SETS[name]), arrays)
    assert loss.isnan()
    assert gradient[0].isnan().all()
    assert torch.isfinite(gradient[1:]).all()


def test_a_label_past_the_vocabulary_is_nan() -> None:
    logits = torch.randn(3, 300)
    loss, _, gradient = run(LOSSES, {"logits": logits, "labels": torch.tensor([5, 300, -1])})
    assert loss.isnan()
    assert gradient[1].isnan().all()
    assert torch.isfinite(gradient[[0, 2]]).all()
    with pytest.raises(ValueError, match="labels: must be < 300"):
        run(LOSSES, {"logits": logits.detach(), "labels": torch.tensor([5, 300, -1])}, validate=True)


@pytest.mark.parametrize("size", [1, 255, 256, 300, 511])
def test_padding_and_masked_rows_get_zeros(size: int) -> None:
    logits = torch.randn(4, 900)
    logits[:, size:] = float("nan")
    logits[3] = float("nan")
    labels = torch.tensor([0, size - 1, size // 2, 0])
    mask = torch.tensor([True, True, True, False])
    arrays = {"logits": logits, "labels": labels, "mask": mask, "vocab_size": size}
    loss, _, gradient = run(LOSSES, arrays)
    (wanted, _), exact = monolithic_loss_and_grad(
        logits[:, :size].detach(), LOSSES, labels=labels, mask=mask, implementation="eager"
    )
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient[:, :size], exact, rtol=1e-5, atol=1e-7)
    assert not gradient[:, size:].any()
    assert not gradient[3].any()


def test_strides_and_leading_dimensions() -> None:
    wide = torch.randn(2, 3, 4, 300)
    labels = torch.randint(0, 300, (2, 3))
    for logits in (wide[:, :, 1], wide.transpose(1, 2)[:, 1], wide[..., :1, :].expand(2, 3, 4, 300)[:, :, 2]):
        x = logits.detach().requires_grad_()
        loss, _ = monolithic_loss(x, LOSSES, labels=labels, implementation="triton")
        loss.backward()
        (wanted, _), exact = monolithic_loss_and_grad(logits, LOSSES, labels=labels, implementation="eager")
        torch.testing.assert_close(loss.detach(), wanted)
        torch.testing.assert_close(x.grad, exact, rtol=1e-5, atol=1e-7)
    columns = torch.randn(300, 6).t()
    out = torch.empty(300, 6).t()
    label = torch.randint(0, 300, (6,))
    _, found = monolithic_loss_and_grad(columns, LOSSES, labels=label, implementation="triton", out=out)
    _, exact = monolithic_loss_and_grad(columns, LOSSES, labels=label, implementation="eager")
    assert found is out
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_nothing_valid(tokens: int) -> None:
    logits = torch.full((tokens, 300), float("nan"))
    labels = torch.full((tokens,), -100)
    loss, aux, gradient = run(LOSSES, {"logits": logits, "labels": labels}, metrics=("entropy", "num_tokens"))
    assert loss == 0
    assert aux.metrics["head/num_tokens"] == 0
    assert gradient.shape == (tokens, 300)
    assert not gradient.any()


def test_token_outputs_and_segment_advantages() -> None:
    from duohead import GRPO

    arrays = to_torch(random_inputs("grpo", 300), "float32")
    arrays["advantages"] = torch.tensor([0.5, -1.0])
    arrays |= {"num_segments": 2, "tokens": ("logprobs", "entropy", "lse")}
    losses = {"rl": GRPO()}
    _, aux, gradient = run(losses, arrays)
    arrays["logits"] = arrays["logits"].detach()
    logits = arrays.pop("logits")
    (_, wanted), exact = monolithic_loss_and_grad(logits, losses, implementation="eager", **arrays)
    for name, value in wanted.tokens.items():
        torch.testing.assert_close(aux.tokens[name], value, rtol=1e-5, atol=1e-5)
    for name, value in wanted.metrics.items():
        torch.testing.assert_close(aux.metrics[name], value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, exact, rtol=1e-5, atol=1e-7)


def test_a_weight_of_zero_adds_exactly_nothing() -> None:
    logits, labels = torch.randn(3, 300), torch.tensor([1, 2, 3])
    _, _, alone = run({"ce": CrossEntropy()}, {"logits": logits, "labels": labels})
    with_zero = {"ce": CrossEntropy(), "h": EntropyLoss(weight=0.0)}
    _, _, gradient = run(with_zero, {"logits": logits.detach(), "labels": labels})
    torch.testing.assert_close(gradient, alone, rtol=1e-6, atol=0)


def test_one_launch_or_two() -> None:
    from duohead.kernels import eligible
    from duohead_torch import triton_launch

    launched: list[str] = []
    original = triton_launch._Launcher.run

    def spy(self: Any, kind: str, *arguments: Any, **keywords: Any) -> None:
        launched.append(kind)
        original(self, kind, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_launch._Launcher, "run", spy)
        logits, labels = torch.randn(4, 300), torch.tensor([1, 2, 3, 4])
        run(LOSSES, {"logits": logits, "labels": labels})
        assert launched == ["fused", "write"]  # the second returns at once
        launched.clear()
        pairs = {"segment_ids": torch.tensor([0, 0, 1, 1]), "preference_pairs": torch.tensor([[0, 1]])}
        run({"dpo": DPO()}, {"logits": logits.detach(), "labels": labels, **pairs})
        assert launched == ["statistics", "write"]
    assert eligible.why_not({"dpo": DPO(), "ce": CrossEntropy()}) == {}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("losses", [LOSSES, {"dpo": DPO(), "ce": CrossEntropy()}], ids=["tokens", "sequences"])
def test_inside_torch_compile(losses: Any) -> None:
    logits, labels = torch.randn(4, 300, requires_grad=True), torch.tensor([1, 2, -1, 4])
    pairs = {"segment_ids": torch.tensor([0, 0, 1, 1]), "preference_pairs": torch.tensor([[0, 1]])}

    def step(x: torch.Tensor) -> torch.Tensor:
        return monolithic_loss(x * 2.0, losses, labels=labels, implementation="triton", **pairs).loss * 3.0

    loss = step(logits)
    loss.backward()
    wanted, logits.grad = logits.grad, None
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(logits)
    found.backward()
    assert torch.equal(found, loss)
    torch.testing.assert_close(logits.grad, wanted, rtol=1e-6, atol=1e-9)


def test_what_cannot_go_is_refused() -> None:
    with pytest.raises(RuntimeError, match="float64 logits: the kernel computes in float32"):
        run(LOSSES, {"logits": torch.randn(1, 5, dtype=torch.float64), "labels": torch.tensor([1])})


@pytest.mark.parametrize("name", ["smoothed", "kd", "jsd"])
@pytest.mark.parametrize("cuts", [(0, 300, 600), (0, 3, 259, 600)], ids=["two", "three"])
def test_vocabulary_shards(name: str, cuts: tuple[int, ...]) -> None:
    """Statistics of shards merge to those of the whole, and each shard writes its own columns of the gradient."""
    from duohead.kernels import layout
    from duohead.statistics import Columns, Inputs, add_jsd, finish, fold, merge
    from duohead_torch import namespace, triton
    from duohead_torch.runner import Job, Setting, Written

    arrays = to_torch(random_inputs(name, 600), "float32")
    head = HeadSpec.from_dict(SETS[name])
    logits = arrays.pop("logits")
    size = 590  # the last shard ends in padding
    rest = {**arrays, "vocab_size": size, "implementation": "eager"}
    arrays["labels"][3] = 589
    _, wanted = monolithic_loss_and_grad(logits, head, **rest)
    plan, hyper = _plan_and_hyper(logits, head, {**arrays, "vocab_size": size})
    valid = arrays["labels"] >= 0
    teachers = tuple(arrays.get("teacher_logits", {})[model] for model in plan.teacher_names)
    ends = itertools.pairwise(cuts)
    shards = [
        (
            logits[:, a:b],
            Inputs(arrays["labels"], valid, tuple(teacher[:, a:b] for teacher in teachers), (), None, None, 6),
            Columns(a, size, True),
        )
        for a, b in ends
    ]
    sweeps, xp = triton.TritonSweeps(), namespace
    packed = torch.stack([torch.stack(sweeps.read(xp, plan, hyper, *shard)) for shard in shards])
    starts, stops = torch.tensor(cuts[:-1]), torch.tensor(cuts[1:])
    rows = merge(xp, plan, packed, arrays["labels"], starts, stops)
    statistics, normalisers = finish(xp, plan, rows, shards[0][1], shards[0][2])
    if plan.has_jsd:
        second = [torch.stack(sweeps.read_jsd(xp, plan, hyper, *shard, normalisers)) for shard in shards]
        add_jsd(plan, list(sum(second)), statistics)
    from duohead.seam import seam

    found = seam(xp, plan, hyper, statistics, shards[0][1])
    coefficients = fold(xp, plan, hyper, statistics, found.cotangents, shards[0][2])
    kept = layout.saved_rows(triton.facts_of(plan).saved, normalisers, coefficients)
    saved = torch.stack([row + torch.zeros(6) for row in kept])
    parts = []
    for part, inputs, columns in shards:
        written = Written(Job(plan, hyper, inputs), (), triton.Saved(torch.stack(list(hyper)), saved))
        setting = Setting(columns, None, True, False)
        parts.append(triton.TritonRunner().gradient((written,), setting, part, torch.ones(())))
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=2e-5, atol=3e-7)


class _Shards:
    """Stands for a group of two ranks: gives what both have read."""

    sequence_ranks = 1

    def __init__(self, rows: torch.Tensor, cut: int) -> None:
        self.rows, self.cut = rows, cut

    def gather(self, xp: Any, rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.rows, torch.tensor([0, self.cut]), torch.tensor([self.cut, 600])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["sequences", "smoothed", "kd"])
def test_merged_shards_as_one_graph(name: str) -> None:
    """What a GPU compiles between the shards' read and the terms: the same rows as those of an unsharded read."""
    from duohead.statistics import Columns, Inputs
    from duohead_torch import namespace, triton, triton_launch
    from duohead_torch.runner import Job, Setting

    arrays = to_torch(random_inputs(name, 600), "float32")
    head = HeadSpec.from_dict(SETS[name])
    logits = arrays.pop("logits")
    plan, hyper = _plan_and_hyper(logits, head, arrays)
    valid = arrays["labels"] >= 0
    teachers = tuple(arrays.get("teacher_logits", {})[model] for model in plan.teacher_names)

    def shard(begin: int, end: int) -> Any:
        given = Inputs(arrays["labels"], valid, tuple(t[:, begin:end] for t in teachers), (), None, None, 6)
        return logits[:, begin:end], given, Columns(begin, 600, False)

    parts = [shard(0, 256), shard(256, 600)]
    rows = [torch.stack(triton.TritonSweeps().read(namespace, plan, hyper, *part)) for part in parts]
    x, inputs, columns = parts[0]
    job, setting = Job(plan, hyper, inputs), Setting(columns, _Shards(torch.stack(rows), 256), True, False)
    expected = triton._statistics_of_shards(job, setting, x)
    found = triton._program(triton._statistics_of_shards, plan, setting)(x, hyper, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    call = triton_launch.make_call(plan, torch.stack(list(hyper)), logits, shard(0, 600)[1], Columns(0, 600, False))
    from duohead.kernels import build

    whole = torch.empty_like(expected)
    triton_launch._Launcher(call).run(
        "statistics", build.read(plan, triton_launch._flags(call, gradient=False)), rows=whole
    )
    torch.testing.assert_close(whole[:, valid], expected[:, valid], rtol=1e-5, atol=1e-5)


def _plan_and_hyper(logits: torch.Tensor, head: HeadSpec, arrays: dict[str, Any]) -> Any:
    """The plan of a call and its hyperparameters, as the adapter makes them."""
    from duohead_torch import api

    made: list[Any] = []
    original = api.pick_runner

    def spy(implementation: str, logits: torch.Tensor, jobs: Any) -> Any:
        made.extend(jobs)
        return original(implementation, logits, jobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "pick_runner", spy)
        monolithic_loss(logits, head, implementation="eager", **arrays)
    return made[0].plan, made[0].hyper
