"""One rank of the shard tests: runs every check of its group size and writes what failed.

``python tests/shards_torch.py RANK RANKS RENDEZVOUS RESULTS`` is started once per rank by ``test_shards_torch.py``.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers import case_names, load_case, to_torch
from shards_inputs import (
    SEGMENTS,
    VOCAB,
    all_losses,
    even_bounds,
    jsd_losses,
    random_inputs,
    random_losses,
    uneven_bounds,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import duohead_torch.vocab_parallel as vocab_parallel
from duohead import CrossEntropy, HeadSpec, ZLoss
from duohead_torch import (
    combine_metrics,
    global_counts,
    monolithic_loss,
    monolithic_loss_and_grad,
    token_statistics,
)

TOLERANCES = {"float32": 1e-6, "float64": 1e-13, "bfloat16": 1e-6}
#: one unit in the last place
ULP = {"float32": 0.0, "float64": 0.0, "bfloat16": 2.0**-7}
LAYOUTS = ("short", "padded", "uneven")


class Rank:
    """This process among the ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.group = dist.group.WORLD

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found


class Split:
    """A rank's part of an array's columns, and the arguments that say so."""

    def __init__(self, env: Rank, layout: str, vocab: int, size: int, seed: int = 0) -> None:
        self.layout, self.vocab = layout, vocab
        bounds = uneven_bounds(vocab, env.ranks, seed) if layout == "uneven" else even_bounds(vocab, env.ranks)
        self.begin, self.end = bounds[env.rank]
        self.width = -(-vocab // env.ranks) if layout == "padded" else self.end - self.begin
        self.arguments: dict[str, Any] = {"vocab_group": env.group, "vocab_size": size}
        # Where the last shard is short and padded at once, no rule could tell where it begins.
        if layout == "uneven" or (layout == "short" and size < vocab):
            self.arguments["vocab_start"] = self.begin

    def take(self, array: torch.Tensor) -> torch.Tensor:
        """The rank's columns; padding columns hold NaN, which nothing may see."""
        part = array[..., self.begin : self.end]
        missing = self.width - part.shape[-1]
        return torch.cat([part, part.new_full((*part.shape[:-1], missing), math.nan)], -1).clone()

    def whole(self, env: Rank, gradient: torch.Tensor) -> torch.Tensor:
        """All ranks' gradients as one; padding columns must have none."""
        pieces = sorted(env.gather((self.begin, self.end, gradient)), key=lambda piece: piece[:2])
        for begin, end, piece in pieces:
            assert not piece[..., end - begin :].any(), f"padding past column {end} has a gradient"
        return torch.cat([piece[..., : end - begin] for begin, end, piece in pieces], -1)


def compare(
    name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, ulp: float = 0.0, least: float = 1.0
) -> None:
    """Equal infinities and NaN; else within the tolerance, relative to the largest expected value or ``least``."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape, f"{name}: {found.shape} is not {expected.shape}"
    finite = torch.isfinite(expected)
    same = torch.equal(torch.nan_to_num(found[~finite]), torch.nan_to_num(expected[~finite]))
    assert same, f"{name}: got {found[~finite]}, expected {expected[~finite]}"
    scale = torch.clamp(expected[finite].abs().max(), min=least) if finite.any() else least
    wrong = (found[finite] - expected[finite]).abs() - ulp * expected[finite].abs()
    worst = float(wrong.max()) if wrong.numel() else 0.0
    assert worst <= tolerance * float(scale), f"{name}: off by {worst:.3g} at a scale of {float(scale):.3g}"


def compare_results(found: Any, expected: Any, tolerance: float) -> None:
    compare("loss", found.loss, expected.loss, tolerance)
    for kind in ("losses", "metrics", "tokens"):
        items, wanted = getattr(found.aux, kind), getattr(expected.aux, kind)
        assert items.keys() == wanted.keys(), f"{kind}: {sorted(items)} are not {sorted(wanted)}"
        for name, value in wanted.items():
            if name.endswith("perplexity"):  # exp multiplies an error by its argument: the mean itself is compared
                compare(name, items[name].log(), value.log(), tolerance)
            elif name.endswith("/margin"):  # a difference has the rounding of what it subtracts
                sides = [wanted[name.replace("margin", f"rewards_{side}")] for side in ("chosen", "rejected")]
                compare(name, items[name], value, tolerance, least=max(1.0, *(abs(float(side)) for side in sides)))
            else:
                compare(name, items[name], value, tolerance)


def same_bits(env: Rank, result: Any) -> None:
    """Every scalar is the same on all ranks, bit for bit."""
    scalars = {"loss": result.loss, **result.aux.losses, **result.aux.metrics}
    bits = {name: value.detach().numpy().tobytes() for name, value in scalars.items()}
    for other in env.gather(bits):
        assert other == bits, f"other bits: {[name for name in bits if bits[name] != other[name]]}"


def against_unsharded(
    env: Rank, losses: Any, inputs: dict[str, Any], dtype: str, layout: str, seed: int = 0, **arguments: Any
) -> None:
    """Loss, metrics, token outputs and gathered gradient of a sharded call against those of the whole call."""
    inputs = dict(to_torch(inputs, dtype))
    logits, teachers = inputs.pop("logits"), inputs.pop("teacher_logits", None)
    size = inputs.pop("vocab_size", logits.shape[-1])
    arguments = {"implementation": "eager", **arguments}
    whole = logits.clone().requires_grad_()
    expected = monolithic_loss(whole, losses, teacher_logits=teachers, vocab_size=size, **inputs, **arguments)
    expected.loss.backward()
    split = Split(env, layout, logits.shape[-1], size, seed)
    shard = split.take(logits).requires_grad_()
    parts = None if teachers is None else {name: split.take(teacher) for name, teacher in teachers.items()}
    found = monolithic_loss(shard, losses, teacher_logits=parts, **split.arguments, **inputs, **arguments)
    found.loss.backward()
    compare_results(found, expected, TOLERANCES[dtype])
    compare("gradient", split.whole(env, shard.grad), whole.grad, TOLERANCES[dtype], ULP[dtype])
    same_bits(env, found)


# --- checks: name → function --------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Rank], None]] = {}


def check(*ranks: int) -> Callable[[Callable[[Rank], None]], Callable[[Rank], None]]:
    """Registers a check, for some numbers of ranks only where given."""

    def register(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
        function.ranks = ranks  # type: ignore[attr-defined]
        CHECKS[function.__name__] = function
        return function

    return register


def _collect(runs: Iterator[tuple[str, Callable[[], None]]]) -> None:
    """Runs all and raises one error that lists those that failed."""
    failed = []
    for name, run in runs:
        try:
            run()
        except (AssertionError, ValueError, TypeError) as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def _cases(env: Rank, dtype: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for seed, name in enumerate(case_names()):
        case = load_case(name)
        spec = HeadSpec.from_dict(case["head"])
        for layout in LAYOUTS:

            def run(layout: str = layout, case: Any = case, spec: Any = spec, seed: int = seed) -> None:
                against_unsharded(env, spec, case["inputs"], dtype, layout, seed)

            yield f"{name}, {layout}", run


@check()
def cases_float32(env: Rank) -> None:
    _collect(_cases(env, "float32"))


@check()
def cases_float64(env: Rank) -> None:
    _collect(_cases(env, "float64"))


@check()
def cases_bfloat16(env: Rank) -> None:
    _collect(_cases(env, "bfloat16"))


@check()
def random_sets(env: Rank) -> None:
    def runs() -> Iterator[tuple[str, Callable[[], None]]]:
        for seed in range(24):
            dtype = ("float32", "float64", "bfloat16")[seed % 3]
            layout = LAYOUTS[seed // 3 % 3]
            extra = ({}, {"final_logit_softcap": 5.0}, {"logits_scale_factor": 0.5}, {"implementation": "per_loss"})
            losses, chosen = random_losses(seed), extra[seed % 4]
            yield (
                f"seed {seed}: {', '.join(losses)}, {layout}, {dtype}, {chosen}",
                lambda losses=losses, seed=seed, dtype=dtype, layout=layout, chosen=chosen: against_unsharded(
                    env, losses, random_inputs(seed), dtype, layout, seed, **chosen
                ),
            )

    _collect(runs())


@check()
def every_loss_at_once(env: Rank) -> None:
    for dtype in TOLERANCES:
        for layout in LAYOUTS:
            against_unsharded(env, {**all_losses(), **jsd_losses()}, random_inputs(99), dtype, layout, 5)


@check()
def label_on_every_shard(env: Rank) -> None:
    """Rank r's weight gradient through the user's own matmul, the label on each column in turn."""
    r = np.random.default_rng(1)
    hidden = torch.tensor(r.normal(size=(1, 4)))
    weight = torch.tensor(r.normal(size=(4, VOCAB)))
    losses = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}
    split = Split(env, "short", VOCAB, VOCAB)
    for column in range(VOCAB):
        labels = torch.tensor([column])
        whole, input = weight.clone().requires_grad_(), hidden.clone().requires_grad_()
        expected = monolithic_loss(input @ whole, losses, labels=labels, implementation="eager").loss
        expected.backward()
        shard, own = split.take(weight).requires_grad_(), hidden.clone().requires_grad_()
        found = monolithic_loss(own @ shard, losses, labels=labels, implementation="eager", **split.arguments).loss
        (3.0 * found).backward()
        compare("loss", found, expected, 1e-13)
        compare("weight", shard.grad, 3.0 * split.take(whole.grad), 1e-13)
        # The input is the same on all ranks and gets a part of its gradient from each.
        total = own.grad.clone()
        dist.all_reduce(total)
        compare("input", total, 3.0 * input.grad, 1e-13)


@check()
def equal_shards_need_no_size(env: Rank) -> None:
    whole = torch.tensor(np.random.default_rng(3).normal(size=(5, 2 * env.ranks)))
    labels = torch.tensor([0, 1, 2, 3, -100])
    expected = monolithic_loss(whole, labels=labels, implementation="eager").loss
    shard = whole[:, 2 * env.rank : 2 * env.rank + 2]
    found = monolithic_loss(shard, labels=labels, implementation="eager", vocab_group=env.group).loss
    compare("loss", found, expected, 1e-13)


@check()
def equal_padded_shards(env: Rank) -> None:
    """Shards wider than ceil(vocab_size / ranks), as where the vocabulary is padded to a round number."""
    width, size = 8, 8 * env.ranks - 5
    whole = torch.tensor(np.random.default_rng(4).normal(size=(5, width * env.ranks)))
    labels = torch.tensor([0, 7, size - 1, 9, 8])
    expected = monolithic_loss(whole, labels=labels, implementation="eager", vocab_size=size).loss
    shard = whole[:, width * env.rank : width * (env.rank + 1)]
    found = monolithic_loss(shard, labels=labels, implementation="eager", vocab_group=env.group, vocab_size=size).loss
    compare("loss", found, expected, 1e-13)


@check()
def loss_and_grad(env: Rank) -> None:
    inputs = to_torch(random_inputs(7), "float32")
    logits, teacher = inputs.pop("logits"), inputs.pop("teacher_logits")["teacher"]
    losses, scale = all_losses(), 8.0
    expected = monolithic_loss_and_grad(
        logits, losses, teacher_logits=teacher, grad_scale=scale, implementation="eager", **inputs
    )
    split = Split(env, "short", VOCAB, VOCAB)
    shard = split.take(logits)
    arguments = {"teacher_logits": split.take(teacher), "implementation": "eager", **inputs, **split.arguments}
    found = monolithic_loss_and_grad(shard, losses, grad_scale=scale, **arguments)
    compare_results(found.result, expected.result, 1e-6)
    compare("gradient", split.whole(env, found.logits_grad), expected.logits_grad, 1e-6)
    out = torch.ones_like(shard)
    monolithic_loss_and_grad(shard, losses, grad_scale=scale, out=out, accumulate=True, **arguments)
    compare("accumulated", out, found.logits_grad + 1.0, 1e-6)
    again = monolithic_loss_and_grad(shard, losses, grad_scale=scale, out=shard, **arguments)
    assert again.logits_grad.data_ptr() == shard.data_ptr()
    compare("in place", shard, found.logits_grad, 0.0)


@check()
def statistics(env: Rank) -> None:
    names = ("logprob", "lse", "entropy", "mean_logprob", "teacher_cross_entropy", "forward_kl", "reverse_kl", "jsd")
    inputs = to_torch(random_inputs(8), "float64")
    logits, teacher = inputs["logits"], inputs["teacher_logits"]["teacher"]
    split = Split(env, "uneven", VOCAB, VOCAB, seed=2)
    weights = torch.tensor(np.random.default_rng(2).normal(size=(len(names), *logits.shape[:-1])))
    gradients, values = [], []
    for array, other, arguments in (
        (logits.clone(), teacher, {}),
        (split.take(logits), split.take(teacher), split.arguments),
    ):
        array.requires_grad_()
        found = token_statistics(
            array, inputs["labels"], mask=inputs["mask"], statistics=names, teacher_logits=other, **arguments
        )
        sum((weight * value).nan_to_num().sum() for weight, value in zip(weights, found, strict=True)).backward()
        gradients.append(array.grad)
        values.append(found)
    for name, value, expected in zip(names, values[1], values[0], strict=True):
        compare(name, value, expected, 1e-13)
    compare("gradient", split.whole(env, gradients[1]), gradients[0], 1e-13)


class _Collectives(TorchDispatchMode):
    """Counts collectives and the numbers that each rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in function._opname:
            self.names.append(function._opname)
            self.numbers += args[0].numel()
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(names: list[str]) -> Iterator[_Collectives]:
    """Fails unless exactly these collectives run inside."""
    mode = _Collectives()
    with mode:
        yield mode
    assert mode.names == names, f"collectives: {mode.names}, expected {names}"


@check()
def one_collective(env: Rank) -> None:
    inputs = to_torch(random_inputs(9), "float32")
    split = Split(env, "short", VOCAB, VOCAB)
    logits = split.take(inputs.pop("logits"))
    teacher = split.take(inputs.pop("teacher_logits")["teacher"])
    arguments = {"teacher_logits": teacher, "implementation": "eager", **inputs, **split.arguments}
    gather = "all_gather_into_tensor"
    tokens = logits[..., 0].numel()
    for losses, rows, expected in (
        ({"ce": CrossEntropy()}, 4, [gather]),  # entropy for the metrics
        ({"ce": CrossEntropy(), "z": ZLoss()}, 4, [gather]),
        (all_losses(), None, [gather]),
        (jsd_losses(), None, [gather, gather]),
        ({**all_losses(), **jsd_losses()}, None, [gather, gather]),
    ):
        leaf = logits.clone().requires_grad_()
        with counted(expected) as mode:
            loss, _ = monolithic_loss(leaf, losses, **arguments)
        assert rows is None or mode.numbers == rows * tokens + 10, f"{mode.numbers} numbers for {rows} rows"
        with counted([]):
            loss.backward()
    with counted([gather]):
        monolithic_loss_and_grad(logits, all_losses(), **arguments)
    leaf = logits.clone().requires_grad_()
    with counted([gather]):
        found = token_statistics(leaf, inputs["labels"], **split.arguments)
    with counted([]):
        found.entropy.sum().backward()
    with counted([gather] * len(all_losses())):
        monolithic_loss(logits, all_losses(), **{**arguments, "implementation": "per_loss"})


# --- DTensor ------------------------------------------------------------------------------------------------


def _dtensor_call(logits: Any, teacher: Any, labels: Any, **arguments: Any) -> Any:
    losses = {name: all_losses()[name] for name in ("ce", "z", "h", "forward", "reverse")}
    return monolithic_loss(
        logits,
        losses,
        labels=labels,
        teacher_logits=teacher,
        implementation="eager",
        metrics=("accuracy",),
        **arguments,
    )


@check()
def dtensor(env: Rank) -> None:
    """Logits and teacher as DTensors, VOCAB columns over the ranks (chunks of 6 and 5, 4 4 3, 3 3 3 2)."""
    mesh = init_device_mesh("cpu", (env.ranks,))
    inputs = to_torch(random_inputs(11), "float64")
    logits, teacher, labels = inputs["logits"].nan_to_num(), inputs["teacher_logits"]["teacher"], inputs["labels"]
    for vocab in (VOCAB, env.ranks + 1, 2):  # the last two with short and empty shards
        whole = logits[..., :vocab].clone().requires_grad_()
        own = torch.where(labels < vocab, labels, -100)
        expected = _dtensor_call(whole, teacher[..., :vocab], own)
        expected.loss.backward()
        shard = distribute_tensor(logits[..., :vocab], mesh, [Shard(-1)]).requires_grad_()
        other = distribute_tensor(teacher[..., :vocab], mesh, [Shard(2)])
        found = _dtensor_call(shard, other, own)
        found.loss.backward()
        compare_results(found, expected, 1e-13)
        assert isinstance(shard.grad, DTensor)
        assert shard.grad.placements == shard.placements
        compare("gradient", shard.grad.full_tensor(), whole.grad, 1e-13)
        local = _dtensor_call(shard, other.to_local(), own)  # a teacher's own shard is taken as well
        compare("local teacher", local.loss, expected.loss, 1e-13)
        (_, _), gradient = monolithic_loss_and_grad(shard, labels=own, implementation="eager")
        (_, _), reference = monolithic_loss_and_grad(whole.detach(), labels=own, implementation="eager")
        assert gradient.placements == shard.placements
        assert gradient.shape == shard.shape
        compare("loss_and_grad", gradient.full_tensor(), reference, 1e-13)
    with_size = logits.clone().detach()
    padded = torch.cat([with_size, torch.full_like(with_size, 7.0)], -1)
    reference = monolithic_loss(with_size, labels=labels, implementation="eager").loss
    shard = distribute_tensor(padded, mesh, [Shard(-1)])
    found = monolithic_loss(shard, labels=labels, vocab_size=VOCAB, implementation="eager").loss
    compare("padded", found, reference, 1e-13)
    found = token_statistics(shard, labels, vocab_size=VOCAB)
    compare("statistics", found.entropy, token_statistics(with_size, labels).entropy, 1e-13)


@check()
def dtensor_through_matmul(env: Rank) -> None:
    """The head's weight as a DTensor: its gradient is one, right on every rank."""
    mesh = init_device_mesh("cpu", (env.ranks,))
    r = np.random.default_rng(12)
    hidden, weight = torch.tensor(r.normal(size=(6, 4))), torch.tensor(r.normal(size=(4, VOCAB)))
    labels = torch.tensor([0, 10, 5, -100, 3, 7])
    whole = weight.clone().requires_grad_()
    input = hidden.clone().requires_grad_()
    monolithic_loss(input @ whole, labels=labels, implementation="eager").loss.backward()
    split = distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
    replicated = distribute_tensor(hidden, mesh, [Replicate()]).requires_grad_()
    monolithic_loss(replicated @ split, labels=labels, implementation="eager").loss.backward()
    compare("weight", split.grad.full_tensor(), whole.grad, 1e-13)
    compare("input", replicated.grad.full_tensor(), input.grad, 1e-13)


@check(4)
def dtensor_mesh_of_two(env: Rank) -> None:
    """Data-parallel × vocabulary: the data-parallel dimension is left alone, counts make the losses add up."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    r = np.random.default_rng(13)
    hidden, weight = torch.tensor(r.normal(size=(6, 4))), torch.tensor(r.normal(size=(4, VOCAB)))
    labels = torch.tensor([0, 10, 5, -100, 3, 7])
    whole = weight.clone().requires_grad_()
    expected = monolithic_loss(hidden @ whole, labels=labels, implementation="eager", metrics=("perplexity",))
    expected.loss.backward()
    split = distribute_tensor(weight, mesh, [Replicate(), Shard(1)]).requires_grad_()
    tokens = distribute_tensor(hidden, mesh, [Shard(0), Replicate()])
    own_labels = distribute_tensor(labels, mesh, [Shard(0), Replicate()])
    counts = global_counts(own_labels.to_local(), group=mesh.get_group("dp"))
    logits = tokens @ split
    found = monolithic_loss(logits, labels=own_labels, implementation="eager", metrics=("perplexity",), **counts)
    found.loss.backward()
    total = found.loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    compare("loss", total, expected.loss, 1e-13)
    compare("weight", split.grad.full_tensor(), whole.grad, 1e-13)
    combined = combine_metrics(found.aux.parts, (mesh, "dp"))
    compare("perplexity", combined["head/perplexity"], expected.aux.metrics["head/perplexity"], 1e-13)
    assert logits.placements == (Shard(0), Shard(1))


@check(2)
def dtensor_refusals(env: Rank) -> None:
    mesh = init_device_mesh("cpu", (env.ranks,))
    labels = torch.tensor([0, 1])
    logits = distribute_tensor(torch.zeros(2, 8), mesh, [Shard(1)])
    refuses("leave them out", lambda: monolithic_loss(logits, labels=labels, vocab_group=env.group))
    other = distribute_tensor(torch.zeros(2, 8), mesh, [Shard(0)])
    losses = {"kd": all_losses()["forward"]}
    refuses("split as the logits are", lambda: monolithic_loss(logits, losses, teacher_logits=other))
    partial = DTensor.from_local(torch.zeros(2, 8), mesh, [dist.tensor.Partial()], run_check=False)
    refuses("partial placement", lambda: monolithic_loss(partial, labels=labels))
    refuses("at most", lambda: monolithic_loss(logits, labels=labels, vocab_size=9))


# --- sequences split as well --------------------------------------------------------------------------------

SEQUENCE = ("ce", "z", "rl", "cispo", "seq", "dpo", "orpo", "simpo", "kto")


def _sequence_run(env: Rank, losses: Any, position: int, parts: int, split: Split, sequence_group: Any) -> None:
    """Tokens over one group and perhaps columns over another: losses add up, gradients are the whole's."""
    inputs = to_torch(random_inputs(21), "float64")
    whole = inputs.pop("logits").requires_grad_()
    inputs.pop("teacher_logits")
    expected = monolithic_loss(whole, losses, implementation="eager", **inputs)
    expected.loss.backward()
    columns = whole.shape[1] // parts
    own = slice(position * columns, (position + 1) * columns)
    for name in ("labels", "mask", "segment_ids", "advantages", "old_logprobs", "ref_logprobs"):
        inputs[name] = inputs[name][:, own]
    shard = split.take(whole.detach()[:, own]).requires_grad_()
    needs_sums = any(not isinstance(loss, (CrossEntropy, ZLoss)) for loss in losses.values())
    names = ["all_gather_into_tensor"] if split.width != VOCAB else []
    with counted([*names, "all_reduce"]):
        found = monolithic_loss(
            shard, losses, implementation="eager", sequence_group=sequence_group, **split.arguments, **inputs
        )
    with counted([]):
        found.loss.backward()
    total = found.loss.detach().clone()
    dist.all_reduce(total, group=sequence_group)
    compare("loss", total, expected.loss, 1e-13)
    compare("gradient", shard.grad[..., : split.end - split.begin], split.take(whole.grad[:, own]), 1e-13)
    metrics = combine_metrics(found.aux.parts, sequence_group)
    assert metrics.keys() == expected.aux.metrics.keys()
    for name, value in expected.aux.metrics.items():
        compare(name, metrics[name], value, 1e-12)
    counts = global_counts(
        inputs["labels"],
        inputs["mask"],
        inputs["segment_ids"],
        inputs["preference_pairs"],
        sequence_group=sequence_group,
        num_segments=SEGMENTS,
    )
    given = monolithic_loss(
        shard, losses, implementation="eager", sequence_group=sequence_group, **split.arguments, **inputs, **counts
    )
    compare("given counts", given.loss, found.loss, 1e-13 if needs_sums else 1e-12)


def _unsplit() -> Split:
    split = Split.__new__(Split)
    split.begin, split.end, split.width, split.vocab, split.arguments = 0, VOCAB, VOCAB, VOCAB, {}
    return split


@check(2, 4)
def sequences_split(env: Rank) -> None:
    losses = all_losses()
    for names in (SEQUENCE, ("ce", "z"), ("ce", "rl")):
        chosen = {name: losses[name] for name in names}
        _sequence_run(env, chosen, env.rank, env.ranks, _unsplit(), env.group)


@check(4)
def sequences_and_vocabulary_split(env: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "vocab"))
    inner = Rank(mesh.get_local_rank("vocab"), 2)
    inner.group = mesh.get_group("vocab")
    losses = {name: all_losses()[name] for name in SEQUENCE}
    split = Split(inner, "short", VOCAB, VOCAB)
    _sequence_run(env, losses, mesh.get_local_rank("sequence"), 2, split, mesh.get_group("sequence"))
    # A label out of range on one rank is an error on all four.
    inputs = to_torch(random_inputs(22), "float64")
    inputs.pop("teacher_logits")
    logits = split.take(inputs.pop("logits"))
    if env.rank == 3:
        inputs["labels"] = torch.full_like(inputs["labels"], VOCAB)
        inputs["mask"] = None
    message = refuses(
        "labels",
        lambda: monolithic_loss(
            logits,
            losses,
            implementation="eager",
            **split.arguments,
            **inputs,
            sequence_group=mesh.get_group("sequence"),
        ),
    )
    assert ("another rank" in message) == (env.rank in (0, 1)), message


