"""The example project in tests/examples behaves as its README describes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_the_suite_detects_the_bug(pytester: pytest.Pytester) -> None:
    """The ranks of DDP stay in sync, and the assertion in the test detects the layer outside the wrapper."""
    shutil.copytree(EXAMPLES, pytester.path, dirs_exist_ok=True)
    result = pytester.runpytest_subprocess(timeout=90)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 0 of 2 failed:",
            ">       assert_in_sync(trainer.fine_tune(trained[[]0[]]))",
            "E       *replicas are out of sync: SYN210",
            "E * weight * parameter * 0 | 1 * 288 of 288 *",
            "*rank 1: failed too*",
            "with the same failure",
            "FAILED tests/test_training.py::test_fine_tuning_stays_in_sync - rank 0: *",
        ]
    )


@pytest.mark.slow
def test_the_checkpoints_are_judged(pytester: pytest.Pytester) -> None:
    """Checkpoints of the trainer differ in BatchNorm statistics only, and --syncheck-allow accepts this."""
    shutil.copytree(EXAMPLES, pytester.path, dirs_exist_ok=True)
    # The exit code is ignored, because gloo may abort at interpreter exit, after the files are written.
    launcher = [sys.executable, "-m", "torch.distributed.run"]  # torchrun of this environment
    pytester.run(*launcher, "--nproc-per-node", "2", "trainer.py", timeout=90)
    result = pytester.runpytest_subprocess("--syncheck", "ckpts/*.pth")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*SYN201 bn-local-stats *",
            "*fix*",
            "FAILED ckpts::digits::bn-stats - SYN201 bn-local-stats (warning, likely)*",
        ]
    )
    result = pytester.runpytest_subprocess("--syncheck", "ckpts/*.pth", "--syncheck-allow", "SYN201")
    result.assert_outcomes(passed=4)
