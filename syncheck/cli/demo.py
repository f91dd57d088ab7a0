"""`syncheck demo`: train twice on two processes here, compare, report, and check that it showed what it promises."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck.cli import output, streams
from syncheck.errors import DemoFailed

if TYPE_CHECKING:
    from syncheck.records import Report

FOLDER = Path("syncheck-demo")
RANKS = 2
# Both runs have one seed: they start from the same weights and see the same batches.
RUNS = {"ddp": (), "ddp-syncbn": ("--sync-bn",)}
_STEPS_BETWEEN_SAVES = "100"
_PATIENCE = 45  # seconds; torchrun itself kills ranks 30 s after it has asked them to end
_MARK = ".syncheck-demo"


def run(color: str) -> int:
    """Run the demo in `syncheck-demo/`; return 0 when it showed what it promises.

    Raises DemoFailed with the step that failed: no clone around this package, no torch, a training that ended with an
    error, or a result that is not the promised one.
    """
    script = _script()
    _prepare()
    for name, options in RUNS.items():
        _say(f"\nTraining {name}: {RANKS} processes on this machine, a small ResNet with BatchNorm, handwritten digits")
        _train(script, options)
    from syncheck import api
    from syncheck.report import files, text

    compared = api.compare(str(FOLDER / "ckpts" / "*.pth"))
    _say(f"\n$ syncheck compare {FOLDER}/ckpts/*.pth -n 5\n")
    output.write(text.comparison(compared, 5), color)
    found = api.compare(str(FOLDER / "ckpts"), histograms=True)
    _say(f"\n$ syncheck report {FOLDER}/ckpts -n 3 -o {FOLDER}/index.html\n")
    output.write(text.overview(found, 3), color)
    page = FOLDER / "index.html"
    files.write_file(str(page), found)
    _check(compared)
    _say(f"\nOpen {page} in a browser. The checkpoints are in {FOLDER}/ckpts/.")
    _say(
        f"Next, on your own: syncheck explain SYN201, or: syncheck compare {FOLDER}/ckpts/ddp_rank*.pth --allow SYN201"
    )
    return 0


def _say(text: str) -> None:
    output.write_text(f"{text}\n")
    streams.flush()


def _script() -> Path:
    """Find the trainer of the clone that this package was installed from."""
    script = Path(__file__).resolve().parents[2] / "train" / "run.py"
    if not script.is_file():
        raise DemoFailed(
            "the demo trains with train/run.py, which is in the repository and not in the installed package: "
            "clone it and run: pip install -e '.[train]' && syncheck demo"
        )
    from importlib.util import find_spec

    lacking = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if lacking:
        raise DemoFailed(f"{' and '.join(lacking)} not installed: pip install -e '.[train]'")
    return script


def _prepare() -> None:
    """Make the demo's folder, or take one that an earlier demo made; never write into anybody else's."""
    if FOLDER.exists() and not (FOLDER / _MARK).exists() and (not FOLDER.is_dir() or any(FOLDER.iterdir())):
        raise DemoFailed(f"{FOLDER}/ is there and was not made by the demo: move it away, or run the demo elsewhere")
    try:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / _MARK).touch()
    except OSError as error:
        raise DemoFailed(f"cannot write {FOLDER}/ here: {error.strerror}") from None


def _train(script: Path, options: tuple[str, ...]) -> None:
    """Run the trainer under torchrun, its output going straight to the terminal."""
    arguments = ["--save-per-rank", "--save-every", _STEPS_BETWEEN_SAVES, "--out", str(FOLDER / "ckpts"), *options]
    shown = shlex.join(["torchrun", "--nproc-per-node", str(RANKS), "train/run.py", *arguments])
    _say(f"$ {shown}\n")
    # --standalone picks a free port; with one thread a process two processes share two cores well.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        str(script),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    code = _wait(subprocess.Popen([*command, *arguments], env=environment))
    if code:
        raise DemoFailed(f"the training above ended with exit code {code}: {shown}")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of torchrun. After Ctrl-C, which it gets too, it needs time to end its ranks.

    Killed at once, as subprocess.run would do, it leaves them behind.
    """
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise


def _check(report: Report) -> None:
    """Hold the result against the promise: BatchNorm's statistics differ under DDP, nothing under SyncBatchNorm."""
    groups = {group.run: group for group in report.groups}
    if set(groups) != set(RUNS):
        raise DemoFailed(f"expected checkpoints of {', '.join(RUNS)}, found {', '.join(groups) or 'none'}")
    plain, synced = groups["ddp"], groups["ddp-syncbn"]
    codes = {finding.code for finding in plain.findings}
    if codes != {"SYN201"} or plain.verdict != "out_of_sync":
        raise DemoFailed(f"expected SYN201 and nothing else in ddp, found {', '.join(sorted(codes)) or 'no finding'}")
    if synced.verdict != "in_sync" or synced.counts.identical != synced.counts.tensors:
        raise DemoFailed("expected every tensor of ddp-syncbn to be identical on both ranks")
    if not report.closures or report.closures[0].synced.max_abs != 0.0:
        raise DemoFailed("expected SyncBatchNorm to close the gap to exactly 0.0")
