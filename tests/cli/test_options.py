"""Each option of `compare` and `report` works typed and in [tool.syncheck], and the typed option takes precedence."""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import changed, network, save, save_pth
from support.listings import list_fields, list_names

from syncheck.messages import Note
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

    Run = Callable[..., Done]
    Ranks = Callable[..., list[Path]]

BN = ("running_mean", "running_var")
SMALL = 2.0**-22  # two steps of a float32 near 1


@pytest.fixture
def run(cli: Run, ranks: Ranks, tmp_path: Path) -> Run:
    """Run a command in a folder with two ranks whose running statistics differ.

    table: the lines of [tool.syncheck] in the folder's pyproject.toml.
    """
    ranks(network(), changed(network(), *BN))

    def run_command(*arguments: str, table: str = "", command: str = "compare") -> Done:
        (tmp_path / "pyproject.toml").write_text(f"[tool.syncheck]\n{table}\n")
        return cli(command, *(arguments or ("run_*.pth",)))

    return run_command


@pytest.mark.parametrize(
    ("typed", "table", "override", "codes"),
    [
        (["--close"], "close = true", ["--no-close"], (0, 1)),
        (["--rtol=0", "--atol=2"], "rtol = 0\natol = 2", ["--ulp=1"], (0, 1)),
        (["--rtol=0", "--atol=2"], "rtol = 0\natol = 2", ["--rtol=0", "--atol=0.5"], (0, 1)),
        (["--ulp=4000000000"], "ulp = 4_000_000_000", ["--ulp=0"], (0, 1)),
        (["--exit-zero"], "exit_zero = true", ["--no-exit-zero"], (0, 1)),
        (["--allow=SYN201"], "allow = ['SYN201']", ["--allow=SYN203"], (0, 1)),
        (["--only-params"], "only = ['params']", ["--only-buffers"], (0, 1)),
        (["--include=fc.*"], "include = ['fc.*']", ["--include=*"], (0, 1)),
        (["--exclude=*running_*"], "exclude = ['*running_*']", ["--exclude=fc.*"], (0, 1)),
        (
            ["--only-buffers", "--buffers=fc.*", "--include=fc.*"],
            "only = ['buffers']\nbuffers = ['fc.*']\ninclude = ['fc.*']",
            ["--only-buffers", "--buffers=nothing", "--include=*"],
            (0, 1),
        ),
        (["--group-by=rank0"], "group_by = 'rank0'", ["--group-by=rank"], (2, 1)),
        ([], "tolerance.bn_mean = {rtol=0, atol=2}\ntolerance.'*_var' = {rtol=0, atol=2}", ["--ulp=0"], (0, 1)),
        ([], "tolerance.bn_mean = {rtol=0, atol=2}", ["--rtol=0", "--atol=2"], (1, 0)),
    ],
)
@pytest.mark.parametrize("command", ["compare", "report"])
def test_typed_options_override_the_file(
    run: Run, tmp_path: Path, command: str, typed: list[str], table: str, override: list[str], codes: tuple[int, int]
) -> None:
    """An option has the same exit code typed and in the file; stderr lists the file's options; typed options win."""
    if "close" in table:
        save(tmp_path / "run_rank1.pth", changed(network(), *BN, by=SMALL))
    if typed:
        assert run("run_*.pth", *typed, command=command).code == codes[0]
    done = run("run_*.pth", table=table, command=command)
    keys = ", ".join(tomllib.loads(table))
    assert (done.code, done.err) == (codes[0], f"syncheck: options from {tmp_path}/pyproject.toml: {keys}\n")
    for arguments, code in ((override, codes[1]), (["--no-config"], 1)):
        done = run("run_*.pth", *arguments, table=table, command=command)
        assert (done.code, done.err) == (code, "")