# --- errors on every rank -----------------------------------------------------------------------------------


def refuses(words: str, run: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    try:
        run()
    except kind as error:
        message = str(error)
    else:
        raise AssertionError(f"nothing was raised, expected {words!r}")
    assert words in message, f"expected {words!r} in {message}"
    return message


@check()
def errors_on_every_rank(env: Rank) -> None:
    split = Split(env, "short", VOCAB, VOCAB)
    logits = split.take(torch.zeros(3, VOCAB))
    labels = torch.tensor([0, 1, 2])
    last = env.ranks - 1

    def call(labels: Any = labels, **arguments: Any) -> Any:
        return monolithic_loss(logits, labels=labels, implementation="eager", **{**split.arguments, **arguments})

    runs = {
        "hold each of the 14 columns once": lambda: call(vocab_size=14),
        "hold each of the 9 columns once": lambda: call(vocab_size=9, vocab_start=split.begin + (env.rank == 0)),
        "disagree about the size": lambda: call(vocab_size=VOCAB + (env.rank == last)),
        f"got 40 (rank {last} of": lambda: call(labels + 38 * (env.rank == last)),
        "hold each of the 11 columns once": lambda: call(vocab_start=0),
    }
    for words, run in runs.items():
        messages = env.gather(refuses(words, run))
        assert len(set(messages)) == 1, messages
    segments = {"segment_ids": torch.tensor([0, 0, 5 if env.rank == 0 else 1]), "num_segments": 3}
    messages = env.gather(refuses("segment_ids", lambda: call(**segments)))
    assert len(set(messages)) == 1, messages
    if env.ranks == 2:  # without a vocabulary group, over sequences
        arguments = {
            "implementation": "eager", "advantages": torch.zeros(3), "sequence_group": env.group, "num_segments": 3,
            "old_logprobs": torch.zeros(3), "segment_ids": torch.tensor([0, 0, 5 if env.rank == 0 else 1]),
        }  # fmt: skip
        losses = {"seq": all_losses()["seq"]}
        refuses("segment_ids", lambda: monolithic_loss(torch.zeros(3, 4), losses, labels=labels, **arguments))
    # A label in the padding of the last shard is out of range as well.
    refuses("labels: must be < 11", lambda: call(torch.tensor([0, 1, 11])))


@check()
def wrong_groups(env: Rank) -> None:
    logits, labels = torch.zeros(1, 4), torch.tensor([0])
    refuses("must be a ProcessGroup", lambda: monolithic_loss(logits, labels=labels, vocab_group=3.0), TypeError)
    refuses("needs vocab_group", lambda: monolithic_loss(logits, labels=labels, vocab_start=1))
    refuses("at least 0", lambda: monolithic_loss(logits, labels=labels, vocab_group=env.group, vocab_start=-1))
    small = dist.new_group([0])
    if env.rank == 0:  # a group of one splits nothing
        monolithic_loss(logits, labels=labels, vocab_group=small, implementation="eager")
    else:
        refuses("not a member", lambda: monolithic_loss(logits, labels=labels, vocab_group=small))


@check()
def groups_by_any_name(env: Rank) -> None:
    mesh = init_device_mesh("cpu", (env.ranks,), mesh_dim_names=("tp",))
    whole = torch.tensor(np.random.default_rng(5).normal(size=(4, 2 * env.ranks)))
    labels = torch.tensor([0, 3, 2, 1])
    shard = whole[:, 2 * env.rank : 2 * env.rank + 2]
    expected = monolithic_loss(whole, labels=labels, implementation="eager").loss
    for group in (env.group, env.group.group_name, mesh, (mesh, 0), (mesh, "tp")):
        found = monolithic_loss(shard, labels=labels, implementation="eager", vocab_group=group).loss
        compare(repr(group), found, expected, 1e-13)


@check()
def nan_where_nothing_can_be_raised(env: Rank) -> None:
    """Collectives of compiled and device programs, run eagerly: wrong shards make the rows NaN on every rank."""
    split = Split(env, "short", VOCAB, VOCAB)
    rows = torch.zeros(2, 3)
    group = vocab_parallel.find_group("vocab_group", env.group)
    right = vocab_parallel.Shards(group, None, split.begin, VOCAB)
    packed, starts, ends = right.gather(vocab_parallel.namespace, rows, split.width)
    assert not packed.isnan().any()
    assert [*zip(starts.tolist(), ends.tolist(), strict=True)] == even_bounds(VOCAB, env.ranks)
    for start, size in ((split.begin, VOCAB + 1), (split.begin, VOCAB + env.rank), (0, VOCAB)):
        wrong = vocab_parallel.Shards(group, None, start, size)
        assert wrong.gather(vocab_parallel.namespace, rows, split.width)[0].isnan().all()
    far = vocab_parallel.Shards(group, None, env.rank * 2**30, env.ranks * 2**30)  # exact beyond 2^24
    packed, starts, _ = far.gather(vocab_parallel.namespace, rows, 2**30)
    assert starts.tolist() == [rank * 2**30 for rank in range(env.ranks)]
    assert not packed.isnan().any()


# --- data parallelism ---------------------------------------------------------------------------------------


@check()
def data_parallel(env: Rank) -> None:
    """Each rank has rows of its own: with global counts losses and gradients add up, and metrics combine exactly."""
    inputs = to_torch(random_inputs(31, tokens=(4 * env.ranks, 6)), "float64")
    inputs.pop("teacher_logits")
    rows = torch.arange(4 * env.ranks)[:, None]
    inputs["segment_ids"] = torch.where(inputs["segment_ids"] < 0, -1, rows // 2)  # two rows a sequence
    inputs["num_segments"] = 2 * env.ranks
    inputs["preference_pairs"] = torch.tensor([[2 * rank, 2 * rank + 1] for rank in range(env.ranks)])
    whole = inputs.pop("logits").requires_grad_()
    losses = {name: all_losses()[name] for name in SEQUENCE}
    expected = monolithic_loss(whole, losses, implementation="eager", **inputs)
    expected.loss.backward()
    own = slice(4 * env.rank, 4 * env.rank + 4)
    part = {key: value[own] if torch.is_tensor(value) and value.ndim == 2 else value for key, value in inputs.items()}
    part["segment_ids"] = torch.where(part["segment_ids"] < 0, -1, part["segment_ids"] - 2 * env.rank)
    part["num_segments"], part["preference_pairs"] = 2, torch.tensor([[0, 1]])
    ranged = (part["labels"], part["mask"], part["segment_ids"], part["preference_pairs"])
    with counted(["all_reduce"]):
        counts = global_counts(*ranged, group=env.group)
    assert set(counts) == {"num_tokens", "num_sequences", "num_pairs"}
    shard = whole.detach()[own].clone().requires_grad_()
    found = monolithic_loss(shard, losses, implementation="eager", **part, **counts)
    found.loss.backward()
    total = found.loss.detach().clone()
    dist.all_reduce(total)
    compare("loss", total, expected.loss, 1e-13)
    compare("gradient", shard.grad, whole.grad[own], 1e-13)
    with counted(["all_gather_into_tensor"]):
        metrics = combine_metrics(found.aux.parts, env.group)
    for name, value in expected.aux.metrics.items():
        compare(name, metrics[name], value, 1e-12)


# --- compiled -----------------------------------------------------------------------------------------------


@check(2)
def compiled(env: Rank) -> None:
    """The compiled implementation and a user's compiled step, fullgraph: no graph breaks, one collective, none back."""
    from torch._dynamo.utils import counters

    names = ("ce", "z", "forward", "seq")
    losses = {name: all_losses()[name] for name in names}
    against_unsharded(env, losses, random_inputs(41), "float32", "short", implementation="compiled")
    inputs = to_torch(random_inputs(42), "float32")
    labels = inputs["labels"]
    r = np.random.default_rng(43)
    hidden = torch.tensor(r.normal(size=(*labels.shape, 4)), dtype=torch.float32)
    weight = torch.tensor(r.normal(size=(4, VOCAB)), dtype=torch.float32)
    split = Split(env, "short", VOCAB, VOCAB)
    head = {"ce": CrossEntropy(), "z": ZLoss(weight=0.1)}

    def step(weight: torch.Tensor, group: Any) -> torch.Tensor:
        return monolithic_loss(hidden @ weight, head, labels=labels, vocab_group=group, vocab_size=VOCAB).loss

    graphs: list[Any] = []

    def backend(graph: Any, example: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: Any, example: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, example)

    counters.clear()
    program = torch.compile(step, fullgraph=True, backend=backend)
    shard = split.take(weight).requires_grad_()
    found = program(shard, env.group)
    found.backward()
    program(shard.detach().requires_grad_(), env.group)
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    forward, backward = (
        [
            str(node.target)
            for node in graph.graph.nodes
            if "c10d" in str(node.target) and "wait" not in str(node.target)
        ]
        for graph in graphs
    )
    assert len(forward) == 1, forward
    assert "all_gather" in forward[0], forward
    assert not backward, backward
    whole = weight.clone().requires_grad_()
    expected = monolithic_loss(hidden @ whole, head, labels=labels, implementation="eager").loss
    expected.backward()
    compare("loss", found, expected, 1e-6)
    compare("weight", shard.grad, split.take(whole.grad), 1e-6)
    # validate=True costs a collective of its own and raises on every rank, compiled or not.
    wrong = labels + VOCAB * (env.rank == 1)
    logits = split.take(inputs["logits"].nan_to_num())
    refuses(
        "(rank 1 of vocab_group)",
        lambda: monolithic_loss(
            logits, head, labels=wrong, implementation="compiled", validate=True, **split.arguments
        ),
    )


@check(2)
def dtensor_compiled(env: Rank) -> None:
    """A step over DTensors is one graph as well."""
    mesh = init_device_mesh("cpu", (env.ranks,))
    r = np.random.default_rng(44)
    weight = torch.tensor(r.normal(size=(4, VOCAB)), dtype=torch.float32)
    hidden = torch.tensor(r.normal(size=(6, 4)), dtype=torch.float32)
    labels = torch.tensor([0, 10, 5, -100, 3, 7])
    replicated = distribute_tensor(hidden, mesh, [Replicate()])

    def step(weight: torch.Tensor) -> torch.Tensor:
        return monolithic_loss(replicated @ weight, {"ce": CrossEntropy(), "z": ZLoss()}, labels=labels).loss

    shard = distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(shard)
    found.backward()
    whole = weight.clone().requires_grad_()
    expected = monolithic_loss(
        hidden @ whole, {"ce": CrossEntropy(), "z": ZLoss()}, labels=labels, implementation="eager"
    )
    expected.loss.backward()
    compare("loss", found, expected.loss, 1e-6)
    assert shard.grad.placements == shard.placements
    compare("weight", shard.grad.full_tensor(), whole.grad, 1e-6)


# --- the kernel in Triton's interpreter --------------------------------------------------------------------------


@check(3)
def triton_interpreted(env: Rank) -> None:
    """Statistics launch, collective, terms, write launch: the same merge, an empty shard among them."""
    losses = all_losses()
    inputs = random_inputs(51, tokens=(2, 6))
    for dtype, layout in (("float32", "uneven"), ("float32", "padded"), ("bfloat16", "short")):
        against_unsharded(env, losses, inputs, dtype, layout, 6, implementation="triton")
    halves = {"half": jsd_losses()["half"]}
    against_unsharded(env, halves, inputs, "float32", "short", implementation="triton")
    against_unsharded(env, halves | {"seq": losses["seq"]}, inputs, "float32", "short", implementation="triton")
    # Every term over tokens: one launch where the vocabulary is whole, and no sequence sums here either.
    tokens = {name: losses[name] for name in ("ce", "z", "h", "rl", "cispo", "forward")}
    against_unsharded(env, tokens, inputs, "float32", "padded", 6, implementation="triton")
    against_unsharded(
        env,
        {"z": losses["z"]},
        {"logits": inputs["logits"], "mask": inputs["mask"]},
        "float32",
        "short",
        implementation="triton",
    )


def main(rank: int, ranks: int, rendezvous: str, results: str, only: str | None = None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    env = Rank(rank, ranks)
    outcome: dict[str, str] = {}
    for name, function in CHECKS.items():
        if (function.ranks and ranks not in function.ranks) or (only and only != name):  # type: ignore[attr-defined]
            continue
        try:
            function(env)
            failed = ""
        except Exception:
            failed = f"rank {rank} of {ranks}:\n{traceback.format_exc()}"
        outcome[name] = failed
        Path(results).write_text(json.dumps(outcome))
        if failed:
            # Other ranks may now be inside another collective: nothing that follows could be trusted.
            print(failed, flush=True)
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
