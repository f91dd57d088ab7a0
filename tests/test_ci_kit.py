"""action.yml, .pre-commit-hooks.yaml and the workflows of docs/ci.md work as documented."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import join_fields, list_fields
from support.required import unavailable
from support.states import omit, omit_prefixes

from syncheck.cli.parser import build_parser
from syncheck.options import PYTEST, list_options
from syncheck.text import to_flag

if TYPE_CHECKING:
    from collections.abc import Callable

yaml = pytest.importorskip("yaml", reason="the extra lint brings it, with pre-commit")

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
GUIDE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(yaml|groovy)\n(.*?)```", GUIDE, re.DOTALL)
IN_SYNC, DESYNC = ROOT / "fixtures" / "in_sync" / "sync_bn", ROOT / "fixtures" / "desync" / "bn_local_stats"
OTHER_PROGRAMS = ("pip install", "torchrun", "python -m venv", ". .venv", "cat ")


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a step of the action as GitHub does, in an empty folder `work`, with this clone's syncheck installed."""
    (tmp_path / "work").mkdir()
    installed = tmp_path / "temp" / "syncheck" / "bin" / "syncheck"
    installed.parent.mkdir(parents=True)
    installed.write_text(f'#!/bin/sh\nexec {sys.executable} -m syncheck "$@"\n')
    installed.chmod(0o755)

    def run(number: int, **given: str) -> subprocess.CompletedProcess[str]:
        step = ACTION["runs"]["steps"][number]
        script = tmp_path / "script.sh"
        script.write_text(step["run"])
        assert step["shell"] == "bash"
        environment = {"PYTHONPATH": str(ROOT)} | dict.fromkeys(step["env"], "") | given
        environment |= {"RUNNER_TEMP": str(tmp_path / "temp"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
        environment |= {"GITHUB_ACTION_PATH": str(ROOT), "GITHUB_ACTIONS": "true", "CI": "true"}
        # https://docs.github.com/en/actions/reference/workflow-syntax-for-github-actions (jobs.<job_id>.steps[*].shell)
        command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)]
        return subprocess.run(
            command, cwd=tmp_path / "work", env=os.environ | environment, capture_output=True, text=True, check=False
        )

    return run


def levels(text: str) -> list[str]:
    """Return the levels of a log's annotations."""
    return re.findall(r"^::(error|warning|notice) ", text, re.MULTILINE)


def test_inputs_reach_the_steps() -> None:
    """Every input is documented and reaches a step through a variable, never in the text of a script."""
    steps = ACTION["runs"]["steps"]
    used = set(re.findall(r"inputs\.([\w-]+)", str(steps)))
    assert used == set(ACTION["inputs"])
    assert all("${{" not in step.get("run", "") for step in steps)
    assert all(list_fields(ACTION["inputs"].values(), "description"))
    listing = re.findall(r"^\| `([\w-]+)` \|", GUIDE, re.MULTILINE)
    assert listing == list(ACTION["inputs"])
    assert re.fullmatch(r"actions/setup-python@[0-9a-f]{40}", steps[0]["uses"])


@pytest.mark.slow
def test_exit_codes_of_the_action(runner: Callable[..., Any], tmp_path: Path) -> None:
    """In sync is exit code 0; out of sync is 1, an unreadable file or unmatched glob 2, with an annotation; the job's
    summary has each report."""
    shutil.copytree(IN_SYNC, tmp_path / "work" / "a b")
    shutil.copytree(DESYNC, tmp_path / "work" / "out")
    fine = runner(2, PATHS="a b/*.pth")
    assert (fine.returncode, levels(fine.stdout)) == (0, [])
    assert fine.stderr.startswith("syncheck: wrote ")
    assert fine.stderr.count("\n") == 1
    differing = runner(2, PATHS="a b/*.pth\nout/*.pth\n", ARGS=" --jobs 1  --exclude nothing* ")
    assert (differing.returncode, levels(differing.stdout)) == (1, ["error"])
    assert "title=SYN201 bn-local-stats" in differing.stdout
    (tmp_path / "work" / "out" / "ddp_rank2.pth").write_bytes(b"junk")
    broken = runner(2, PATHS="out/*.pth", ARGS="--only-params")
    assert (broken.returncode, levels(broken.stdout)) == (2, ["error"])
    assert "syncheck%3A unreadable file" in broken.stdout
    summary = (tmp_path / "summary.md").read_text()
    assert re.findall(r"^## syncheck: (\w+ \w+)", summary, re.MULTILINE) == ["IN SYNC", "OUT OF", "COULD NOT"]
    missing = runner(2, PATHS="none/100%*.pth")
    assert (missing.returncode, levels(missing.stdout)) == (2, ["error"])
    assert "::error title=syncheck could not tell::syncheck: error: none/100%25*.pth: no file matches" in missing.stdout
    assert runner(2, PATHS="").returncode == 2
    assert (tmp_path / "summary.md").read_text() == summary