def test_errors_of_the_file_are_one_line(run: Run, tmp_path: Path) -> None:
    """An invalid value in the file ends both commands with 2 before anything is compared."""
    for command in ("compare", "report"):
        done = run("run_*.pth", table="allow = ['SYN999']", command=command)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert done.err.startswith(f"syncheck: error: {tmp_path}/pyproject.toml: allow='SYN999'")


def test_report_without_a_path(cli: Run, run: Run, tmp_path: Path) -> None:
    """`report` reads a given path, else the file's checkpoints, else the folder ckpts; `compare` requires a path."""
    file = tmp_path / "pyproject.toml"
    for rank in range(2):
        save_pth(tmp_path / "ckpts" / f"other_rank{rank}.pth", network())
    file.write_text("[tool.syncheck]\ncheckpoints = ['run_*.pth']\n")
    done = cli("report")
    assert (done.code, done.err) == (1, f"syncheck: options from {file}: checkpoints\n")
    done = cli("report", "ckpts")
    assert (done.code, done.err) == (0, "")
    assert cli("report", "--no-config").code == 0
    assert cli("compare").code == 2
    file.write_text("[tool.syncheck]\ncheckpoints = ['nothing/*.pth']\n")
    assert "nothing/*.pth: no file matches" in cli("report").err
    file.write_text("[tool.syncheck]\n")
    assert cli("report").code == 0


