"""Names that a user probably meant: similar words, beginnings, and paths in the same folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.checkpoints import network, save_pth

import syncheck
from syncheck import suggestions
from syncheck.config import load
from syncheck.conversion.map_files import read_map
from syncheck.errors import SyncheckError
from syncheck.testing import assert_in_sync

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.checkpoints import Done

    Run = Callable[..., Done]

NAMES = ("--only-params", "--only-buffers", "--format")


@pytest.mark.parametrize(
    ("word", "suggestion"),
    [
        ("--only", "; did you mean --only-params or --only-buffers?"),
        ("--formt", "; did you mean --format?"),
        ("--", ""),
        ("", ""),
        ("--zzz", ""),
    ],
)
def test_similar_names(word: str, suggestion: str) -> None:
    """Names with the same beginning come before a similar name, and nothing is suggested for a word without letters."""
    assert suggestions.suggest(word, NAMES) == suggestion


def test_similar_paths(tmp_path: Path) -> None:
    """A similar name in the folder is suggested, unless its numbers differ, or the folder cannot be read."""
    for name in ("ddp_rank0.pth", "model.safetensors"):
        (tmp_path / name).touch()
    assert suggestions.suggest_path(f"{tmp_path}/ddp_rank0.pht") == f"; did you mean {tmp_path}/ddp_rank0.pth?"
    assert suggestions.find_similar_path(f"{tmp_path}/modle.safetensors") == f"{tmp_path}/model.safetensors"
    for missing in (f"{tmp_path}/ddp_rank1.pth", f"{tmp_path}/nowhere/ddp_rank0.pth", "nul\0", ""):
        assert suggestions.find_similar_path(missing) == ""


@pytest.mark.parametrize(
    ("missing", "entry"),
    [("nope.toml", "pyproject.toml"), ("x.json", "a.json"), ("b.safetensors", "model.safetensors"), ("run", "a.pth")],
)
def test_an_equal_extension_makes_no_name_similar(tmp_path: Path, missing: str, entry: str) -> None:
    """A name is suggested only if the part before its extension is similar, too."""
    (tmp_path / entry).touch()
    assert suggestions.find_similar_path(f"{tmp_path}/{missing}") == ""


def test_a_path_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path without a folder is suggested without a folder."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert suggestions.find_similar_path("trian.py") == "train.py"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("comapre", "x"), "compare"),
        (("compare", "--ony-params", "x"), "--only-params"),
        (("compare", "--format", "jsn", "x"), "json"),
        (("compare", "--allow", "SYN2311", "x"), "SYN231"),
        (("compare", "-o", "a.htm", "x"), ".html"),
        (("compare", "run_rank0.pht"), "run_rank0.pth"),
        (("show", "run_rank0.pht"), "run_rank0.pth"),
        (("fingerprint", "run_rank0.pht", "-o", "x.json"), "run_rank0.pth"),
        (("diff", "run_rank0.pth", "run_rank0.pht"), "run_rank0.pth"),
        (("diff", "run_rank0.pth", "run_rank0.pth", "--map", "lama"), "llama"),
        (("diff", "run_rank0.pth", "run_rank0.pth", "--cast", "floa32"), "float32"),
        (("compare", "run_rank0.pth", "--baseline", "knwn.json"), "known.json"),
        (("explain", "syn2011"), "SYN201"),
        (("explain", "bn-local-stat"), "bn-local-stats"),
        (("watch", "--evry", "3", "train.py"), "--every"),
        (("watch", "--on-desync", "rais", "train.py"), "raise"),
        (("watch", "--witnesses", "gradient", "train.py"), "gradients"),
        (("watch", "--only", "param", "train.py"), "params"),
        (("watch", "-o", "a.jsn", "train.py"), ".json"),
        (("watch", "trian.py"), "train.py"),
        (("parity", "x:Y", "--dtyp", "float32"), "--dtype"),
    ],
)
def test_each_command(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], meant: str
) -> None:
    """Each command suggests commands, options, values, codes, formats and paths, in one line with exit code 2."""
    monkeypatch.chdir(tmp_path)
    save_pth(tmp_path / "run_rank0.pth", network())
    for name in ("train.py", "known.json"):
        (tmp_path / name).touch()
    done = cli(*arguments)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert f"id you mean {meant}?" in done.err


@pytest.mark.parametrize("call", [lambda: assert_in_sync("x", ony="params"), lambda: read_map("lama")])
def test_python(call: Callable[[], object]) -> None:
    """Functions suggest names of options and maps too."""
    with pytest.raises(SyncheckError, match="did you mean"):
        call()


def test_keys_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key of pyproject.toml gets a suggestion."""
    (tmp_path / "pyproject.toml").write_text("[tool.syncheck]\nonyl = ['params']\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(syncheck.UsageError, match=r"did you mean only\?"):
        load()
