"""--compile: compiled code trains the same model, ranks stay equal, and a missing compiler is reported."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import find_texts
from support.scenarios import SMALL, load, run, widest_gap
from test_matrix import make_settings, parametrize, read_table, train_and_compare

from train.engine import Job
from train.launch import RankContext
from train.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.programs import Run

    from syncheck.testing import Rank

TINY = ("--model", "convnet", "--width", 2, "--max-steps", 3, "--save-per-rank", "--progress", "none")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Trace like torch.compile, but run the graphs without slow code generation; list the sizes of the graphs."""
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return graphs


@pytest.mark.slow
@parametrize("single", "dp", "ddp", "zero", "localsgd", "diloco", "fsdp", "hsdp", "replicate")
def test_the_table_is_correct_for_compile(
    method: str, request: pytest.FixtureRequest, tmp_path: Path, graphs: list[int]
) -> None:
    """The verdict of a compiled run is that of the page: `refused`, or the verdict of the method alone."""
    grouped = METHODS[method].grouped
    ctx: RankContext = request.getfixturevalue("ctx") if grouped else RankContext()
    out = request.getfixturevalue("syncheck_rank").shared if grouped else tmp_path
    actual = train_and_compare(ctx, replace(make_settings(method), compile=True, out=out))
    assert actual == read_table()[method]["--compile"]
    assert actual in ("refused", read_table()[method]["alone"])
    assert bool(graphs) is (actual != "refused")


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_sync_bn_is_not_compiled(ctx: RankContext, syncheck_rank: Rank, graphs: list[int]) -> None:
    """With SyncBatchNorm, only the other layers are compiled, and both ranks end bitwise equal to the usual run."""
    settings = replace(SMALL, sync_bn=True, out=syncheck_rank.shared)
    usual = run(ctx, settings).saved
    assert not graphs
    saved = run(ctx, replace(settings, compile=True)).saved
    assert len(graphs) > 2
    assert widest_gap(usual[0], saved[0]) == 0
    assert widest_gap(*saved) == 0
    job = Job(replace(settings, compile=True), ctx)
    assert job.trainer.wrapped is not job.method.module  # checkpoints and evaluations use the module as before
    assert list(job.method.module.state_dict()) == list(load(usual[0])["model"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_generated_code(script: Callable[..., Run], tmp_path: Path) -> None:
    """Generated code ends within rounding of the usual run, in one process and under ddp with a cold cache.

    The usual run is a run of one process. The network has no BatchNorm, so ddp ends within rounding of this run too.
    """
    # Without processes that compile in parallel: each imports torch for a network with a few kernels.
    serial = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    for options in ((), ("--compile",), ("--compile", "--spawn", 2, "--timeout", 300)):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache{len(options)}")}
        done = script(*TINY, *options, timeout=400, **cache, **serial)
        assert done.returncode == 0, done.stderr
    names = ("single_rank0", "single-compile_rank0", "ddp-compile_rank0", "ddp-compile_rank1")
    usual, single, *ddp = (tmp_path / "ckpts" / f"{name}.pth" for name in names)
    assert widest_gap(usual, single) < 5e-6
    assert widest_gap(usual, ddp[0]) < 1e-5
    assert widest_gap(*ddp) == 0
    assert list(load(ddp[0])["model"]) == list(load(usual)["model"])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_missing_compiler_is_reported(script: Callable[..., Run], tmp_path: Path) -> None:
    """Without a C++ compiler, two ranks print one error line in total, and the exit code is 2."""
    done = script(*TINY, "--spawn", 2, "--compile", timeout=100, CXX="/nowhere", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2
    (line,) = find_texts(done.stderr.splitlines(), start="run.py: ")
    assert line.startswith(f"run.py: error: --compile: torch {torch.__version__} cannot compile for cpu here: ")
    assert "/nowhere" in line
    assert "Traceback" not in done.stderr
