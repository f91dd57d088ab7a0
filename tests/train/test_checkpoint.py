"""Checkpoints: their content, atomic writes, and the removal of an earlier run's files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.listings import list_fields, read_files
from support.scenarios import SMALL, load, run, tensors
from support.states import list_differing

from train.checkpoints.checkpoint_files import check_writable, remove_run, write_atomic
from train.engine import Job, train
from train.errors import UserError
from train.launch import RankContext
from train.models import build_model
from train.recorders.base import Recorder

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

SINGLE = replace(SMALL, method="single", max_steps=3)


def files(folder: Path) -> list[str]:
    """List all files below a folder, including hidden files."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_content_and_metadata(tmp_path: Path) -> None:
    """A checkpoint loads with weights_only, fits a new model and optimizer, and its metadata describes the run."""
    result = train(replace(SINGLE, max_steps=50, optimizer="adamw", lr=0.01, out=tmp_path), RankContext(), Recorder())
    (path,) = result.saved
    assert path == tmp_path / "single_rank0.pth"
    content = load(path)
    assert list(content) == ["model", "optimizer", "epoch", "step", "syncheck"]
    assert (content["epoch"], content["step"]) == (1, 50)
    model = build_model("resnet8", 1, 10, 4)
    model.load_state_dict(content["model"])
    torch.optim.AdamW(model.parameters()).load_state_dict(content["optimizer"])
    block = content["syncheck"]
    assert block == json.loads(json.dumps(block))
    assert {block[key] for key in ("run", "rank", "world_size", "step", "epoch")} == {"single", 0, 1, 50}
    assert block["buffers_synced"] is True
    assert block["buffers"] == [name for name, _ in model.named_buffers()]
    assert block["optimizer_parameters"] == [name for name, _ in model.named_parameters()]
    assert block["config"]["batch_size"] == 32
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors(path).values())


