"""The plan of a head, as data, as a table and at the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from config_inputs import CONFIGS, inputs_for, run_torch

from duohead import HeadSpec
from duohead.config_schema import schema
from duohead.plan_command import main

CONFIG = Path(CONFIGS[0]).parent
MIXED = CONFIG / "mixed.yaml"


def test_one_scale_is_one_group() -> None:
    report = HeadSpec.from_yaml(MIXED).plan("torch", "cuda")
    (group,) = report.groups
    assert group.name == "monolithic"
    assert group.losses == ("ce", "z", "distill", "rl", "dpo")
    assert group.statistics == ("lse", "logprob", "teacher_cross_entropy(teacher)")
    assert report.passes[0].losses == group.losses


def test_groups_by_effective_scale() -> None:
    head = HeadSpec.from_dict(
        {
            "logits_scale_factor": 0.5,
            "losses": {
                "a": {"type": "label"},
                "b": {"type": "z_loss", "logits_scale_factor": 2.0},
                "c": {"type": "entropy"},
                "d": {"type": "distillation", "student_temperature": 4.0},
                "e": {"type": "dpo", "logits_scale_factor": 2.0},
            },
        }
    )
    groups = head.plan("torch", "cpu").groups
    assert [(group.name, group.scale, group.losses) for group in groups] == [
        ("monolithic_0", 0.5, ("a", "c")),
        ("monolithic_1", 1.0, ("b", "e")),
        ("monolithic_2", 0.125, ("d",)),
    ]


def test_the_heads_own_metrics_have_the_heads_scale() -> None:
    losses = {"z": {"type": "z_loss", "logits_scale_factor": 2.0}}
    groups = HeadSpec.from_dict({"losses": losses, "metrics": ["entropy"]}).plan().groups
    assert [(group.losses, group.statistics) for group in groups] == [(("z",), ("lse",)), ((), ("lse", "entropy"))]


@pytest.mark.parametrize(
    ("wanted", "backend", "device", "implementation", "why"),
    [
        (
            "auto",
            "torch",
            "cuda",
            "triton",
            "auto: a GPU, and the kernel takes every loss (where triton is installed)",
        ),
        (
            "auto",
            "jax",
            "cuda",
            "triton",
            "auto: a GPU, and the kernel takes every loss (where jax-triton is installed)",
        ),
        ("auto", "torch", "cpu", "compiled", "auto: no GPU"),
        ("auto", "jax", "cpu", "xla", "auto: no GPU"),
        ("compiled", "torch", "cuda", "compiled", "loss_implementation is compiled"),
        ("compiled", "jax", "cuda", "xla", "loss_implementation is compiled"),
        ("triton", "torch", "cuda", "triton", "loss_implementation is triton"),
        (
            "triton",
            "jax",
            "cpu",
            "triton",
            "loss_implementation is triton; on the CPU that is Triton's interpreter (TRITON_INTERPRET=1)",
        ),
        ("per_loss", "torch", "cuda", "per_loss", "loss_implementation is per_loss: each loss by itself"),
    ],
)
def test_which_implementation_and_why(wanted: str, backend: str, device: str, implementation: str, why: str) -> None:
    report = HeadSpec(loss_implementation=wanted).plan(backend, device)
    assert {(group.implementation, group.why) for group in report.groups} == {(implementation, why)}


def test_float64_is_not_the_kernels() -> None:
    group = HeadSpec().plan("torch", "cuda", dtype="float64").groups[0]
    assert (group.implementation, group.why) == (
        "compiled",
        "auto: float64 logits, and the kernel computes in float32",
    )
    with pytest.raises(ValueError, match=r"^dtype: the kernel computes in float32, and loss_implementation is triton"):
        HeadSpec(loss_implementation="triton").plan("torch", "cuda", dtype="float64")


@pytest.mark.parametrize("wanted", ["auto", "compiled"])
def test_the_adapter_picks_what_the_plan_says(wanted: str) -> None:
    import torch

    from duohead_torch.compiled import pick_runner

    planned = HeadSpec(loss_implementation=wanted).plan("torch", "cpu", dtype="float32")
    assert pick_runner(wanted, torch.zeros(2, 3), ()).name == planned.implementation


def test_per_loss_is_a_group_and_a_pass_for_each() -> None:
    losses = HeadSpec.from_yaml(MIXED).losses
    report = HeadSpec(losses=losses, loss_implementation="per_loss").plan("jax", "cpu")
    assert [group.name for group in report.groups] == list(losses)
    assert [item.losses for item in report.passes] == [(name,) for name in losses]


def test_inputs_metrics_and_gradients() -> None:
    report = HeadSpec.from_yaml(MIXED).plan()
    rows = {loss.name: (loss.needs, loss.optional) for loss in report.losses}
    assert rows == {
        "ce": (("labels",), ()),
        "z": ((), ()),
        "distill": (("teacher_logits['teacher']",), ()),
        "rl": (
            ("labels", "advantages", "old_logprobs"),
            ("ref_logprobs", "importance_weights", "segment_ids"),
        ),
        "dpo": (("labels", "ref_logprobs", "segment_ids", "preference_pairs"), ()),
    }
    watched = HeadSpec.from_yaml(CONFIG / "gspo.yaml").plan()
    assert [loss.has_gradient for loss in watched.losses] == [True, False, False]
    assert "kl_new_old" in watched.losses[0].metrics


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_call_with_the_listed_inputs_reports_the_listed_metrics(path: Path) -> None:
    head = HeadSpec.from_yaml(path)
    vocab = 7 if head.vocab_size is None else head.vocab_size
    scalars, _ = run_torch(head, inputs_for(head, vocab=vocab), "eager")
    listed = {f"{loss.name}/{metric}" for loss in head.plan().losses for metric in loss.metrics}
    named = {f"losses/{name}" for name in head.losses} | {f"head/{name}" for name in head.metrics}
    assert set(scalars) == {"loss", *listed, *named}


def test_bytes_per_row() -> None:
    plain = HeadSpec().plan("torch", "cuda", vocab_size=1000, dtype="bfloat16").passes[0]
    assert (plain.read.bytes, plain.written.bytes, plain.floor.bytes) == (4000, 2000, 4000)
    text = "losses: {kd: {type: distillation}, big: {type: distillation, loss_type: jsd, reference_model: big}}"
    unknown = HeadSpec.from_yaml(text).plan("torch", "cuda", dtype="float32").passes[0]
    assert unknown.sweeps == ("statistics", "jsd", "gradient")
    assert (str(unknown.read), str(unknown.written), str(unknown.floor)) == ("36·V", "4·V", "16·V")
    assert unknown.read.bytes is None
    assert HeadSpec(vocab_size=10).plan().passes[0].written.bytes == 20


def test_collectives() -> None:
    def collectives(text: str) -> list[tuple[str, str, int, str]]:
        plan = HeadSpec.from_yaml(text).plan()
        return [(item.split, item.kind, item.rows, item.per) for item in plan.collectives]

    gather = ("vocabulary", "all-gather, forward")
    assert collectives("losses: {ce: {type: label}, z: {type: z_loss}}") == [(*gather, 3, "token")]
    assert collectives("losses: {kd: {type: distillation, loss_type: jsd}}") == [
        (*gather, 6, "token"),
        ("vocabulary", "all-reduce, forward", 2, "token"),
    ]
    assert collectives("losses: {dpo: {type: dpo}}") == [
        (*gather, 3, "token"),
        ("sequences", "all-reduce, forward", 2, "segment"),
    ]


def test_the_table() -> None:
    head = HeadSpec.from_yaml(CONFIG / "two_scales.yaml")
    assert str(head.plan("torch", "cuda", vocab_size=32000)) == TABLE.strip("\n")


TABLE = """
torch on cuda, bfloat16, V = 32000: 1 pass over the logits, one gradient

