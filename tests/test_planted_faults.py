"""Does the suite find faults? Each is planted in a copy of the core, and the quick checks must fail on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import duohead

TESTS = Path(__file__).parent


class Fault(NamedTuple):
    """A text of the core and what stands there instead; ``also``: a second place of the same fault."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()


FAULTS = (
    Fault(
        "mask_by_multiplication",
        "statistics.py",
        "return xp.where(inputs.valid[..., None], x, 0.0)",
        "return x * xp.cast(inputs.valid, x.dtype)[..., None]",
        # Either place alone is made good by the other.
        (
            (
                "return xp.where(is_real, total, 0.0)",
                "return total * xp.cast(is_real, total.dtype)",
            ),
        ),
    ),
    Fault(
        "lse_minus_x_at_the_label",
        "statistics.py",
        'statistics["logprob", i] = found["label", i] - log_sum',
        'statistics["logprob", i] = (found["label", i] + top) - statistics["lse", i]',
    ),
    Fault(
        "low_precision_subtraction_at_the_label",
        "statistics.py",
        "        p = xp.exp(log_p)\n        inner",
        "        p = xp.cast(xp.exp(log_p), logits.dtype)\n        inner",
    ),
    Fault("missing_maximum", "statistics.py", "top = xp.max_last(x)", "top = xp.zeros_like(xp.max_last(x))"),
    Fault("wrong_teacher_mass", "fold.py", "return d - shift, ", "return 0.5 * d - shift, "),
    Fault(
        "unclamped_ratio", "terms/policy.py", "return exp(minimum(log_ratio, MAX_LOG_RATIO))", "return exp(log_ratio)"
    ),
    Fault(
        "swapped_kl",
        "statistics.py",
        'found["forward_kl", i] = xp.sum_last(xp.where(q > 0, q * (y - x), 0.0))',
        'found["forward_kl", i] = xp.sum_last(xp.where(p > 0, p * (x - y), 0.0))',
    ),
    Fault(
        "mean_of_means",
        "metrics.py",
        "return type(a)(a.value + b.value, weight)",
        "return type(a)((a.value / a.weight + b.value / b.weight) * weight / 2, weight)",
    ),
    Fault("global_count_ignored", "seam.py", "self.num_tokens = hyper[plan.num_tokens]", "pass"),
    Fault(
        "wrong_shard_offset",
        "statistics.py",
        "return xp.arange(x.shape[-1], x) + columns.start",
        "return xp.arange(x.shape[-1], x)",
    ),
    Fault(
        "two_shards_own_a_label", "statistics.py", "(labels < ends.reshape(shape))", "(labels <= ends.reshape(shape))"
    ),
    Fault(
        "shards_entropy_not_moved",
        "statistics.py",
        '(shard("weighted", i) + sums * moved)',
        '(shard("weighted", i))',
    ),
    Fault("forgotten_softcap_derivative", "statistics.py", "total * (1.0 - bend * bend)", "total"),
    Fault("forgotten_scale_derivative", "statistics.py", "scaled.append((a * scale, b", "scaled.append((a, b"),
    Fault("smoothing_over_another_count", "statistics.py", "1.0 / columns.size,", "1.0 / (columns.size + 1),"),
    Fault(
        "padding_counted",
        "statistics.py",
        "x = xp.where(_column(xp, x, columns) < columns.size, x, -xp.inf)",
        "pass",
    ),
    Fault(
        "teacher_temperature_forgotten",
        "statistics.py",
        "dtype) * hyper[teacher.scale]",
        "dtype) * hyper[plan.softmaxes[0].scale]",
    ),
    Fault(
        "jsd_weights_swapped",
        "statistics.py",
        "hyper[slot] * q_term + (1.0 - hyper[slot]) * p_term",
        "hyper[slot] * p_term + (1.0 - hyper[slot]) * q_term",
    ),
    Fault("clip_of_the_other_sign", "terms/policy.py", "cut_low = (advantages < 0.0)", "cut_low = (advantages > 0.0)"),
    Fault(
        "masked_tokens_in_sequences",
        "seam.py",
        "self.in_sequence = self.valid & (ids >= 0)",
        "self.in_sequence = ids >= 0",
    ),
    Fault("infinity_times_no_weight", "seam.py", "xp.where(weight == 0, 0.0, weight * value)", "weight * value"),
)


def copy_of_the_core(folder: Path) -> Path:
    copied = folder / "duohead"
    shutil.copytree(Path(duohead.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__", "kernels"))
    return copied


@pytest.fixture(scope="module")
def truths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the oracle's answers, written by the first check."""
    return tmp_path_factory.mktemp("truths") / "truths.pickle"


def check(folder: Path, truths: Path) -> subprocess.CompletedProcess[str]:
    """The quick checks in a fresh interpreter that takes duohead from ``folder``."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(folder), str(TESTS))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    code = (
        "import sys, duohead, runpy; "
        f"assert duohead.__file__.startswith({str(folder)!r}), duohead.__file__; "
        "runpy.run_module('robust.quick_checks', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(truths)]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_core_as_it_is_passes(tmp_path: Path, truths: Path) -> None:
    copy_of_the_core(tmp_path)
    result = check(tmp_path, truths)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path, truths: Path) -> None:
    file = copy_of_the_core(tmp_path) / fault.file
    text = file.read_text()
    for old, new in ((fault.old, fault.new), *fault.also):
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {fault.file}: plant the fault anew"
        text = text.replace(old, new)
    file.write_text(text)
    result = check(tmp_path, truths)
    assert result.returncode == 1, "the fault was not found" + result.stdout + result.stderr
    # Found by a comparison, not because the copy does not run at all.
    assert "Traceback" not in result.stderr, result.stderr