def test_the_applied_tolerance_is_printed(run: Run) -> None:
    """Text and JSON name the tolerance entry that accepted a tensor as close."""
    table = "[tool.syncheck.tolerance]\n'*_mean' = {rtol=0, atol=2}\nbn_var = {rtol=0, atol=3}"
    done = run("run_*.pth", table=table)
    assert done.code == 0
    assert "4 of 4, close: rtol=0 atol=2 (tolerance of *_mean)" in done.out
    assert "4 of 4, close: rtol=0 atol=3 (tolerance of bn_var)" in done.out
    tensors = json.loads(run("run_*.pth", "--format", "json", table=table).out)["groups"][0]["tensors"]
    assert set(list_fields(tensors, "reason")) == {
        "rtol=0 atol=2 (tolerance of *_mean)",
        "rtol=0 atol=3 (tolerance of bn_var)",
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--close", "--rtol", "0", "--atol", "0"], "--close --rtol 0.0 --atol 0.0: cannot be combined"),
        (["--close", "--ulp", "1"], "--close --ulp 1: cannot be combined"),
        (["--rtol", "0.5"], "--rtol and --atol belong together"),
        (["--rtol", "2", "--atol", "0"], "--rtol 2.0 --atol 0.0: must be"),
        (["--ulp", "-1"], "--ulp -1: must be"),
        (["--allow", "SYN999"], "--allow SYN999: no such code"),
        (["--allow", "bn-local-stats"], "--allow bn-local-stats: no such code; its code is SYN201"),
        (["--group-by", "("], "--group-by '(': not a regular expression"),
        (["--reference", "7"], "--reference 7: no replica has this rank or path; there are ranks 0, 1: run_rank0.pth"),
        (["--reference", "no.pth"], "--reference no.pth: no replica has this rank or path"),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--jobs", "all"], "argument --jobs: must be a whole number"),
        (["--limit", "-1"], "--limit -1: must be at least 0"),
        (["--limit", "x"], "argument -n/--limit: must be a whole number"),
        (["--rtol", "x"], "argument --rtol: must be a number"),
        (["--rtol", "nan", "--atol", "0"], "--rtol nan --atol 0.0: must be"),
        (["--update-baseline"], "--update-baseline: requires --baseline FILE"),
    ],
)
def test_wrong_usage_names_the_typed_option(run: Run, arguments: list[str], text: str) -> None:
    """Wrong usage exits with 2 and prints one line with the typed option, and nothing is compared."""
    done = run("run_*.pth", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"error: {text}" in done.err


def test_a_glob_without_a_match_stops_the_comparison(run: Run) -> None:
    """A glob without a match exits with 2 before the comparison, because the result would be incomplete.

    A missing file is listed, and the other files are compared.
    """
    done = run("run_*.pth", "nothing*.pth")
    assert (done.code, done.out) == (2, "")
    assert "nothing*.pth: no file matches" in done.err
    done = run("run_*.pth", "nothing.pth")
    assert (done.code, done.verdict) == (1, "OUT OF SYNC, and 1 file could not be read")


@pytest.mark.parametrize("command", ["compare", "report"])
def test_reference(run: Run, tmp_path: Path, command: str) -> None:
    """Findings name the ranks that differ from the reference, a rank or path; the typed reference takes precedence."""
    save(tmp_path / "run_rank2.pth", network())

    def suspects(*arguments: str, table: str = "") -> list[int]:
        done = run("run_*.pth", "--format", "json", *arguments, table=table, command=command)
        assert done.code == 1
        ranks: list[int] = json.loads(done.out)["groups"][0]["findings"][0]["ranks"]
        return ranks

    assert suspects() == [1]
    assert suspects("--reference", "1") == [0, 2]
    assert suspects("--reference", "run_rank1.pth") == [0, 2]
    assert suspects(table="reference = 1") == [0, 2]
    assert suspects(table="reference = 'run_rank1.pth'") == [0, 2]
    assert suspects("--reference", "0", table="reference = 1") == [1]
    assert str(Note.REFERENCE(rank=1)) in run("run_*.pth", "--reference", "1").out


def test_jobs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads reaches the readers from --jobs, else from the file."""
    received: list[int | None] = []
    real_init = Files.__init__

    def spy(self: Files, limit: int = 8, jobs: int | None = None) -> None:
        received.append(jobs)
        real_init(self, limit, jobs)

    monkeypatch.setattr(Files, "__init__", spy)
    for arguments, table in (([], ""), (["--jobs", "3"], ""), ([], "jobs = 2"), (["--jobs", "3"], "jobs = 2")):
        assert run("run_*.pth", *arguments, table=table).code == 1
    assert received == [None, 3, 2, 3]


def test_quick(run: Run, tmp_path: Path) -> None:
    """Damage after saving is found in the data but not by --quick; --no-quick takes precedence over the file."""
    path = tmp_path / "run_rank0.pth"
    data = path.read_bytes()
    (tmp_path / "run_rank1.pth").write_bytes(data)
    weight = network()["fc.weight"].tobytes()
    assert data.count(weight) == 1
    path.write_bytes(data.replace(weight, bytes(len(weight))))
    for arguments, table, code in (
        ([], "", 1),
        (["--quick"], "", 0),
        ([], "quick = true", 0),
        (["--no-quick"], "quick = true", 1),
    ):
        assert run("run_*.pth", *arguments, table=table).code == code


def test_group_by(run: Run, tmp_path: Path) -> None:
    """Files with unrelated names are compared if the expression groups them, and the typed expression wins."""
    for name in ("alice", "bob"):
        save(tmp_path / f"final-{name}.pth", network())
    files = ("final-alice.pth", "final-bob.pth")
    separate, joint = "final-(alice|bob)", "(final)"
    assert run(*files, "--group-by", separate).code == 2
    assert run(*files, table=f"group_by = '{separate}'").code == 2
    assert run(*files, "--group-by", joint, table=f"group_by = '{separate}'").code == 0


def test_buffers(run: Run, tmp_path: Path) -> None:
    """--buffers, typed or from the file, declares a tensor as a buffer; the typed option takes precedence."""
    for rank in range(2):
        values = np.full(2, rank, np.float32)
        save_pth(tmp_path / f"plain_rank{rank}.pth", {"fc.weight": np.ones(2, np.float32), "memory": values})
    files = ("plain_rank0.pth", "plain_rank1.pth", "--only-params")
    assert run(*files).code == 1
    assert run(*files, "--buffers", "mem*").code == 0
    assert run(*files, table="buffers = ['mem*']").code == 0
    assert run(*files, "--buffers", "nothing", table="buffers = ['mem*']").code == 1


def test_format(run: Run) -> None:
    """The file can set JSON, which stays the only output on stdout; --format text takes precedence."""
    done = run("run_*.pth", table="format = 'json'\nallow = ['SYN201']")
    assert (json.loads(done.out)["verdict"], done.err.count("\n")) == ("in_sync", 1)
    assert run("run_*.pth", "--format", "text", table="format = 'json'").verdict == "OUT OF SYNC"


def test_output(run: Run, tmp_path: Path) -> None:
    """Typed outputs replace the outputs of the file; the error for an invalid output names pyproject.toml."""
    assert run("run_*.pth", table="output = ['a.json', 'a.md']").code == 1
    assert sorted(list_names(tmp_path.glob("a.*"))) == ["a.json", "a.md"]
    assert run("run_*.pth", "-o", "b.txt", table="output = ['c.json']").code == 1
    assert (tmp_path / "b.txt").exists()
    assert not (tmp_path / "c.json").exists()
    done = run("run_*.pth", table="output = ['a.pdf']")
    assert (done.code, done.out) == (2, "")
    assert "pyproject.toml: output='a.pdf': unknown file extension" in done.err
    done = run("run_*.pth", table="output = ['no/folder/a.json']")
    assert done.code == 2
    assert "pyproject.toml: output='no/folder/a.json': cannot be written: the folder" in done.err


def test_limit(run: Run) -> None:
    """The number of rows comes from -n, else from the file, and 0 prints all rows."""
    assert "... and 3 more; -n 0 shows all" in run("run_*.pth", table="limit = 1").out
    assert "... and 2 more; -n 0 shows all" in run("run_*.pth", "-n", "2", table="limit = 1").out
    assert "shows all" not in run("run_*.pth", "-n", "0", table="limit = 1").out
    assert "shows all" not in run("run_*.pth", table="limit = 0").out
    assert "... and 3 more; -n 0 shows all" in run("run_*.pth", "-n", "1", table="limit = 0").out


def test_quiet(run: Run) -> None:
    """The file can suppress the report, --no-quiet prints the report, and errors are always printed."""
    done = run("run_*.pth", table="quiet = true\nulp = 1")
    assert (done.code, done.out, done.err) == (1, "", "")
    done = run("run_*.pth", "--no-quiet", table="quiet = true")
    assert done.verdict == "OUT OF SYNC"
    assert run("nothing*.pth", table="quiet = true").err.startswith("syncheck: error: nothing*.pth")


def test_color(run: Run) -> None:
    """The colour comes from --color, else from the file."""
    assert "\x1b[" in run("run_*.pth", table="color = 'always'").out
    assert "\x1b[" not in run("run_*.pth", "--color", "never", table="color = 'always'").out


def test_options_that_affect_the_result_are_listed(run: Run, tmp_path: Path) -> None:
    """stderr lists the file's options that affect the verdict or the exit code, but not the options for printing."""
    table = "exit_zero = true\nlimit = 3\ncolor = 'never'\nreference = 0\njobs = 2"
    path = tmp_path / "pyproject.toml"
    done = run("run_*.pth", table=table)
    assert (done.code, done.err) == (0, f"syncheck: options from {path}: reference, jobs, exit_zero\n")
    assert run("run_*.pth", "--no-exit-zero", table=table).err == f"syncheck: options from {path}: reference, jobs\n"


@pytest.mark.parametrize("path", ["x.zzz", "missing/x.json"])
def test_a_wrong_output_names_its_source(run: Run, path: str) -> None:
    """An output with an unknown extension or folder names pyproject.toml, unless it was typed."""
    table = f"output = [{path!r}]"
    from_file, typed = run(table=table), run("run_*.pth", "-o", path, table=table)
    assert from_file.code == typed.code == 2
    assert ("pyproject.toml" in from_file.err, "pyproject.toml" in typed.err) == (True, False)