group         scale  losses  implementation  statistics
------------  -----  ------  --------------  ------------
monolithic_0  0.5    ce, z   triton          lse, logprob
monolithic_1  1      calm    triton          lse, entropy

triton: auto: a GPU, and the kernel takes every loss (where triton is installed)

loss  type     group         weight  gradient  needs   uses where given
----  -------  ------------  ------  --------  ------  ----------------
ce    label    monolithic_0  1       yes       labels  -
z     z_loss   monolithic_0  0.001   yes       -       -
calm  entropy  monolithic_1  0.01    yes       -       -

pass over the logits  sweeps                statistics rows  bytes read/row  written/row  floor/row
--------------------  --------------------  ---------------  --------------  -----------  ---------
ce, z, calm           statistics, gradient  6                128000          64000        128000

collective           where split  float32 rows
-------------------  -----------  ------------
all-gather, forward  vocabulary   6 per token
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tensorflow", "cpu"), "backend: got 'tensorflow'; valid: jax, torch"),
        (("torch", "cda"), "device: got 'cda'; did you mean 'cuda'?"),
    ],
)
def test_plan_arguments(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        HeadSpec().plan(*arguments)
    assert str(caught.value) == message


def test_plan_keyword_arguments() -> None:
    with pytest.raises(ValueError, match=r"^dtype: got 'float8'; did you mean 'float64'\?$"):
        HeadSpec().plan(dtype="float8")
    with pytest.raises(ValueError, match=r"^vocab_size: must be a whole number >= 1 or null, got 0$"):
        HeadSpec().plan(vocab_size=0)


def test_numbers_known_at_run_time() -> None:
    import numpy as np

    from duohead import ZLoss

    head = HeadSpec(losses={"z": ZLoss(weight=np.array(0.0))})
    (loss,) = head.plan().losses
    assert loss.has_gradient  # its weight is not known here
    assert "runtime" in str(head.plan())


def test_the_command(capsys: Any) -> None:
    assert main([str(MIXED), "--backend", "jax", "--device", "cpu", "--vocab-size", "100", "--dtype", "float32"]) == 0
    expected = HeadSpec.from_yaml(MIXED).plan("jax", "cpu", vocab_size=100, dtype="float32")
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()


OWN = """
import duohead

def bounded(logprob, bound=3.0):
    return bound - logprob, -1.0

Bounded = duohead.token_loss(bounded, register="bounded")
"""


def test_the_commands_know_own_types(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "head.yaml").write_text("losses: {b: {type: bounded, bound: 2.0}}", encoding="utf-8")

    def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", f"duohead.{module}", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    plan = run("plan_command", "head.yaml", "--import", "own", "--device", "cpu")
    assert plan.returncode == 0, plan.stderr
    assert "bounded" in plan.stdout
    found = json.loads(run("plan_command", "--schema", "--import", "own").stdout)
    assert found["$defs"]["type_bounded"]["properties"]["bound"]["default"] == 3.0
    unknown = run("plan_command", "head.yaml")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("head.yaml: losses.b.type: got 'bounded'; ")
    missing = run("plan_command", "head.yaml", "--import", "nowhere")
    assert (missing.returncode, missing.stderr) == (2, "head.yaml: No module named 'nowhere'\n")
    parity = run("parity", "head.yaml", "--import", "own", "--shape", "4,9", "--only", "torch eager")
    assert parity.returncode == 0, parity.stdout + parity.stderr


def test_the_command_refuses(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "head.yaml"
    path.write_text("losses: {rl: {type: grpo, epsilon_low: 1.5}}", encoding="utf-8")
    assert main([str(path)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == f"{path}: losses.rl.epsilon_low: must be a number >= 0 and <= 1, got 1.5\n"
    assert main([str(tmp_path / "missing.yaml")]) == 2
    assert "missing.yaml" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "config: name a YAML file, or ask for --schema" in capsys.readouterr().err
