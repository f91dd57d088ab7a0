"""Passing tests on several ranks: environment of a rank, fixtures, reuse of processes."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from support.listings import find_all, list_fields, read_json_lines

if TYPE_CHECKING:
    from pathlib import Path

# Slow, because the rest of the suite already passes on ranks.
pytestmark = pytest.mark.slow

SUITE = """
import json, os, pathlib, random, time, unittest, warnings
import numpy as np
import pytest
import torch
import torch.distributed as dist

LOG = pathlib.Path(__file__).with_name("log.jsonl")

def log(**entry):
    with LOG.open("a") as file:
        entry |= {"pid": os.getpid(), "test": os.environ["PYTEST_CURRENT_TEST"].split()[0]}
        file.write(json.dumps(entry) + "\\n")

@pytest.fixture(scope="session", autouse=True)
def session_wide():
    log(fixture="session")

@pytest.fixture
def each(request, from_conftest):
    log(fixture="each")
    yield from_conftest
    assert dist.is_initialized(), "fixtures end before the group does"
    dist.barrier()

@pytest.mark.syncheck(ranks=2)
def test_ready(syncheck_rank, tmp_path, each):
    assert each == "conftest of the rank"
    total = torch.tensor([float(syncheck_rank.rank + 1)])
    dist.all_reduce(total, group=syncheck_rank.group)
    assert total.item() == 3 and dist.get_backend() == "gloo"
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(dist.get_rank()) == str(syncheck_rank.rank)
    assert os.environ["WORLD_SIZE"] == str(dist.get_world_size()) == str(syncheck_rank.world_size) == "2"
    (syncheck_rank.shared / f"from{syncheck_rank.rank}").touch()
    syncheck_rank.barrier()
    assert syncheck_rank.gather({"of": syncheck_rank.rank}) == [{"of": 0}, {"of": 1}]
    assert len(list(syncheck_rank.shared.iterdir())) == 2
    log(tmp_path=str(tmp_path), device=str(syncheck_rank.device), seed=syncheck_rank.seed,
        drawn=[random.random(), np.random.rand(), torch.rand(1).item()])
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    torch.distributed.new_group([0, 1])

@pytest.mark.syncheck(ranks=2)
def test_afresh(syncheck_rank):
    assert "LEFT_BEHIND" not in os.environ
    assert (torch.rand(1).dtype, torch.rand(1).device.type) == (torch.float32, "cpu")
    assert dist.get_debug_level() == dist.DebugLevel.OFF
    assert pathlib.Path.cwd() == LOG.parent
    assert not list(syncheck_rank.shared.iterdir())
    log(started=time.time())

@pytest.mark.syncheck(ranks=[2, 3])
@pytest.mark.parametrize("word", ["a::b", "[x]"])
def test_numbers(syncheck_rank, word, record_property):
    dist.barrier()
    record_property("word", word)
    record_property("rank", syncheck_rank.rank)
    log(world_size=syncheck_rank.world_size, word=word)

class TestWithUnittest(unittest.TestCase):
    def setUp(self):
        self.world_size = dist.get_world_size()

    @pytest.mark.syncheck(ranks=2)
    def test_method(self):
        self.assertEqual(self.world_size, 2)
        log()

@pytest.mark.syncheck(ranks=2, group=False)
def test_own_group(syncheck_rank):
    assert syncheck_rank.group is None
    dist.init_process_group("gloo")
    dist.barrier()
    log(own=dist.get_world_size())

@pytest.mark.syncheck
def test_bare(syncheck_rank):
    assert syncheck_rank.world_size == 2
    warnings.warn("mind the gap", DeprecationWarning)

@pytest.mark.syncheck(ranks=2)
def test_skips():
    pytest.skip("nothing to do here")

@pytest.mark.syncheck(ranks=2)
@pytest.mark.xfail(reason="known", raises=ZeroDivisionError)
def test_fails_as_expected():
    1 / 0

def test_without_ranks():
    log()
"""
CONFTEST = """
import os
import pytest

@pytest.fixture
def from_conftest():
    return "conftest of the rank" if "RANK" in os.environ else "conftest"
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run the suite once. Return its folder and output."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -ra -v --junitxml=junit.xml\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder, run.stdout


@pytest.fixture(scope="module")
def entries(done: tuple[Path, str]) -> list[dict[str, Any]]:
    """Return the records of the tests."""
    records = read_json_lines(done[0] / "log.jsonl")
    return [entry | {"test": entry["test"].partition("::")[2]} for entry in records]


