"""`syncheck compare`: options, exit codes and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from support.checkpoints import changed, network, save_pth, save_safetensors

import syncheck as library

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.checkpoints import Done

    Run = Callable[..., Done]
    Ranks = Callable[..., list[Path]]

SCHEMA = json.loads((Path(library.__file__).parent / "report" / "schema.json").read_text())
BN = ("running_mean", "running_var")


def parse_document(done: Done) -> dict[str, Any]:
    """Parse the JSON output of a run and validate the document against the schema."""
    data: dict[str, Any] = json.loads(done.out)
    jsonschema.validate(data, SCHEMA)
    return data


def test_in_sync_exits_with_0(cli: Run, ranks: Ranks) -> None:
    """For equal replicas, the exit code is 0, and the last line counts the tensors."""
    ranks()
    done = cli("compare", "run_rank0.pth", "run_rank1.pth")
    assert (done.code, done.err) == (0, "")
    assert [done.verdict, done.counts] == ["IN SYNC", "14 tensors: 14 identical, 0 close, 0 different, 0 not compared"]


def test_out_of_sync_exits_with_1(cli: Run, ranks: Ranks) -> None:
    """For differing BatchNorm statistics, the exit code is 1, and the finding is printed."""
    ranks(network(), changed(network(), *BN))
    done = cli("compare", "*.pth")
    assert (done.code, done.err) == (1, "")
    assert "SYN201 bn-local-stats (warning, likely) on ranks 0-1" in done.out
    assert [done.verdict, done.counts] == [
        "OUT OF SYNC",
        "14 tensors: 10 identical, 0 close, 4 different, 0 not compared",
    ]


@pytest.mark.parametrize(
    "arguments, code",
    [
        (["--only-params", "--only-buffers"], 1), (["--include", "layer0.*"], 1),
        (["--include", "fc.*", "--include", "*mean"], 1), (["--exclude", "*_mean", "--exclude", "*_var"], 0),
        (["--ulp", "3"], 1), (["--allow", "syn201"], 0), (["--exit-zero", "-q"], 0), (["-q"], 1), (["-n", "0"], 1),
        (["-n", "1"], 1), (["--only-optimizer"], 2), (["--only-rng"], 2), (["--include", "nothing*"], 2),
        (["--exclude", "*"], 2), (["--exit-zero", "--include", "nothing*"], 2), (["--atol", "0.1"], 2),
        (["--rtol", "0", "--atol", "inf"], 2), (["--ulp", "1.5"], 2), (["-o", "out.pdf"], 2),
        (["--format", "yaml"], 2), (["--nonsense"], 2), (["--color", "red"], 2), (["-o", "no/such/folder.json"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_options_decide_the_exit_code(cli: Run, ranks: Ranks, arguments: list[str], code: int) -> None:
    """Options select or accept differences; for invalid options and empty selections, the exit code is 2."""
    ranks(network(), changed(network(), *BN))
    done = cli("compare", "run_rank0.pth", "run_rank1.pth", *arguments)
    assert done.code == code
    assert done.err.count("\n") <= 1
    assert ("-q" in arguments) <= (done.out == "")
    if done.out:
        assert " not compared" in done.lines[-1]


def test_step_counters_alone_are_undecided(cli: Run, tmp_path: Path) -> None:
    """Equal step counters and scalars alone are no evidence about a model: exit code 2."""
    for rank in range(2):
        state = {"w": {"step": np.array(3, np.float32)}}
        tree = {"optimizer": {"state": state, "param_groups": [{"params": ["w"]}]}, "epoch": 3}
        save_pth(tmp_path / f"rank{rank}.pth", tree)
    assert cli("compare", "rank0.pth", "rank1.pth").code == 2


def test_rng_is_compared_only_on_request(cli: Run, ranks: Ranks) -> None:
    """RNG states differ by design, so they count as not compared unless --only-rng selects them."""
    ranks(*({**network(), "rng": np.full(8, rank, np.int64)} for rank in range(2)))
    done = cli("compare", "*.pth")
    assert done.code == 0
    assert done.lines[-1] == "15 tensors: 14 identical, 0 close, 0 different, 1 not compared"
    assert cli("compare", "*.pth", "--only-rng").code == 1


@pytest.mark.parametrize("kind", ["missing", "shape", "dtype", "value"])
def test_missing_and_changed_tensors_are_out_of_sync(cli: Run, ranks: Ranks, kind: str) -> None:
    """A missing tensor and a tensor with another shape, dtype or value are out of sync."""
    second = network()
    if kind == "missing":
        del second["fc.bias"]
    else:
        second["fc.bias"] = {
            "shape": np.zeros(11, np.float32),
            "dtype": second["fc.bias"].astype(np.float64),
            "value": second["fc.bias"] + np.float32(1),
        }[kind]
    ranks(network(), second)
    done = cli("compare", "*.pth", "--format", "json")
    assert done.code == 1
    (finding,) = parse_document(done)["groups"][0]["findings"]
    assert finding["code"] == {"missing": "SYN101", "value": "SYN299"}.get(kind, "SYN102")
    assert finding["tensors"] == ["fc.bias"]


def test_pth_against_safetensors(cli: Run, tmp_path: Path) -> None:
    """Formats can be mixed: equal bytes in a .pth and a .safetensors file are in sync."""
    save_pth(tmp_path / "rank0.pth", network())
    save_safetensors(tmp_path / "rank1.safetensors", network())
    assert cli("compare", "rank0.pth", "rank1.safetensors").code == 0
    save_safetensors(tmp_path / "rank1.safetensors", changed(network(), "fc.bias"))
    assert cli("compare", "rank0.pth", "rank1.safetensors").code == 1


def test_json_is_valid_and_alone_on_stdout(cli: Run, ranks: Ranks) -> None:
    """--format json prints only the document, even if a file is unreadable or nothing is compared."""
    paths = ranks(network(), changed(network(), *BN), network())
    data = parse_document(cli("compare", "*.pth", "--format", "json", "-n", "1"))
    assert (data["verdict"], data["counts"]["different"], len(data["groups"][0]["tensors"])) == ("out_of_sync", 4, 4)
    assert data["groups"][0]["findings"][0]["ranks"] == [1]
    assert data["groups"][0]["tensors"][0]["clusters"] == [[0, 2], [1]]
    paths[2].write_bytes(b"")
    done = cli("compare", "*.pth", "--format", "json")
    assert parse_document(done)["unreadable"][0]["path"] == "run_rank2.pth"
    assert done.err.count("\n") == 1
    assert parse_document(cli("compare", "run_rank0.pth", "--format", "json"))["verdict"] == "undecided"
    assert parse_document(cli("compare", "no.pth", "--format", "json"))["groups"] == []


def test_json_of_awkward_values(cli: Run, tmp_path: Path) -> None:
    """NaN, infinities, bytes, complex numbers and huge numbers leave the document valid."""
    for rank in range(2):
        values = {
            "a": float("nan"),
            "b": float("inf") * (1 - 2 * rank),
            "c": b"\xff",
            "d": 1j,
            "e": 10**5000 + rank,
        }
        weight = np.array([np.nan if rank else np.inf, 1], np.float32)
        save_pth(tmp_path / f"rank{rank}.pth", {"w": weight, "step": rank, **values})
    done = cli("compare", "rank0.pth", "rank1.pth", "--format", "json")
    assert done.code == 1, done.err
    assert parse_document(done)["groups"][0]["tensors"][0]["nonfinite"] == {"0": 1, "1": 1}
    assert cli("compare", "rank0.pth", "rank1.pth").code == 1


def test_limit_counts_the_hidden_tensors(cli: Run, ranks: Ranks, tmp_path: Path) -> None:
    """-n limits the printed tensors, but neither the counts nor the files."""
    ranks(network(), changed(network(), *BN))
    done = cli("compare", "*.pth", "-n", "1", "-o", "out.txt")
    assert "... and 3 more; -n 0 shows all" in done.out
    assert "4 different" in done.lines[-1]
    for complete in (cli("compare", "*.pth", "-n", "0").out, (tmp_path / "out.txt").read_text()):
        assert "shows all" not in complete
        assert complete.count("running_") > done.out.count("running_")


def test_names_are_not_broken_in_a_pipe(cli: Run, ranks: Ranks) -> None:
    """In a pipe, a name of 150 characters is printed on one line, without box drawing."""
    name = "encoder." * 18 + "weight"
    ranks(*({name: np.full(3, rank, np.float32)} for rank in range(2)))
    done = cli("compare", "*.pth", COLUMNS="80")
    assert name in done.out
    assert done.out.isascii()


def test_colour(cli: Run, ranks: Ranks) -> None:
    """Colour follows --color, then NO_COLOR, then FORCE_COLOR, and is off in a pipe by default."""
    ranks()
    for arguments, environment, colored in [
        ([], {}, False),
        (["--color", "always"], {}, True),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
    ]:
        done = cli("compare", "run_rank0.pth", "run_rank1.pth", *arguments, **environment)
        assert ("\x1b[" in done.out) == colored, (arguments, environment)
        assert done.code == 0


def test_names_cannot_control_the_terminal(cli: Run, tmp_path: Path) -> None:
    """Markup, escape sequences and line breaks in names, values and paths are escaped, with and without colours."""
    evil = "[red]x[/red]\x1b[31m\nIN SYNC\u202e"
    for rank in range(2):
        tree = {evil: np.full(2, rank, np.float32), "note" + evil: f"{evil}{rank}"}
        save_pth(tmp_path / f"a\x1b[2J_rank{rank}.pth", tree)
    for arguments in ([], ["--color", "always"]):
        done = cli("compare", *sorted(tmp_path.glob("*.pth")), *arguments)
        assert done.code == 1
        assert "[red]x[/red]" in done.out
        assert "\x1b[31m\n" not in done.out
        assert "\x1b[2J" not in done.out
        assert "\u202e" not in done.out
        assert "IN SYNC" not in [line.strip() for line in done.lines]
    cli("compare", *sorted(tmp_path.glob("*.pth")), "-o", "out.html")
    assert "\x1b" not in (tmp_path / "out.html").read_text()


@pytest.mark.slow
def test_closed_pipe(ranks: Ranks, tmp_path: Path) -> None:
    """A reader that stops early, such as `head -1`, causes no traceback."""
    ranks(*({f"w{i}.{'x' * 100}": np.full(1, rank, np.float32) for i in range(2000)} for rank in range(2)))
    command = f"{sys.executable} -m syncheck compare *.pth -n 0 | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout.count("\n"), done.stderr) == (1, "")


def test_installed_command_has_the_same_exit_codes(ranks: Ranks, tmp_path: Path) -> None:
    """`syncheck` and `python -m syncheck` have the same exit codes: in sync 0, out of sync 1, single file 2."""
    script = Path(sys.executable).parent / "syncheck"
    if not script.exists():
        pytest.skip("syncheck is not installed as a command here")
    paths = list(map(str, ranks(network(), changed(network(), "fc.bias"), network())))
    for arguments, code in ((paths[::2], 0), (paths[:2], 1), (paths[:1], 2)):
        for command in ([str(script)], [sys.executable, "-m", "syncheck"]):
            done = subprocess.run([*command, "compare", *arguments], capture_output=True, check=False, env=os.environ)
            assert done.returncode == code
