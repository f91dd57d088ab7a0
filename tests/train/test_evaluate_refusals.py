"""`python -m train.evaluate` on invalid input: one line per refusal, exit code 2, and no code from a file runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.evaluated import FIXTURES, SYNCED, change, copy_synced
from support.scenarios import NEEDS_FSDP, SMALL, load, run

from train.errors import UserError
from train.evaluate.__main__ import main
from train.evaluate.replicas import find_replicas, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.testing import Rank
    from train.launch import RankContext


@pytest.fixture
def synced(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of two equal ranks."""
    return copy_synced(tmp_path)


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
def test_shards_are_refused(ctx: RankContext, syncheck_rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards of an FSDP model are refused with the reason and the fix; other runs are evaluated as usual."""
    run(ctx, replace(SMALL, method="fsdp", max_steps=1, out=syncheck_rank.shared))
    assert main([str(syncheck_rank.shared), str(FIXTURES / "in_sync" / "sync_bn")]) == 2
    out, err = capsys.readouterr()
    assert "ddp-syncbn, step 12: accuracy is" in out
    (line,) = err.splitlines()
    assert "fsdp_rank0.pth: 23 of 44 tensors are shards (of fsdp, hsdp, tp or a combination), first conv1" in line
    assert line.endswith("cannot be evaluated alone; train with --method ddp, zero, localsgd, diloco or replicate")


@NEEDS_FSDP
@pytest.mark.syncheck(ranks=2)
def test_copies_as_dtensors_are_evaluated(
    ctx: RankContext, syncheck_rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of --method replicate have DTensors, each with the whole tensor on every rank."""
    run(ctx, replace(SMALL, method="replicate", sync_bn=True, max_steps=1, out=syncheck_rank.shared))
    assert main([str(syncheck_rank.shared)]) == 0
    assert "on every rank: weights and BatchNorm statistics agree" in capsys.readouterr().out


def set_config(**changes: Any) -> Callable[[dict[str, Any]], object]:
    """Return an edit of the trainer's settings in a checkpoint."""
    return lambda content: content["syncheck"]["config"].update(changes)


# Edits of both checkpoints.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no metadata": lambda content: content.pop("syncheck"),
    "another model": set_config(model="vgg"),
    "huge": set_config(width=65536),
    "width": set_config(width="4"),
    "many channels": set_config(width=10**30),
    "a list": set_config(model=["resnet8"]),
    "one width only": set_config(model="tv_resnet18"),
    "a tensor more": lambda content: content["model"].update({"fc.1.weight": torch.zeros(2)}),
    "half precision": lambda content: content["model"].update({"fc.bias": content["model"]["fc.bias"].half()}),
    "no model": lambda content: content.update(model={}, net=content["model"]),
}
# Arguments of the program, with the folder as {}.
ARGUMENTS = {"no match": ["{}/*.bin"], "data": ["{}", "--data-dir", "{}"], "option": ["{}", "--nope"]}


def damage(name: str, folder: Path) -> list[str]:
    """Damage the checkpoints of two ranks in one way; return the arguments of the program."""
    second = folder / SYNCED.format(1)
    if name in EDITS:
        change(folder / SYNCED.format(0), EDITS[name])
        change(second, EDITS[name])
    elif name == "other data":
        change(second, set_config(data="svhn"))
    elif name == "alone":
        second.unlink()
    elif name == "cut":
        second.write_bytes(second.read_bytes()[:5000])
    return [argument.format(folder) for argument in ARGUMENTS.get(name, ["{}"])]


@pytest.mark.parametrize(
    "name, message",
    [
        ("alone", "rank 0 has no other replica"),
        ("no metadata", "metadata"),
        ("another model", "model 'vgg'"),
        ("huge", "found float32 [4, 1, 3, 3], expected float32 [65536, 1, 3, 3]"),
        ("width", "width '4' "),
        ("many channels", " 65536, "),
        ("a list", ": model ["),
        ("one width only", "ddp-syncbn_rank0.pth: --width 4: "),
        ("other data", "data 'svhn'"),
        ("a tensor more", "fc.1.weight does not fit resnet8: found float32 [2], "),
        ("half precision", "fc.bias does not fit resnet8: found float16 [10], expected float32 [10]"),
        ("no model", "conv1.weight does not fit resnet8: found no tensor, expected float32 [4, 1, 3, 3]"),
        ("no match", "*.bin"),
        ("data", "--data-dir"),
        ("option", "unrecognized arguments: --nope"),
    ],
)
def test_refuses_invalid_files_and_options(
    name: str, message: str, synced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid file or option produces one line with the reason, exit code 2, and no table."""
    code = main(damage(name, synced))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("evaluate.py: ")
    assert message in line


def test_reports_a_truncated_file(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A truncated file and the rank left without a replica are reported, and the exit code is 2."""
    assert main(damage("cut", synced)) == 2
    err = capsys.readouterr().err
    assert SYNCED.format(1) in err
    assert "rank 0 has no other replica" in err


def test_a_malicious_pickle_does_not_run(synced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that would create a folder during loading is refused, and the folder does not exist."""
    trap = synced.parent / "trap"

    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.mkdir, (trap,)  # type: ignore[return-value]

    (replicas,), _ = find_replicas([str(synced)])
    for rank in range(2):
        content = load(synced / SYNCED.format(rank))
        torch.save({**content, "extra": Trap()}, synced / SYNCED.format(rank))
    assert main([str(synced)]) == 2
    assert SYNCED.format(0) in capsys.readouterr().err
    # load_weights also refuses a file changed since find_replicas read it.
    with pytest.raises(UserError, match="cannot be loaded"):
        load_weights(replicas.files[0])
    assert not trap.exists()
