"""Every given path is either compared, or counted with a reason."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import find_first, find_texts, join_fields, list_codes, list_fields

import syncheck
from syncheck.diagnose import baseline, series
from syncheck.report import github, junit, markdown, plain, text
from syncheck.report.json_document import render as render_json

if TYPE_CHECKING:
    from collections.abc import Callable


def save(path: str, b: float = 0.0, **extra: object) -> Path:
    """Save a model of two tensors. b: added to the second."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    tree = {"model": {"w": np.ones(3, np.float32), "b": np.zeros(2, np.float32) + np.float32(b)}, **extra}
    return save_pth(Path(path), tree)


def metadata(rank: int, step: int, world_size: int) -> dict[str, object]:
    """Return a metadata block as `syncheck.metadata` writes it."""
    return {"syncheck": {"run": "ddp", "rank": rank, "step": step, "world_size": world_size}}


def save_files(values: dict[str, float], *given: str, **links: str) -> Callable[[], list[str]]:
    """Save files, and links to files or new folders. given: the arguments; by default, all files."""

    def write() -> list[str]:
        for path, b in values.items():
            save(path, b)
        for link, target in links.items():
            if not os.path.exists(target):
                os.makedirs(target)
            os.symlink(target, link)
        return list(given or values)

    return write


def hard_link() -> list[str]:
    save("c/rank0.pth")
    os.link("c/rank0.pth", "c/rank1.pth")
    return ["c"]


def linked_checkpoint_folder() -> list[str]:
    for name in ("model.safetensors", "optimizer.pt"):
        save(f"rank0/{name}")
    Path("rank0/config.json").write_text("{}")
    os.makedirs("rank1")
    for name in os.listdir("rank0"):
        os.link(f"rank0/{name}", f"rank1/{name}")
    return ["rank0", "rank1"]


def partly_linked_checkpoint_folder() -> list[str]:
    linked_checkpoint_folder()
    os.remove("rank1/optimizer.pt")
    shutil.copy("rank0/optimizer.pt", "rank1/optimizer.pt")
    return ["rank0", "rank1"]


def with_other_file(name: str, data: bytes, folder: str = "c") -> Callable[[], list[str]]:
    def write() -> list[str]:
        save("c/rank_0"), save("c/rank_2")
        Path(folder).mkdir(exist_ok=True)
        Path(folder, name).write_bytes(data)
        return ["c"]

    return write


def archived() -> list[str]:
    save("c/rank0.pt"), save("c/rank1.pt")
    Path("c/rank2.pt.gz").write_bytes(gzip.compress(save("other/rank2.pt", 1).read_bytes()))
    return ["c"]


def other_step_by_metadata() -> list[str]:
    for rank, step, folder in ((0, 5, "a"), (1, 5, "a"), (2, 4, "b")):
        save(f"{folder}/x_rank{rank}.pth", float(folder == "b"), **metadata(rank, step, 3))
    return ["a/x_rank0.pth", "a/x_rank1.pth", "b/x_rank2.pth"]


