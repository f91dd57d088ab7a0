"""No output of any command replaces an input, a checkpoint, or a link to one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import tomllib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import Done, network, save_pth, save_safetensors
from support.marks import slow
from support.states import replace_in_names

import syncheck
from syncheck.conversion.map_files import write_map
from syncheck.conversion.name_maps import NameMap, Rule
from syncheck.errors import OptionError, UsageError
from syncheck.live.reporter import Reporter
from syncheck.options import EXTENSIONS, DiffOptions
from syncheck.readers import outputs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., Done]

# Each command with an output; TARGET is the path of the output. The inputs are of every kind that a command reads.
TWO = ("run_rank0.json", "run_rank1.json")
MODELS = ("a.json", "b.safetensors")
COMMANDS = {
    "compare -o": ("compare", *TWO, "-o", "TARGET"),
    "compare --update-baseline": ("compare", *TWO, "--update-baseline", "--baseline", "TARGET"),
    "compare FOLDER": ("compare", ".", "-o", "TARGET"),
    "report -o": ("report", *TWO, "-o", "TARGET"),
    "report --update-baseline": ("report", *TWO, "--update-baseline", "--baseline", "TARGET"),
    "report EVENTS": ("report", "events.jsonl", "-o", "TARGET"),
    "diff -o": ("diff", *MODELS, "-o", "TARGET"),
    "diff --write-map": ("diff", *MODELS, "--write-map", "TARGET"),
    "diff --update-baseline": ("diff", *MODELS, "--update-baseline", "--baseline", "TARGET"),
    "fingerprint -o": ("fingerprint", TWO[0], "-o", "TARGET"),
}
# Paths that no output may replace.
TARGETS = {
    "input": "run_rank0.json",
    "input of diff": "a.json",
    "spelling of an input": "./sub/../a.json",
    "other checkpoint": "other.json",
    "symbolic link": "link.json",
    "link to a link": "second.json",
    "hard link": "hard.json",
    "link in another folder": "sub/link.json",
    "folder": "folder.json",
    "folder with a slash": "new.json/",
    "shard": "whole/model-00001-of-00001.safetensors",
    "index of a checkpoint folder": "whole/model.safetensors.index.json",
    "settings of a checkpoint folder": "whole/config.json",
    "file below a checkpoint folder": "whole/original/params.json",
    "link into a checkpoint folder": "index.json",
    "unknown binary format": "gguf.json",
    "damaged checkpoint": "damaged.pth",
}

# On Linux, /dev/stdout is a link into /proc.
NEEDS_STREAMS = pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="no /dev/stdout here")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Write inputs, checkpoints and links, and return the content of each file by its path."""
    for name in TWO:
        save_pth(tmp_path / name, network())
    save_pth(tmp_path / "other.json", network(1))
    tensors = {f"layers.{i}.weight": np.random.default_rng(i).standard_normal((4, 3), np.float32) for i in range(3)}
    save_safetensors(tmp_path / "a.safetensors", tensors)
    (tmp_path / "a.safetensors").rename(tmp_path / "a.json")
    save_safetensors(tmp_path / "b.safetensors", replace_in_names(tensors, "layers", "h"))
    check = {"event": "check", "time": "2026-01-01T00:00:00", "step": 1, "verdict": "in_sync", "tensors": 1}
    check |= {"compared": 1, "seconds": 0.1, "overhead": 0.1, "findings": []}
    (tmp_path / "events.jsonl").write_text(json.dumps(check) + "\n")
    complete = tmp_path / "whole"
    save_safetensors(complete / "model-00001-of-00001.safetensors", network())
    names = dict.fromkeys(network(), "model-00001-of-00001.safetensors")
    (complete / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (complete / "config.json").write_text('{"num_attention_heads": 2}')
    (complete / "original").mkdir()
    (complete / "original" / "params.json").write_text('{"dim": 4096}')
    (tmp_path / "gguf.json").write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    (tmp_path / "damaged.pth").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to("other.json")
    (tmp_path / "second.json").symlink_to("link.json")
    (tmp_path / "sub" / "link.json").symlink_to(tmp_path / "a.json")
    (tmp_path / "index.json").symlink_to("whole/model.safetensors.index.json")
    os.link(tmp_path / "a.json", tmp_path / "hard.json")
    return read_files(tmp_path)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder, with the target of each link."""
    content = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            link = os.readlink(path).encode() if path.is_symlink() else b""
            content[str(path.relative_to(folder))] = link + b":" + path.read_bytes()
    return content


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_nothing_is_replaced(
    cli: Run, files: dict[str, bytes], tmp_path: Path, command: tuple[str, ...], target: str
) -> None:
    """Each command refuses to replace an input, a checkpoint and a link to one: exit code 2, and no file changes."""
    done = cli(*[target if argument == "TARGET" else argument for argument in command])
    is_folder = target == "new.json/" or "folder" in target
    if command[0] == "fingerprint" and is_folder and target.endswith(("/", "folder.json")):
        assert done.code == 0  # the folder for the fingerprints
    else:
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
    assert {path: data for path, data in read_files(tmp_path).items() if path in files} == files


@pytest.mark.parametrize("extension", [".html", ".md", ".txt", ".xml", ".json"])
def test_inputs_of_other_kinds_are_protected(cli: Run, files: dict[str, bytes], tmp_path: Path, extension: str) -> None:
    """A map, a baseline, settings, a file of events and options of a project are inputs, also through a link."""
    (tmp_path / "map.toml").write_text('[[rule]]\nname = "layers.{i}.weight"\nparts = ["h.{i}.weight"]\n')
    (tmp_path / "pyproject.toml").write_text("[tool.syncheck]\nlimit = 3\n")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    assert cli("compare", *TWO, "--baseline", "known.json", "--update-baseline").code == 0
    for name in ("map.toml", "known.json", "events.jsonl", "pyproject.toml"):
        link = tmp_path / f"link-to-{name}{extension}"
        link.symlink_to(name)
        before = read_files(tmp_path)
        inputs = ("report", "events.jsonl") if name == "events.jsonl" else ("diff", *MODELS, "--map", "map.toml")
        baseline = ("--baseline", "known.json") if name == "known.json" else ()
        assert cli(*inputs, *baseline, "-o", link.name).code == 2
        assert read_files(tmp_path) == before
    assert cli("diff", *MODELS, "-o", "config.json").code == 2
    assert cli("diff", *MODELS, "--map", "map.toml", "--write-map", "map.toml").code == 2
    assert read_files(tmp_path) == before


@NEEDS_STREAMS
def test_other_files_are_protected(cli: Run, files: dict[str, bytes], tmp_path: Path) -> None:
    """A map, a fingerprint and events, whose names may have any extension, never replace a file of another program."""
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "latest").write_text("global_step500")
    (tmp_path / "weights.onnx").write_bytes(b"\x08\x07\x12\x07pytorch")
    before = read_files(tmp_path)
    for target in ("train.py", "latest", "weights.onnx"):
        assert cli("diff", *MODELS, "--write-map", target).code == 2
        assert cli("fingerprint", TWO[0], "-o", target).code == 2
        Reporter(console=False, events=tmp_path / target).write_event("start", step=0)
    assert read_files(tmp_path) == before
    with open("log", "a", encoding="utf-8") as file:  # a redirected stream is appended to
        file.write("earlier line\n")
        file.flush()
        command = [sys.executable, "-m", "syncheck", "diff", "-q", *MODELS, "--write-map", "/dev/stdout"]
        subprocess.run(command, stdout=file, check=False)
    assert (tmp_path / "log").read_text().startswith("earlier line\n[[rule]]")


def test_two_outputs_of_one_run_are_different_files(cli: Run, files: dict[str, bytes], tmp_path: Path) -> None:
    """A report, a baseline and a map of the same path are refused, also through a link; nothing is written."""
    (tmp_path / "page.html").symlink_to("x.json")
    for command in (
        ("compare", *TWO, "-o", "x.json", "--baseline", "./x.json", "--update-baseline"),
        ("diff", *MODELS, "-o", "x.json", "--write-map", "x.json"),
        ("diff", *MODELS, "-o", "x.json", "-o", "page.html"),
    ):
        assert cli(*command).code == 2
        assert not (tmp_path / "x.json").exists()
    assert cli("compare", *TWO, "-o", "x.json", "-o", "./x.json").code == 0  # the same report twice


@pytest.mark.parametrize("folder", ["", *slow("whole/")])
def test_earlier_outputs_are_replaced(cli: Run, files: dict[str, bytes], folder: str) -> None:
    """Every kind of output replaces an earlier output and an empty file, also in a checkpoint folder."""
    targets = [f"--output={folder}report{extension}" for extension in EXTENSIONS]
    for _ in range(2):
        assert cli("compare", *TWO, *targets).code == 0
        assert cli("diff", TWO[0], "other.json", *targets).code == 1
        assert cli("compare", TWO[0], *targets).code == 2  # one replica
        baseline = ("--baseline", f"{folder}known.json", "--update-baseline")
        assert cli("diff", TWO[0], "other.json", *baseline).code == 0
        cli("diff", *MODELS, "--write-map", f"{folder}map.toml")
        with open(f"{folder}map.toml", encoding="utf-8") as file:
            assert "[[rule]]" in file.read()
        assert cli("fingerprint", TWO[0], "-q", "-o", f"{folder}print.json").code == 0


def test_the_api_protects_files(cli: Run, files: dict[str, bytes], tmp_path: Path) -> None:
    """`diff(write_map=)` raises before it reads a file, and a monitor disables its events instead of stopping."""
    cli("explain")  # changes to the folder
    for target in ("a.json", "link.json", "hard.json", "whole/config.json"):
        with pytest.raises(OptionError):
            syncheck.diff("missing.pth", "b.safetensors", options=DiffOptions(write_map=target))
        reporter = Reporter(console=False, events=tmp_path / target)
        reporter.write_event("start", step=0)
        reporter.write_event("end", step=0)
    assert read_files(tmp_path) == files
    for events in (tmp_path / "new.jsonl", "events.jsonl"):
        for _ in range(2):  # a second run appends
            Reporter(console=False, events=events).write_event("start", step=0)
    assert len((tmp_path / "new.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "events.jsonl").read_bytes().startswith(files["events.jsonl"][1:])


def test_a_change_during_the_comparison_is_detected(tmp_path: Path) -> None:
    """The path is checked again when the output is written, hours after the first check."""
    out = tmp_path / "out.json"
    outputs.check(str(out))
    save_pth(out, network())
    before = out.read_bytes()
    with pytest.raises(OptionError):
        outputs.write(str(out), "{}")
    assert out.read_bytes() == before


@NEEDS_STREAMS
def test_a_map_goes_to_pipes_and_streams(cli: Run, files: dict[str, bytes], tmp_path: Path) -> None:
    """--write-map accepts /dev/stdout, redirected or not, /dev/null and a named pipe."""
    cli("explain")
    command = [sys.executable, "-m", "syncheck", "diff", "-q", *MODELS, "--write-map"]
    piped = subprocess.run([*command, "/dev/stdout"], capture_output=True, text=True, check=False).stdout
    assert tomllib.loads(piped)["rule"]
    with open("redirected", "w", encoding="utf-8") as file:
        subprocess.run([*command, "/dev/stdout"], stdout=file, check=False)
    assert (tmp_path / "redirected").read_text() == piped
    os.mkfifo("pipe")
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_text()))
    reader.start()
    cli(*command[3:], "pipe")
    reader.join(10)
    assert received == [piped]
    cli(*command[3:], "/dev/null")
    with open("a.json", "rb") as file:  # a descriptor of an input
        done = subprocess.run([*command, f"/dev/fd/{file.fileno()}"], pass_fds=[file.fileno()], check=False)
    assert done.returncode == 2
    assert (tmp_path / "a.json").read_bytes() == files["a.json"][1:]


@pytest.mark.parametrize(
    "name", ["\x00\x01\x1f\x7f\x80", "\"'\\", "{{0}}{{i.__class__}}{{", "a\nb\r\t", "\u2028\ufeff\U0001f600", "#=[]"]
)
def test_every_name_is_valid_toml(tmp_path: Path, name: str) -> None:
    """A written map is TOML that contains every name unchanged."""
    path = tmp_path / "map.toml"
    write_map(str(path), NameMap("test", (Rule(name, (name, "x")),), ((name, "y"),)))
    document = tomllib.loads(path.read_bytes().decode())
    assert document == {"tied": [[name, "y"]], "rule": [{"name": name, "parts": [name, "x"]}]}


@pytest.mark.parametrize("name", ["{0}{i.__class__}{", ""])
def test_a_map_that_would_be_refused_is_not_written(tmp_path: Path, name: str) -> None:
    """No file is left that `--map` refuses: one without a name, or with a placeholder that does not exist."""
    with pytest.raises(UsageError):
        write_map(str(tmp_path / "map.toml"), NameMap("test", (Rule(name, (name, "x")),), ((name, "y"),)))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_toml_cannot_store(tmp_path: Path) -> None:
    """A name with a lone surrogate cannot be written: an error of one line, and no file."""
    with pytest.raises(OptionError):
        write_map(str(tmp_path / "map.toml"), NameMap("test", (Rule("\ud800", ("x",)),), ()))
    assert list(tmp_path.iterdir()) == []
