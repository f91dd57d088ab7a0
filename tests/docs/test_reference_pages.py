"""The generated parts of the documents are up to date."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from operator import attrgetter
from pathlib import Path
from textwrap import indent

import jsonschema
import pytest
from support.listings import list_fields, list_files

import syncheck
from syncheck import live, testing
from syncheck.cli import main
from syncheck.diagnose.rules import list_rules
from syncheck.live.witnesses.rules import WITNESS_RULES
from syncheck.options import TOML, list_options
from syncheck.parity.causes import PARITY_RULES

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


def page(name: str) -> str:
    """Return the text of a page."""
    return (REFERENCE / name).read_text(encoding="utf-8")


def blocks(name: str) -> str:
    """Return the generated blocks of a page."""
    return "\n".join(re.findall(r"<!-- made: [a-z-]+ -->\n(.*?)<!-- /made -->", page(name), re.DOTALL))


def run_make(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run make.py of a clone or of a copy."""
    command = [sys.executable, str(folder / "docs" / "reference" / "make.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy make.py and all pages; the code and the results of the benchmarks are links."""
    for name in ("syncheck", "train", "fixtures", "benchmarks", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for file in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *REFERENCE.rglob("*.py"),
        *REFERENCE.rglob("*.toml"),
    ]:
        target = tmp_path / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    return tmp_path


@pytest.mark.slow
def test_pages_are_up_to_date() -> None:
    """`make.py --check` passes on the pages of the clone."""
    done = run_make(ROOT, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
def test_outdated_pages_are_reported(copy: Path) -> None:
    """A changed table cell and number fail the check, which names the pages; without --check they are restored."""
    changes = {
        copy / "README.md": (r"(<!-- result: resnet18-s -->)[\d.]+", r"\g<1>0.001"),
        copy / "docs/reference/commands.md": (r"\| `--group-by REGEX` \|", "| `--group REGEX` |"),
    }
    texts = {path: path.read_text(encoding="utf-8") for path in changes}
    for path, (pattern, changed) in changes.items():
        outdated, count = re.subn(pattern, changed, texts[path])
        assert count == 1
        path.write_text(outdated, encoding="utf-8")
    done = run_make(copy, "--check")
    lines = [f"{path}: out of date; run: python docs/reference/make.py\n" for path in changes]
    assert (done.returncode, done.stdout, done.stderr) == (1, "".join(lines), "")
    assert run_make(copy).returncode == 0
    assert {path: path.read_text(encoding="utf-8") for path in changes} == texts


@pytest.mark.slow
def test_number_follows_the_results(copy: Path) -> None:
    """A new benchmark result changes the number on the page; a result that is missing is an error."""
    (copy / "benchmarks").unlink()
    (copy / "benchmarks").mkdir()
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    row = r"\| `import torch` \| [\d.]+ \|"
    changed, count = re.subn(row, "| `import torch` | 7.891 |", results)
    assert count == 1
    (copy / "benchmarks" / "RESULTS.md").write_text(changed, encoding="utf-8")
    assert run_make(copy).returncode == 0
    assert "<!-- result: import-torch-s -->7.9<!-- /result -->" in (copy / "README.md").read_text(encoding="utf-8")
    (copy / "benchmarks" / "RESULTS.md").write_text(re.sub(f"{row}.*\n", "", results), encoding="utf-8")
    done = run_make(copy, "--check")
    assert done.returncode == 1
    assert "KeyError: \"RESULTS.md: compare: no row 'import torch'" in done.stderr


@pytest.mark.slow
def test_a_release_refuses_numbers_of_another_version(copy: Path) -> None:
    """--release fails while a section of the results was measured with another version than that of the project."""
    (copy / "benchmarks").unlink()
    (copy / "benchmarks").mkdir()
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    current = re.sub(r"\bsyncheck \d[\w.]*", f"syncheck {version}", results)
    (copy / "benchmarks" / "RESULTS.md").write_text(current, encoding="utf-8")
    assert run_make(copy, "--release").returncode == 0
    old = current.replace(f"syncheck {version}", "syncheck 0.0.1", 1)
    (copy / "benchmarks" / "RESULTS.md").write_text(old, encoding="utf-8")
    done = run_make(copy, "--release")
    assert (done.returncode, done.stdout) == (
        1,
        "RESULTS.md: measured with syncheck 0.0.1: compare; run: python -m benchmarks\n",
    )


def test_no_number_mark_begins_a_line() -> None:
    """Markdown renders a line that begins with a comment as HTML, without emphasis, links and code."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    matches = {str(path): re.findall(r"^ *<!-- result: .*", path.read_text(encoding="utf-8"), re.M) for path in pages}
    assert {path: lines for path, lines in matches.items() if lines} == {}


def test_measured_times_are_generated() -> None:
    """Outside marks, generated blocks and code, no page states a time or a ratio with a number."""
    # The times on these pages are timeouts, or results of `python -m train.bench`.
    remaining = {"bench.md", "data.md", "resume.md", "running.md", "stopping.md"}
    pages = {ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *REFERENCE.glob("*.md")}
    pages -= {ROOT / "docs" / name for name in remaining}
    generated = re.compile(
        r"<!-- (made|result): .*?<!-- /\1 -->|```.*?```|^    .*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE
    )
    measured = re.compile(r"\b\d[\d.,]* (?:s|ms|seconds|microseconds|times as)\b")
    matches = {str(path): measured.findall(generated.sub("", path.read_text(encoding="utf-8"))) for path in pages}
    assert {path: times for path, times in matches.items() if times} == {}


def test_every_finding_has_a_page() -> None:
    """Each finding has a page with its code and slug as the title; the pages link to incidents."""
    texts = [path.read_text(encoding="utf-8") for path in (REFERENCE / "findings").glob("*.md")]
    titles = [re.match(r"# (SYN\d{3}) ([a-z0-9-]+)\n", text) for text in texts]
    rules = [*list_rules(), *WITNESS_RULES, *PARITY_RULES]
    assert {title.groups() for title in titles if title} == set(list_fields(rules, "code", "slug"))
    assert len(re.findall(r"github\.com/[\w.-]+/[\w.-]+/issues/\d+", "".join(texts))) > 50


@pytest.mark.parametrize("path", sorted((REFERENCE / "findings").glob("*.md")), ids=attrgetter("stem"))
def test_each_page_has_an_example(path: Path) -> None:
    """The example of a page prints this finding, with its fix."""
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^## Example\n\n.*\n\n```\n  {path.stem.upper()} ", text, re.MULTILINE)
    assert re.search(r"^    fix +\S", text, re.MULTILINE)


@pytest.mark.parametrize("path", sorted((REFERENCE / "findings").glob("*.md")), ids=attrgetter("stem"))
def test_each_page_follows_the_template(path: Path) -> None:
    """A page has its headings in one order, a colored severity, and wrong and right code that is Python or commands."""
    text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
    template = ["Signature", "Example", "Cause", "Fix", "Wrong", "Right", "When it is no problem", "Incidents"]
    assert headings == [heading for heading in template if heading in headings]
    assert set(template[1:-1]) - {"Cause"} <= set(headings)
    assert re.search(r'^Severity: <span class="severity (error|warning|info)">\1</span>\. ', text, re.MULTILINE)
    for language, body in re.findall(r"^```(python|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            # Some lines are from a loop of a function.
            ast.parse("def step():\n  for _ in range(1):\n" + indent(body, "    "))
        else:
            assert all(line.startswith("$ ") for line in body.splitlines())


def test_symptoms_lead_to_findings() -> None:
    """The page by symptom links to most findings, and the code in each link is that of the page."""
    text = (ROOT / "docs" / "by-symptom.md").read_text(encoding="utf-8")
    links = re.findall(r"\[(SYN\d+)\]\(reference/findings/(syn\d+)\.md\)", text)
    assert len(links) > 40
    assert [code for code, page in links if code.lower() != page] == []


@pytest.mark.slow
def test_pages_of_findings_are_written_and_removed(copy: Path) -> None:
    """The page of a finding that was edited or removed is written, and the page of an unknown finding is deleted."""
    folder = copy / "docs" / "reference" / "findings"
    (folder / "syn201.md").write_text("edited")
    (folder / "syn202.md").unlink()
    (folder / "syn999.md").write_text("unknown")
    done = run_make(copy, "--check")
    assert (done.returncode, sorted(re.findall(r"syn\d+", done.stdout))) == (1, ["syn201", "syn202", "syn999"])
    assert run_make(copy).returncode == 0
    assert set(list_files(folder)) == set(list_files(REFERENCE / "findings"))


def test_every_option_and_key_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """commands.md lists every option in the help of each command, and configuration.md every key."""
    commands, keys = page("commands.md"), page("configuration.md")
    names = re.findall(r"^## ([a-z]+)$", commands, re.MULTILINE)
    assert len(names) > 5
    for name in names:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        for option in re.findall(r"^\s+(--?[a-z][a-z-]*)", capsys.readouterr().out, re.MULTILINE):
            assert option in ("-h", "--help") or f"`{option}" in commands, f"{name} {option}"
    assert [name for name in list_options(TOML) if f"| `{name}` |" not in keys] == []


def test_every_field_is_described() -> None:
    """Every field of the JSON document and of a public record has a description."""
    rows = re.findall(
        r"^\| (`.*) \|$",
        "".join(blocks(path.name) for path in REFERENCE.glob("*.md") if path.name.startswith(("json", "api"))),
        re.MULTILINE,
    )
    assert len(rows) > 150
    assert [row for row in rows if row.rstrip().endswith("|")] == []


def test_json_example_is_valid(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example equals the output of the command above it, and is valid under the schema."""
    (command, example) = re.findall(
        r"^    (syncheck [^\n]*)\n\n```json\n(.*?)```", page("json-example.md"), re.M | re.S
    )[0]
    monkeypatch.chdir(ROOT)
    assert main([*command.split()[1:], "--no-config"]) == 1
    printed = json.loads(capsys.readouterr().out)
    document = json.loads(example)
    assert printed | {"version": ""} == document | {"version": ""}
    schema = json.loads((ROOT / "syncheck" / "report" / "schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | {"verdict": "alone"}, schema)


def test_api_equals_the_imported_names() -> None:
    """The arguments and defaults on the page, read from the source, equal the imported signatures."""
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("api*.md")))
    for module in (syncheck, live, testing):
        for name in module.__all__:
            assert f"### {module.__name__}.{name}\n" in text, name
            result = getattr(module, name)
            if inspect.isfunction(result):
                output = re.search(rf"### {module.__name__}\.{name}\n\n```python\n(.*?)```", text, re.DOTALL)
                assert output is not None
                parameters = inspect.signature(result).parameters
                assert re.findall(r"\**(\w+)(?:: |=)", output[1]) == list(parameters)
                for key, parameter in parameters.items():
                    if parameter.default is not parameter.empty and key != "budget":  # the page has 4 << 30
                        assert re.search(rf"\b{key}: [^=]* = {re.escape(repr(parameter.default))}", output[1]), key


@pytest.mark.parametrize(("name", "printed"), [("compare", "in_sync 14\n"), ("read", "bn1.running_mean float32 (4,)")])
def test_examples_of_the_api_run(name: str, printed: str) -> None:
    """The examples without torch work on files of the clone."""
    (example,) = re.findall(rf"### syncheck\.{name}\n.*?```.*?```.*?```python\n(.*?)```", page("api.md"), re.DOTALL)
    folder = "fixtures/desync/bn_local_stats"
    files = f"{folder}/ddp_rank0.pth" if name == "read" else f"{folder}/*.pth"
    program = "from syncheck import Options, compare, read\n" + re.sub(r'"ckpts/[^"]*"', repr(files), example)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert printed in done.stdout


def test_no_page_is_long() -> None:
    """Documents have at most 250 lines, except the changelog, the results of the benchmarks, and the generated list of
    commands, which grows with each option."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md")]
    pages.remove(ROOT / "docs" / "reference" / "commands.md")
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in pages}
    assert {name: length for name, length in lengths.items() if length > 250} == {}