@pytest.mark.slow
def test_the_action_takes_a_baseline(runner: Callable[..., Any], tmp_path: Path) -> None:
    """Known findings are a warning with exit code 0; a missing baseline is exit code 2."""
    shutil.copytree(DESYNC, tmp_path / "work" / "out")
    settings = {"PATHS": "out/*.pth", "BASELINE": "known findings.json"}
    assert runner(2, **settings).returncode == 2
    assert runner(2, **settings, ARGS="--update-baseline").returncode == 0
    known_values = runner(2, **settings)
    assert (known_values.returncode, levels(known_values.stdout)) == (0, ["warning"])


@pytest.mark.slow
def test_the_action_installs_syncheck(runner: Callable[..., Any], tmp_path: Path) -> None:
    """The first step installs the action's own syncheck in an environment, and the next step runs it."""
    shutil.rmtree(tmp_path / "temp" / "syncheck")
    (tmp_path / "temp" / "syncheck").mkdir()
    done = runner(1, PYTHON=sys.executable, PYTHONPATH="")
    if done.returncode:
        unavailable("pypi", done.stderr[-500:])
    shutil.copytree(DESYNC, tmp_path / "work" / "out")
    assert runner(2, PATHS="out", PYTHONPATH="").returncode == 1


def test_the_hook_is_valid() -> None:
    """pre-commit accepts the manifest, and its hook runs for rank files, fingerprints and the baseline."""
    pytest.importorskip("pre_commit")
    command = [sys.executable, "-m", "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml")]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PRE_COMMIT_HOME": "/nowhere"})
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["pass_filenames"] is False
    for name in ("ckpts/ddp_rank0.pth", "a.safetensors", "prints/x.fingerprint.json", "syncheck-baseline.json"):
        assert re.search(hook["files"], name)
    assert not re.search(hook["files"], "train.py")
    example = _workflow("pre-commit-config")["repos"][0]["hooks"][0]
    build_parser().parse_args([*hook["entry"].split()[1:], *example["args"]])
    assert example["id"] == hook["id"]