def hosts(by: str, blocks: bool) -> Callable[[], list[str]]:
    def write() -> list[str]:
        for rank in range(4):
            block = metadata(rank, 5 + rank // 2, 4) if blocks else {}
            save(f"prints/{by.split()[rank // 2]}/rank{rank}.pth", float(rank > 1), **block)
        return ["prints"]

    return write


def ranks_of_nodes(pattern: str) -> Callable[[], list[str]]:
    def write() -> list[str]:
        for node in range(2):
            for local in range(2):
                save(pattern.format(node, local), float(node))
        return ["."]

    return write


ROWS: dict[str, tuple[Callable[[], list[str]], set[int]]] = {
    "1 a folder above a link": (
        save_files(
            {"x_rank0": 0, "x_rank1": 0, "elsewhere/x_rank0": 1},
            "x_rank0",
            "x_rank1",
            "link/../x_rank0",
            link="elsewhere/deep",
        ),
        {1},
    ),
    "1 a folder that ends above a link": (
        save_files({"x_rank0.pth": 0, "y/x_rank0.pth": 1, "y/x_rank1.pth": 0}, "link/..", link="y/deep"),
        {1},
    ),
    "2 a link to a file": (save_files({"rank0.pth": 0}, "rank0.pth", "rank1.pth", **{"rank1.pth": "rank0.pth"}), {2}),
    "2 a hard link": (hard_link, {2}),
    "2 a link to a folder, given": (save_files({"rank0/model.pth": 0}, "rank0", "rank1", rank1="rank0"), {2}),
    "2 a folder of links": (linked_checkpoint_folder, {2}),
    "2 a folder of some links": (partly_linked_checkpoint_folder, {2}),
    "3 empty": (with_other_file("rank_1", b""), {2}),
    "3 zeros": (with_other_file("rank_1", bytes(1000)), {2}),
    "3 another ending": (with_other_file("rank_1.npz", b"PK\x03\x04 no checkpoint"), {2}),
    "3 a text": (with_other_file("rank_1.th", b"text"), {2}),
    "3 half written": (with_other_file("rank_1.part", b"text"), {2}),
    "3 in another folder": (with_other_file("rank_1", b"", "c/copy"), {2}),
    "3 an archive": (archived, {2}),
    "3 a rank without a file": (save_files({"c/rank0/model.pth": 0, "c/rank2/model.pth": 0}, "c", link="c/rank1"), {2}),
    "4 another host": (save_files({"a/rank0": 0, "a/rank1": 0, "b/rank2": 1}), {1, 2}),
    "4 another epoch": (save_files({"epoch10_rank0": 0, "epoch10_rank1": 0, "epoch9_rank2": 1}), {1, 2}),
    "4 another word": (save_files({"master.pth": 1, "rank1.pth": 0, "rank2.pth": 0}), {1, 2}),
    "4 another step and folder": (other_step_by_metadata, {1, 2}),
    "4 another name": (save_files({"x0.pth": 0, "x1.pth": 0, "other.pth": 1}), {1, 2}),
    "8 hosts": (hosts("alpha beta", blocks=False), {1}),
    "8 hosts with metadata": (hosts("alpha beta", blocks=True), {1}),
    "8 addresses": (hosts("10.0.1.5 10.0.2.7", blocks=False), {1}),
    "8 addresses with metadata": (hosts("10.0.1.5 10.0.2.7", blocks=True), {1}),
    "9 node_rank": (ranks_of_nodes("node_rank{}_local_rank{}.pth"), {1}),
    "9 node and rank": (ranks_of_nodes("node{}/rank{}.pth"), {1}),
    "9 group_rank": (ranks_of_nodes("group_rank_{}/local_rank_{}.pth"), {1}),
    "9 gpu": (ranks_of_nodes("node{}_gpu{}.pth"), {1}),
    "9 host and gpu": (ranks_of_nodes("host{}-gpu{}.pth"), {1}),
}


@pytest.mark.parametrize("row", ROWS)
def test_every_given_file_is_reported(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that differs, is missing or is not compared never gives "in sync", and links are reported."""
    monkeypatch.chdir(tmp_path)
    write, codes = ROWS[row]
    report = syncheck.compare(*write())
    assert report.exit_code in codes
    if report.exit_code == 1 and row[0] in "89":
        assert [len(group.replicas) for group in report.groups] == [4]
        code = "SYN106" if "metadata" in row else "SYN230"  # the steps differ too
        assert code in list_codes(report.groups[0].findings)
    if row[0] == "2":
        reported = list_fields(report.aliases, "path") + list_fields(report.unreadable, "path")
        assert find_texts(reported, "rank1")
        if report.aliases:  # unreadable files are printed separately from the report
            assert all("rank1" in drawn for drawn in render_all(report))


def render_all(report: syncheck.Report) -> list[str]:
    """Return a report in every text format."""
    drawn = [plain.render(source_value(report, 0)) for source_value in (text.draw_comparison, text.draw_overview)]
    return [
        *drawn,
        github.render(report),
        junit.render(report),
        markdown.render(report),
        render_json(report, "0"),
    ]


def test_links_beside_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link with_other_file two replicas is reported in every format, and the replicas are compared."""
    monkeypatch.chdir(tmp_path)
    save("c/rank0/model.pth"), save("c/rank2/model.pth")
    os.symlink("rank0", "c/rank1")
    for path, source_value in (("c/rank1", "c/rank0"),):
        report = syncheck.compare("c")
        assert (report.exit_code, list_fields(report.aliases, "path", "of")) == (0, [(path, source_value)])
        assert all(path in drawn for drawn in render_all(report))
    save("c/rank2/model.pth", 1)
    assert syncheck.compare("c").exit_code == 1
    report = syncheck.compare("c/rank0", "c/rank1", "c/rank2")
    assert (report.exit_code, list_fields(report.aliases, "path")) == (1, ["c/rank1/model.pth"])


def test_other_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, settings, samples and notes in a folder are counted, and do not affect the verdict."""
    monkeypatch.chdir(tmp_path)
    for step in (100, 200):
        for rank in (0, 1):
            save(f"c/step_{step}/rank_{rank}.pth")
            Path(f"c/step_{step}/rank_{rank}.json").write_text("{}")
    for name in ("logs/rank_0.log", "logs/rank_7.txt", "images/3.png", "README.md", "config.yaml", "metrics_12.json"):
        (Path("c") / name).parent.mkdir(exist_ok=True)
        (Path("c") / name).write_text("text")
    report = syncheck.compare("c")
    assert (report.exit_code, report.skipped, len(report.groups)) == (0, 10, 2)
    # Every folder of models has such files, which no reader of a report looks for.
    assert report.skipped_paths == ()
    assert not any("not checkpoints" in drawn for drawn in render_all(report)[:4])


def test_files_that_may_be_checkpoints_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the files that are no notes or settings, the first are named with the number of all, in every format."""
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        save(f"c/rank_{rank}.pth")
    for name in ("config.json", "tokenizer.model", "LICENSE", "a.part", "b.part", "c.part", "d.part"):
        Path("c", name).write_text("text")
    report = syncheck.compare("c")
    assert (report.exit_code, report.skipped) == (0, 7)
    assert report.skipped_paths == ("c/a.part", "c/b.part", "c/c.part")
    assert all("7 files are not checkpoints" in drawn for drawn in render_all(report)[:4])
    assert all(path in drawn for drawn in render_all(report)[:4] for path in report.skipped_paths)


@pytest.mark.parametrize("command", ["compare", "diff"])
def test_a_single_other_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """A file that is no checkpoint is named with the number of such files, for replicas and for two models."""
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        save(f"c/rank_{rank}.pth")
    save("d/model.pth"), save("e/model.pth")
    for folder in "cde":
        Path(folder, "weights.part").write_text("text")
    report = syncheck.compare("c") if command == "compare" else syncheck.diff("d", "e")
    expected = ("c/weights.part",) if command == "compare" else ("d/weights.part", "e/weights.part")
    assert (report.exit_code, report.skipped, report.skipped_paths) == (0, len(expected), expected)
    assert all(path in drawn for drawn in render_all(report)[:4] for path in expected)
    assert json.loads(render_json(report, "0"))["skipped_paths"] == [*expected]


def test_an_earlier_step_that_differs_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a run differs at step 1 and agrees at step 2, every report shows the finding and its step."""
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        for rank in (0, 1):
            save(f"c/step_{step}/rank_{rank}.pth", float(step == rank == 1))
    report = syncheck.compare("c")
    assert report.exit_code == 1
    code = report.groups[0].findings[0].code
    for drawn in render_all(report):
        assert code in drawn
        assert "step 1" in drawn or '"step": 1' in drawn or 'value="1"' in drawn


def test_a_failing_step_is_shown_before_a_later_known_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a baseline has only the finding of step 2, the same finding on another tensor at step 1 fails and is shown."""
    monkeypatch.chdir(tmp_path)
    for rank in (0, 1):
        weights = {"w": np.ones(3, np.float32) + np.float32(rank), "b": np.zeros(2, np.float32)}
        save(f"c/step_1/rank_{rank}.pth", model=weights)
        save(f"c/step_2/rank_{rank}.pth", 5.0 + rank)
    findings = syncheck.compare("c")
    first, last = findings.groups
    assert set(list_codes(first.findings)) == set(list_codes(last.findings))
    known_values = frozenset(entry for entry in baseline.update_baseline(findings, frozenset()) if "b" in entry)
    report = baseline.apply_baseline(findings, known_values)
    assert list_fields(report.findings, "fails") == [True, False]
    assert list_fields(series.shown_steps(report.groups), "step") == [1, 2]


def random_folder(seed: int, root: Path) -> tuple[list[str], list[Path]]:
    """Write replicas of a run over hosts, ranks and steps, with other files with_other_file them.

    Returns the arguments and the paths of the replicas.
    """
    rng = random.Random(seed)
    per_host, hosts_n, steps = rng.randint(1, 3), rng.randint(1, 3), rng.sample(range(1, 500), rng.randint(1, 2))
    host = rng.choice(["node{}", "10.0.0.{}", "gpu-{}.local", "host-{}", "h{}"])
    name = rng.choice(
        ["rank{}.pth", "ddp_rank_{}.pt", "m.rank-{}.ckpt", "rank_{}/model.pth", "rank{}-of-9.pt", "rank{}"]
    )
    step_first = rng.random() < 0.5
    files = []
    for step in steps:
        for rank in range(max(2, per_host * hosts_n)):
            of_host = host.format(rank // per_host) if hosts_n > 1 else ""
            parts = [f"step_{step}", of_host] if step_first else [of_host, f"step_{step}"]
            path = root.joinpath(*filter(None, parts), name.format(rank))
            save(str(path), **(metadata(rank, step, 9) if seed % 2 else {}))
            files.append(path)
    for _ in range(rng.randint(0, 3)):
        bystander = rng.choice(files).parent / rng.choice(
            ["notes.txt", "config.json", ".hidden", "events.out.1234", "x.log"]
        )
        bystander.write_text("text")
    if rng.random() < 0.3:
        (root / "latest").symlink_to(os.path.relpath(files[-1].parent, root))
    settings = [str(root)] if rng.random() < 0.6 else [str(file) for file in files]
    return settings, files


@pytest.mark.parametrize("seed", range(60))
def test_any_folder(seed: int, tmp_path: Path) -> None:
    """Equal replicas are in sync in any folders; a changed element, a damaged file or a lost replica is noticed."""
    settings, files = random_folder(seed, tmp_path / "c")
    before = syncheck.compare(*settings)
    assert before.exit_code == 0, list_fields(before.groups, "name", "notes") + list(before.unreadable)
    matches = sorted(list_fields(join_fields(before.groups, "replicas"), "path"))
    assert len(matches) == len(files)
    rng = random.Random(seed)
    victim = rng.choice(files)
    intact = victim.read_bytes()
    # One element of one replica.
    step = next(int(part[5:]) for part in victim.parts if part.startswith("step_"))
    rank = find_first(join_fields(before.groups, "replicas"), path=str(victim)).rank
    save(str(victim), 2.0**-20, **(metadata(rank, step, 9) if seed % 2 else {}))
    assert syncheck.compare(*settings).exit_code == 1
    # A damaged file.
    victim.write_bytes(rng.choice([b"", bytes(len(intact)), intact[: len(intact) // 2]]))
    assert syncheck.compare(*settings).exit_code == 2
    # A link to another replica.
    second = next(file for file in files if file != victim and f"step_{step}" in file.parts)
    victim.unlink()
    victim.symlink_to(second)
    again = syncheck.compare(*settings)
    assert again.exit_code == 2 or str(victim) in list_fields(again.aliases, "path")
    # An unsupported format.
    victim.unlink()
    np.savez(victim.with_suffix(".npz"), w=np.ones(3))
    if len(settings) == 1:
        assert syncheck.compare(*settings).exit_code == 2
