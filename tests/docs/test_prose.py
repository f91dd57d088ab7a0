"""The English of the documents and of the code stays within the limits of tools/prose.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.marks import slow

from tools.prose import MEASURES, find_dense_sentences, find_exceeded, main, measure_rates, read_passages

ROOT = Path(__file__).resolve().parents[2]
CLUMSY = "Of each file it says what was told, where those that are such tell it, for no others say so.\n"


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "train", *slow("docs", "syncheck")])
def test_rates_are_within_the_limits(path: str) -> None:
    """The text of a path, including its messages, exceeds no limit; a failure lists the sentences to rewrite first."""
    passages = read_passages([ROOT / path], strings=True)
    rates = measure_rates(passages)
    exceeded = {name: f"{rates[name]:.1f}, limit {MEASURES[name].limit}" for name in find_exceeded(rates)}
    dense = [f"{p.path.relative_to(ROOT)}:{p.line}: {p.text}" for p in find_dense_sentences(passages, 20)]
    assert not exceeded, "\n".join([f"{path}: {exceeded}", *dense])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("page.md", CLUMSY),
        ("docstring.py", f'"""{CLUMSY}"""\n'),
        ("comment.py", f"# {CLUMSY}"),
        ("message.py", f"raise ValueError({CLUMSY!r})\n"),
        ("f_string.py", f"raise ValueError(f{'{path}: ' + CLUMSY!r})\n"),
    ],
)
def test_a_clumsy_paragraph_exceeds_the_limits(
    name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clumsy sentence in any kind of text exceeds a limit, and `--max` then exits with 1."""
    page = tmp_path / name
    page.write_text(f"{content}\n")
    assert {"what", "where", "tell/say", "pronouns"} <= {
        *find_exceeded(measure_rates(read_passages([page], strings=True)))
    }
    assert main(["--max", "--strings", "--list", "1", str(page)]) == 1
    assert main(["--strings", str(page)]) == 0
    assert f"{page}:1: " in capsys.readouterr().out


@pytest.mark.parametrize("content", [f"```\n{CLUMSY}```\n", f"    {CLUMSY}", f"`{CLUMSY.strip()}`\n"])
def test_code_in_markdown_is_not_counted(content: str, tmp_path: Path) -> None:
    """Code blocks and inline code are not prose."""
    page = tmp_path / "page.md"
    page.write_text(f"{content}\nEach rank saves a checkpoint.\n")
    assert not find_exceeded(measure_rates(read_passages([tmp_path])))
