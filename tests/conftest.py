"""Fixtures for all tests: the command line, and files of ranks."""

from __future__ import annotations

import gc
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.checkpoints import Done, network, save
from support.marks import mark_for_release, mark_many_ranks

from syncheck.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start background jobs with SIGINT ignored, and child processes inherit this; tests send SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup does the same with SIGHUP. Child processes do not inherit a handler, so they start with the default action,
    # and the tests themselves still ignore the signal.
    signal.signal(signal.SIGHUP, lambda *_: None)

# Tests and their ranks share the cores: by default, one thread per process.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests start hundreds of Python processes. Without bytecode, each of them compiles syncheck and pytest's plugins again,
# which takes two thirds of the time of a short process.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Child processes, also the workers of -n, start faster with the settings in this folder.
_QUICK_START = str(Path(__file__).with_name("quick_start"))
_INHERITED = os.environ.get("PYTHONPATH")
if _INHERITED is None:
    os.environ["PYTHONPATH"] = _QUICK_START
elif _QUICK_START not in _INHERITED.split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join([_QUICK_START, _INHERITED])

pytest_plugins = ["pytester"]
collect_ignore = ["examples"]  # a separate project; test_examples.py runs it
if find_spec("torch") is None:  # as in an installation of the command line only
    collect_ignore += ["train", "live", "frameworks", "test_trials.py", "cli/test_demo.py"]
    collect_ignore += [f"cli/test_ranks{name}.py" for name in ("", "_refused", "_programs", "_nodes")]
    collect_ignore += ["diagnose/test_series.py", "layout/test_ties.py", "fixtures/test_confusion.py"]
    collect_ignore += ["integrations/test_recipes.py", "docs/test_other_tools.py"]
    collect_ignore += [f"diagnose/test_{name}.py" for name in ("unlikely_cases", "fix_lines", "tied_names")]
    collect_ignore += [
        f"diagnose/test_{name}.py" for name in ("course", "different_runs", "tied_averages", "lasting_scales")
    ]
    collect_ignore += [f"diagnose/test_{name}.py" for name in ("lost_state_course", "stale_copy_beside_cause")]
    collect_ignore += [f"readers/test_{name}.py" for name in ("torch_zip", "torch_legacy", "dtensor", "sharded_tensor")]
    collect_ignore += ["readers/test_pickled_modules.py", "diagnose/test_reset_state.py"]
    collect_ignore += [
        f"layout/test_{name}.py" for name in ("partitioned_optimizer", "sub_meshes", "zero_names", "numbered_state")
    ]
    collect_ignore += ["readers/test_every_tensor.py", "tensors/test_finiteness.py", "comparison/test_rank_settings.py"]
    collect_ignore += [f"comparison/test_{name}.py" for name in ("kinds_of_tensors", "model_values")]
    collect_ignore += [f"comparison/test_{name}.py" for name in ("averaged_copies", "metric_states")]
    collect_ignore += [f"conversion/test_{name}_causes.py" for name in ("constant", "local", "no_false", "place")]
    collect_ignore += [f"conversion/test_{name}_causes.py" for name in ("run", "tie")]
    collect_ignore += ["pytest_plugin/test_ranks_pass.py", "pytest_plugin/test_examples.py"]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `.ci/run --release` runs, and those on many ranks."""
    mark_many_ranks(items)
    mark_for_release(items)


def pytest_collection_finish() -> None:
    """Exclude the modules and the tests, which stay to the end, from the searches for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process, in an empty folder; keyword arguments are environment variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: Any, **environment: str) -> Done:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            try:
                code = main([*map(str, arguments)])
            except SystemExit as stopped:
                code = int(str(stopped.code))
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., list[Path]]:
    """Write one checkpoint per rank, run_rank0.pth and so on; without arguments, two equal checkpoints."""

    def write(*states: dict[str, Any], name: str = "run_rank{}.pth") -> list[Path]:
        return [save(tmp_path / name.format(i), s) for i, s in enumerate(states or (network(), network()))]

    return write