@pytest.mark.syncheck(ranks=2)
def test_metadata_of_ddp_variants(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Only the ranks of a run share its run id, and the settings of `ddp` and `ddp-syncbn` differ in `sync_bn` only."""
    short = replace(SMALL, max_steps=2, out=syncheck_rank.shared)
    variants = {
        "ddp": (short, True),
        "ddp-syncbn": (replace(short, sync_bn=True), True),
        "ddp-nobufsync": (replace(short, buffer_sync=False), False),
    }
    blocks = {}
    for name, (settings, synced) in variants.items():
        run(ctx, settings)
        ranks = [load(settings.out / f"{name}_rank{rank}.pth")["syncheck"] for rank in range(2)]
        blocks[name] = ranks[0]
        assert list_fields(ranks, "rank") == [0, 1]
        assert set(list_fields(ranks, "run_id")) == {ranks[0]["run_id"]}
        assert set(list_fields(ranks, "buffers_synced")) == {synced}
        assert set(list_fields(ranks, "run")) == {name}
    assert len(set(list_fields(blocks.values(), "run_id"))) == 3
    first, second = blocks["ddp"]["config"], blocks["ddp-syncbn"]["config"]
    assert {key for key in first if first[key] != second[key]} == {"sync_bn"}


def test_the_first_save_replaces_the_earlier_run(tmp_path: Path) -> None:
    """The files of an earlier run with the same name stay until the first save, and their number is returned."""
    ctx = RankContext()
    settings = replace(SINGLE, out=tmp_path, save_every=1)
    assert train(settings, ctx, Recorder()).replaced == 0
    before = read_files(tmp_path.rglob("*.pth"))
    Job(settings, ctx)  # all that a run does before its first step
    assert read_files(tmp_path.rglob("*.pth")) == before
    result = train(replace(settings, save_every=None, max_steps=2), ctx, Recorder())
    assert result.replaced == len(before) == 4
    assert files(tmp_path) == ["single_rank0.pth"]


def test_safetensors_is_flat(tmp_path: Path) -> None:
    """A safetensors file has model tensors, optimizer tensors named after their parameter, and metadata as JSON."""
    from safetensors import safe_open

    for save_format in ("pth", "safetensors"):
        train(replace(SINGLE, save_format=save_format, out=tmp_path / save_format), RankContext(), Recorder())
    content = load(tmp_path / "pth" / "single_rank0.pth")
    names = content["syncheck"]["optimizer_parameters"]
    momenta = {
        f"optimizer.{names[index]}.momentum_buffer": state["momentum_buffer"]
        for index, state in content["optimizer"]["state"].items()
    }
    with safe_open(tmp_path / "safetensors" / "single_rank0.safetensors", "pt") as file:
        stored_values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        strings = file.metadata()
    assert "optimizer.fc.weight.momentum_buffer" in stored_values
    assert set(stored_values) == set(content["model"]) | set(momenta)
    assert not list_differing(content["model"] | momenta, stored_values)
    block = json.loads(strings["syncheck"])
    assert (block["run"], strings["step"], strings["epoch"]) == ("single", "3", "0")


def test_history_has_every_nth_step(tmp_path: Path) -> None:
    """--save-every 2 writes steps 2 and 4 of 5, and the final file is of step 5."""
    result = train(replace(SINGLE, max_steps=5, save_every=2, out=tmp_path), RankContext(), Recorder())
    expected = ["history/single/step_2/rank_0.pth", "history/single/step_4/rank_0.pth", "single_rank0.pth"]
    assert files(tmp_path) == expected
    assert [str(path.relative_to(tmp_path)) for path in result.saved] == expected
    assert [load(path)["step"] for path in result.saved] == [2, 4, 5]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every write from now on fail because the disk is full."""

    def refuse(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("train.checkpoints.checkpoint_files.os.fsync", refuse)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, the older checkpoint stays intact, no temporary file remains, and the error is one line."""
    path = tmp_path / "ddp_rank0.pth"
    write_atomic(path, b"old")
    fill_disk(monkeypatch)
    with pytest.raises(UserError, match=rf"^cannot write {path}: No space left on device$"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == ["ddp_rank0.pth"]


def test_interrupted_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a write keeps the older checkpoint, and leaves no temporary file."""
    path = tmp_path / "ddp_rank0.pth"
    write_atomic(path, b"old")

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("train.checkpoints.checkpoint_files.os.fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == ["ddp_rank0.pth"]


@pytest.mark.syncheck(ranks=2)
def test_a_full_disk_stops_all_ranks(ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rank 1 cannot write, all ranks raise the same error, and the files of the earlier run stay unchanged."""
    settings = replace(SMALL, out=syncheck_rank.shared)
    run(ctx, settings)
    before = read_files(settings.out.iterdir())
    syncheck_rank.barrier()
    if ctx.rank == 1:
        fill_disk(monkeypatch)
    path = settings.out / "ddp_rank1.pth"
    with pytest.raises(UserError, match=rf"^rank 1: cannot write {path}: No space left on device$"):
        run(ctx, settings)
    syncheck_rank.barrier()
    assert read_files(settings.out.iterdir()) == before


def test_a_run_replaces_its_own_files_only(tmp_path: Path) -> None:
    """A run removes its earlier files of any rank, step and format, and keeps all other files."""
    own_values = [
        "ddp_rank0.pth",
        "ddp_rank11.safetensors",
        ".ddp_rank1.pth.tmp",
        "history/ddp/step_5/rank_3.pth",
        "history/ddp/step_12/.rank_0.safetensors.tmp",
    ]
    remaining = [
        "ddp-syncbn_rank0.pth",
        "ddp-nobufsync_rank1.pth",
        "my-ddp_rank0.pth",
        "ddp_rank0.pth.bak",
        "ddp_rankings.pth",
        "history/ddp-syncbn/step_5/rank_0.pth",
        "history/ddp/step_12/notes.txt",
        "history/ddp/step_best/rank_0.pth",
    ]
    for name in (*own_values, *remaining):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    remove_run(tmp_path, "ddp")
    assert files(tmp_path) == sorted(remaining)
    assert not (tmp_path / "history" / "ddp" / "step_5").exists()
    remove_run(tmp_path, "ddp-syncbn")
    assert (tmp_path / "history").is_dir()  # another run may be about to write there


def test_a_run_on_fewer_ranks_removes_older_files(tmp_path: Path) -> None:
    """A run on one rank removes rank 1's file of an earlier run with the same name."""
    (tmp_path / "single_rank1.pth").write_bytes(b"old")
    (tmp_path / "ddp_rank1.pth").write_bytes(b"other")
    train(replace(SINGLE, save_format="safetensors", out=tmp_path), RankContext(), Recorder())
    assert files(tmp_path) == ["ddp_rank1.pth", "single_rank0.safetensors"]


def test_unwritable_folder_removes_nothing(tmp_path: Path) -> None:
    """If --out is unwritable, the check raises UserError and removes no file."""
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"^cannot write to --out .*: (Not a directory|File exists)$"):
        check_writable(tmp_path / "file")
    assert files(tmp_path) == ["file"]
