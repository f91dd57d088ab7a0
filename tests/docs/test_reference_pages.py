"""What is generated in docs/reference is what the code says today."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import syncheck
from syncheck import live, testing
from syncheck.cli import main
from syncheck.diagnose import RULES
from syncheck.errors import TOML
from syncheck.options import list_options

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def page(name: str) -> str:
    """Return a page's text."""
    return (REFERENCE / name).read_text(encoding="utf-8")


def blocks(name: str) -> str:
    """Return the generated text of a page."""
    return "\n".join(re.findall(r"<!-- made: [a-z-]+ -->\n(.*?)<!-- /made -->", page(name), re.DOTALL))


def test_pages_are_todays(tmp_path: Path) -> None:
    """`make.py --check` passes on the pages of the clone, and in a copy names the one page whose table was changed."""
    command = [sys.executable, str(REFERENCE / "make.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for name in ("syncheck", "train", "fixtures", "benchmarks", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    copied = tmp_path / "docs" / "reference"
    copied.mkdir(parents=True)
    for file in [*REFERENCE.glob("*.py"), *REFERENCE.glob("*.md")]:
        text = file.read_text(encoding="utf-8")
        (copied / file.name).write_text(text.replace("| `--ulp N` |", "| `--ulps N` |"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(copied / "make.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert re.findall(r"\w+\.md", done.stdout) == ["commands.md"]


def test_every_finding_has_an_anchor() -> None:
    """A message may link to `findings.md#syn201`: each code is a heading of its own, and its slug stands below it."""
    headings = dict(re.findall(r"^## (SYN\d{3})\n\n\*\*([a-z0-9-]+)\*\*", page("findings.md"), re.MULTILINE))
    assert headings == {rule.CODE: rule.SLUG for rule in RULES}
    assert len(re.findall(r"github\.com/[\w.-]+/[\w.-]+/issues/\d+", page("findings.md"))) > 50


def test_every_option_and_key_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    """What `--help` prints of a command stands in the page of commands, and every key in that of configuration."""
    commands, keys = page("commands.md"), page("configuration.md")
    names = re.findall(r"^## ([a-z]+)$", commands, re.MULTILINE)
    assert len(names) > 5
    for name in names:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        for option in re.findall(r"^\s+(--?[a-z][a-z-]*)", capsys.readouterr().out, re.MULTILINE):
            assert option in ("-h", "--help") or f"`{option}" in commands, f"{name} {option}"
    assert [name for name in list_options(TOML) if f"| `{name.replace('_', '-')}` |" not in keys] == []


def test_every_field_has_a_meaning() -> None:
    """No field of the JSON document and none of a public record stands there without a word on what it is."""
    rows = re.findall(r"^\| (`.*) \|$", blocks("json.md") + blocks("api.md"), re.MULTILINE)
    assert len(rows) > 150
    assert [row for row in rows if row.rstrip().endswith("|")] == []


def test_json_example_is_a_document(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is what the command above it prints today, and the schema accepts it."""
    (command, example) = re.findall(r"^    (syncheck [^\n]*)\n\n```json\n(.*?)```", page("json.md"), re.M | re.S)[0]
    monkeypatch.chdir(ROOT)
    assert main([*command.split()[1:], "--no-config"]) == 1
    printed = json.loads(capsys.readouterr().out)
    document = json.loads(example)
    assert printed | {"version": ""} == document | {"version": ""}
    schema = json.loads((ROOT / "syncheck" / "report" / "schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"verdict": "alone"}, schema)


def test_api_is_what_python_sees() -> None:
    """Pages are made from the source; what is imported has the arguments that stand there, and their defaults."""
    text = page("api.md")
    for module in (syncheck, live, testing):
        for name in module.__all__:
            assert f"### {module.__name__}.{name}\n" in text, name
            found = getattr(module, name)
            if inspect.isfunction(found):
                shown = re.search(rf"### {module.__name__}\.{name}\n\n```python\n(.*?)```", text, re.DOTALL)
                assert shown is not None
                parameters = inspect.signature(found).parameters
                assert re.findall(r"\**(\w+)(?:: |=)", shown[1]) == list(parameters)
                for key, parameter in parameters.items():
                    if parameter.default is not parameter.empty and key != "budget":  # which stands there as 4 << 30
                        assert re.search(rf"\b{key}: [^=]* = {re.escape(repr(parameter.default))}", shown[1]), key


@pytest.mark.parametrize(("name", "printed"), [("compare", "in_sync 14\n"), ("read", "bn1.running_mean float32 (4,)")])
def test_examples_of_the_api_run(name: str, printed: str) -> None:
    """The examples that need no torch do what they say, on files of the clone."""
    (example,) = re.findall(rf"### syncheck\.{name}\n.*?```.*?```.*?```python\n(.*?)```", page("api.md"), re.DOTALL)
    folder = "fixtures/desync/bn_local_stats"
    files = f"{folder}/ddp_rank0.pth" if name == "read" else f"{folder}/*.pth"
    program = "from syncheck import Options, compare, read\n" + re.sub(r'"ckpts/[^"]*"', repr(files), example)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed in done.stdout
