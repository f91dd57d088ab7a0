"""`syncheck demo`: train two runs on two local processes, compare and report them, and check the result."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck.cli import output, streams
from syncheck.errors import DemoFailed
from syncheck.readers import outputs

if TYPE_CHECKING:
    from syncheck.records import Report

FOLDER = Path("syncheck-demo")
RANKS = 2
# Both runs have the same seed, so they start from the same weights and see the same batches.
RUNS = {"ddp": (), "ddp-syncbn": ("--sync-bn",)}
_STEPS_BETWEEN_SAVES = "100"
_WATCHED_STEPS = "20"
_EXIT_TIMEOUT = 45  # seconds; torchrun kills ranks 30 s after the first signal
_MARK = ".syncheck-demo"


def run(color: str) -> int:
    """Run the demo in `syncheck-demo/`, and return 0 if it has the expected result.

    Raises DemoFailed without a clone of the repository or without torch, if training fails, and for another result.
    """
    script = _find_trainer()
    _create_folder()
    for name, options in RUNS.items():
        _print(f"\nTraining {name}: {RANKS} local processes, a small ResNet with BatchNorm, handwritten digits")
        _train(script, options)
    from syncheck import api
    from syncheck.report import formats, text

    compared = api.compare(str(FOLDER / "ckpts" / "*.pth"))
    _print(f"\n$ syncheck compare {FOLDER}/ckpts/*.pth -n 5\n")
    output.print_parts(text.draw_comparison(compared, 5), color)
    overview = api.compare(str(FOLDER / "ckpts"), histograms=True)
    _print(f"\n$ syncheck report {FOLDER}/ckpts -n 3 -o {FOLDER}/index.html\n")
    output.print_parts(text.draw_overview(overview, 3), color)
    page = FOLDER / "index.html"
    formats.write_file(str(page), overview)
    output.confirm_file(str(page), quiet=False)
    _check_report(compared)
    _watch(script)
    _print(f"\nOpen {page} in a browser. The checkpoints are in {FOLDER}/ckpts/.")
    _print(f"Try next: syncheck explain SYN201, or: syncheck compare {FOLDER}/ckpts/ddp_rank*.pth --allow SYN201")
    return 0


def _print(text: str) -> None:
    output.print_text(f"{text}\n")
    streams.flush()


def _find_trainer() -> Path:
    """Return the path of the trainer in the clone that contains this package."""
    script = Path(__file__).resolve().parents[2] / "train" / "run.py"
    if not script.is_file():
        if _is_clone(Path()):
            raise DemoFailed(
                "the demo requires train/run.py, which is in this folder and not in the installed package; install the "
                "clone itself: pip install -e '.[train]' && syncheck demo"
            )
        raise DemoFailed(
            "the demo requires train/run.py, which is in the repository and not in the installed package; "
            "clone the repository and run: pip install -e '.[train]' && syncheck demo"
        )
    from importlib.util import find_spec

    missing = [name for name in ("torch", "safetensors") if find_spec(name) is None]
    if missing:
        raise DemoFailed(f"{' and '.join(missing)} not installed: pip install -e '.[train]'")
    return script


def _is_clone(folder: Path) -> bool:
    """Whether a folder is a clone of the repository, with the trainer and the package."""
    return (folder / "train" / "run.py").is_file() and (folder / "syncheck" / "cli" / "demo.py").is_file()


def _create_folder() -> None:
    """Create the demo's folder, or reuse the folder of an earlier demo. Raises DemoFailed for any other folder."""
    if FOLDER.exists() and not (FOLDER / _MARK).exists() and (not FOLDER.is_dir() or any(FOLDER.iterdir())):
        raise DemoFailed(f"{FOLDER}/ exists and was not created by the demo; move it, or run the demo elsewhere")
    try:
        FOLDER.mkdir(exist_ok=True)
        if not os.path.lexists(FOLDER / _MARK):
            outputs.write(str(FOLDER / _MARK), "")
    except OSError as error:
        raise DemoFailed(f"{FOLDER}/: cannot write it: {error.strerror}; run the demo in another folder") from None


def _train(script: Path, options: tuple[str, ...]) -> None:
    """Run the trainer, with its output on the terminal."""
    arguments = ["--save-per-rank", "--save-every", _STEPS_BETWEEN_SAVES, "--out", str(FOLDER / "ckpts"), *options]
    _launch([], script, arguments)


def _watch(script: Path) -> None:
    """Run a training in which one rank clips its gradients alone, watched. Raises DemoFailed if it is not named."""
    _print("\nTraining again, watched at every step; the last rank clips its gradients alone")
    events = FOLDER / "watch.jsonl"
    events.unlink(missing_ok=True)
    arguments = ["--fault", "clip-on-one-rank", "--max-steps", _WATCHED_STEPS, "--out", str(FOLDER / "watched")]
    _launch(["-m", "syncheck", "watch", "--allow", "SYN201", "--events", str(events)], script, arguments)
    rows = [json.loads(row) for row in events.read_text(encoding="utf-8").splitlines()]
    codes = {row["code"] for row in rows if row["event"] == "witness"}
    if "SYN410" not in codes:
        raise DemoFailed(f"expected SYN410 while the training ran, found {', '.join(sorted(codes)) or 'no finding'}")


def _launch(before: list[str], script: Path, arguments: list[str]) -> None:
    """Run a script under torchrun. before: arguments of torchrun before the script."""
    command_text = shlex.join(["torchrun", "--nproc-per-node", str(RANKS), *before, "train/run.py", *arguments])
    _print(f"$ {command_text}\n")
    # --standalone selects a free port. With one thread per process, two processes share two cores well.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(RANKS),
        *before,
        str(script),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    code = _wait(subprocess.Popen([*command, *arguments], env=environment))
    if code:
        raise DemoFailed(f"the training above failed with exit code {code}: {command_text}")


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for torchrun and return its exit code.

    After Ctrl-C, which torchrun receives too, it gets time to end its ranks. If it were killed at once, as by
    subprocess.run, its ranks would keep running.
    """
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(timeout=_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        raise


def _check_report(report: Report) -> None:
    """Raise DemoFailed unless only BatchNorm statistics differ under DDP, and no tensor differs under SyncBatchNorm."""
    groups = {group.run: group for group in report.groups}
    # The names of the runs are in the metadata of the checkpoints.
    if set(groups) != set(RUNS):
        raise DemoFailed(f"expected checkpoints of {', '.join(RUNS)}, found {', '.join(groups) or 'none'}")
    plain, synced = groups["ddp"], groups["ddp-syncbn"]
    codes = {finding.code for finding in plain.findings}
    if codes != {"SYN201"} or plain.verdict != "out_of_sync":
        raise DemoFailed(f"expected only SYN201 in ddp, found {', '.join(sorted(codes)) or 'no finding'}")
    if synced.verdict != "in_sync" or synced.counts.identical != synced.counts.tensors:
        raise DemoFailed("expected every tensor of ddp-syncbn to be identical on both ranks")
    if not report.closures or report.closures[0].synced.max_abs != 0.0:
        raise DemoFailed("expected SyncBatchNorm to close the gap to exactly 0.0")