def test_outcomes_are_counted_once(done: tuple[Path, str]) -> None:
    """Passes, skips and expected failures are counted once for all ranks, with their reasons."""
    assert "10 passed, 1 skipped, 1 xfailed, 1 warning" in done[1]
    assert re.search(r"SKIPPED \[1\] test_suite.py:\d+: nothing to do here", done[1])
    assert "XFAIL test_suite.py::test_fails_as_expected - known" in done[1]
    assert "DeprecationWarning: mind the gap" in done[1]


def test_folder_and_seed_of_ranks(entries: list[dict[str, Any]]) -> None:
    """Each rank has its own tmp_path and random numbers, drawn from a known seed."""
    ready = [entry for entry in entries if "tmp_path" in entry]
    assert len(set(list_fields(ready, "tmp_path"))) == len(set(list_fields(ready, "pid"))) == 2
    assert sorted(list_fields(ready, "seed"))[0] + 1 == sorted(list_fields(ready, "seed"))[1]
    drawn = list_fields(ready, "drawn")
    assert not set(drawn[0]) & set(drawn[1])
    assert set(list_fields(ready, "device")) == {"cpu"}


def test_fixtures_are_set_up_in_the_ranks_only(entries: list[dict[str, Any]]) -> None:
    """The outer session sets up no fixtures of tests on ranks."""
    (outer,) = set(list_fields(find_all(entries, test="test_without_ranks"), "pid"))
    fixtures = [entry for entry in entries if entry.get("fixture")]
    assert list_fields(find_all(fixtures, pid=outer), "test") == ["test_without_ranks"]
    assert sum(entry["fixture"] == "each" for entry in fixtures) == 2


def test_each_number_of_ranks_is_a_test(done: tuple[Path, str], entries: list[dict[str, Any]]) -> None:
    """`ranks=[2, 3]` gives two tests with different ids, also beside other parameters with unusual ids."""
    for world in (2, 3):
        for word in ("a::b", "[x]"):
            assert f"test_suite.py::test_numbers[{world}ranks-{word}] PASSED" in done[1] or (
                f"test_suite.py::test_numbers[{word}-{world}ranks] PASSED" in done[1]
            )
            ran = [entry for entry in entries if (entry.get("world_size"), entry.get("word")) == (world, word)]
            assert len(ran) == world


def test_the_test_can_create_the_group(entries: list[dict[str, Any]]) -> None:
    """With group=False the environment is that of torchrun, and the test can call init_process_group."""
    assert [entry["own"] for entry in entries if "own" in entry] == [2, 2]


def test_processes_are_reused(entries: list[dict[str, Any]]) -> None:
    """Consecutive passing tests run in the same processes."""
    (outer,) = set(list_fields(find_all(entries, test="test_without_ranks"), "pid"))
    assert len(set(list_fields(entries, "pid")) - {outer}) == 3


def test_properties_in_junit(done: tuple[Path, str]) -> None:
    """JUnit contains properties common to all ranks once, and other properties with their rank."""
    cases = {case.get("name"): case for case in ET.parse(done[0] / "junit.xml").iter("testcase")}
    assert len(cases) == 12
    case = next(case for name, case in cases.items() if name and "2ranks" in name and "a::b" in name)
    properties = {(p.get("name"), p.get("value")) for p in case.iter("property")}
    assert properties == {("word", "a::b"), ("rank[rank 0]", "0"), ("rank[rank 1]", "1")}


def test_seeds_are_the_same_in_every_run(done: tuple[Path, str], entries: list[dict[str, Any]]) -> None:
    """The seed depends on the id of the test only."""
    seeds = {entry["seed"] for entry in entries if "seed" in entry}
    assert min(seeds) == zlib.crc32(b"test_suite.py::test_ready") & 0xFFFFFF


@pytest.mark.slow
def test_stacks_of_waiting_ranks(pytester: pytest.Pytester) -> None:
    """A rank waiting in a collective for a failed rank is killed soon, and its stack is shown."""
    pytester.makepyfile(
        """
        import pytest
        import torch.distributed as dist

        @pytest.mark.syncheck(ranks=2)
        def test_it(syncheck_rank):
            if syncheck_rank.rank == 1:
                raise RuntimeError("only here")
            dist.barrier()
        """
    )
    result = pytester.runpytest_subprocess(timeout=60)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["rank 1 of 2 failed:", "*RuntimeError: only here", "*rank 0: had not finished*", "*in barrier", "*in test_it"]
    )
    assert "_listen" not in result.stdout.str()