@pytest.mark.slow
def test_the_hook_runs(tmp_path: Path) -> None:
    """pre-commit installs the hook from a copy of this repository, and the hook fails for ranks out of sync."""
    pytest.importorskip("pre_commit")
    copy, project = tmp_path / "copy", tmp_path / "project"
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listing.stdout.splitlines():
        if not name.startswith(("fixtures/", "tests/", "train/", "benchmarks/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    shutil.copytree(DESYNC, project)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
    for folder in (copy, project):
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
            subprocess.run([*git, *arguments], cwd=folder, check=True)
    environment = omit(os.environ, "PYTHONPATH")
    environment |= {"PRE_COMMIT_HOME": str(tmp_path / "home"), "PRE_COMMIT_COLOR": "never"}
    config = project / "hooks.yaml"
    config.write_text(f"repos:\n- repo: {copy}\n  rev: HEAD\n  hooks:\n  - id: syncheck-compare\n    args: ['*.pth']\n")
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files", "-c", str(config)]
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    if "SYN201" not in done.stdout and "pip" in done.stdout:
        unavailable("pypi", done.stdout[-500:])
    assert done.returncode == 1
    assert "syncheck compare" in done.stdout
    assert "SYN201 bn-local-stats" in done.stdout


def _workflow(name: str) -> Any:
    """Return a file of docs/ci.md by the name in its first comment."""
    return yaml.safe_load(next(text for _, text in BLOCKS if name in text.split("\n", 1)[0]))


def _commands() -> list[tuple[str, str]]:
    """Return each command line of syncheck and pytest in the workflows, with the first line of its file."""
    result = []
    for kind, text in BLOCKS:
        if kind == "groovy":
            lines = re.findall(r"sh '''(.*?)'''", text, re.DOTALL)
        else:
            jobs = yaml.safe_load(text)
            steps = join_fields(jobs.get("jobs", {}).values(), "steps")
            lines = [step["run"] for step in steps if "run" in step]
            lines += [line for job in jobs.values() if isinstance(job, dict) for line in job.get("script", [])]
        typed = [line.strip() for line in "\n".join(lines).split("\n")]
        result += [(text.split("\n", 1)[0], line) for line in typed if line and not line.startswith(OTHER_PROGRAMS)]
    return result


def test_the_workflows_are_complete() -> None:
    """Each workflow names its file. GitHub workflows have triggers, permissions, a runner, and inputs of the action."""
    assert [text.split()[1] for _, text in BLOCKS] == [
        ".github/workflows/replicas.yml", ".github/workflows/replicas.yml", ".github/workflows/tests.yml",
        ".gitlab-ci.yml", "Jenkinsfile", ".pre-commit-config.yaml",
    ]  # fmt: skip
    for _, text in BLOCKS[:3]:
        workflow = yaml.safe_load(text)
        # YAML 1.1 reads the key `on` as True; GitHub does not.
        assert workflow.keys() == {"name", True, "permissions", "jobs"}
        (job,) = workflow["jobs"].values()
        assert job["runs-on"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
        for step in job["steps"]:
            if step.get("uses", "").startswith("<owner>/syncheck@"):
                assert set(step["with"]) <= set(ACTION["inputs"])
    assert list_fields(_commands(), 0) == [
        "# .github/workflows/replicas.yml", "# .github/workflows/tests.yml", "# .gitlab-ci.yml", "// Jenkinsfile",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_commands_of_the_workflows_run(tmp_path: Path) -> None:
    """With an updated baseline, the commands of the workflows pass on plain DDP and write their files; if one more
    tensor differs, all commands fail."""
    shutil.copytree(DESYNC, tmp_path / "ckpts")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_nothing.py").write_text("def test_nothing():\n    pass\n")
    binary = tmp_path / "bin"
    binary.mkdir()
    for name in ("syncheck", "pytest"):
        (binary / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {name} "$@"\n')
        (binary / name).chmod(0o755)
    environment = omit_prefixes(os.environ, ("PYTEST_", "COV_"))
    environment |= {"PATH": f"{binary}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def code(line: str) -> int:
        return subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, check=False
        ).returncode

    (first,) = re.findall(r"^    (syncheck compare .*--update-baseline)$", GUIDE, re.MULTILINE)
    lines = [line.replace("-n 2 ", "-p no:cacheprovider ") for _, line in _commands()]
    assert code(first) == 0
    assert [code(line) for line in lines] == [0] * len(lines)
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == {"syncheck-baseline.json", "syncheck.md", "syncheck.xml", "syncheck.html"}
    listing = (tmp_path / "syncheck-baseline.json").read_text()
    (tmp_path / "syncheck-baseline.json").write_text(listing.replace('"bn1.running_mean",', ""))
    assert [code(line) for line in lines] == [1] * len(lines)


def test_options_in_the_guide_exist() -> None:
    """Each long option in docs/ci.md belongs to `syncheck compare`, to the plugin, or to another documented program."""
    remaining = {"--nproc-per-node", "--save-per-rank", "--index-url", "--all-files"}
    known_values = set(
        re.findall(r"--[\w-]+", build_parser()._subparsers._group_actions[0].choices["compare"].format_help())
    )  # type: ignore[union-attr, index, call-overload]
    plugin = {
        "--syncheck",
        "--syncheck-diff",
        "--syncheck-timeout",
        *(to_flag(name, "--syncheck-") for name in list_options(PYTEST)),
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", re.sub(r"\]\([^)]*\)", "]", GUIDE)))
    assert named - known_values - plugin == remaining
