"""`syncheck.testing` without torch: files, arrays in memory, invalid calls, and the text of a failure."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import changed, network, save_pth
from support.groups import make_finding
from support.groups import text as message_of
from support.listings import find_all, find_texts, list_fields, measure_width

from syncheck.diagnose.statements import Common
from syncheck.errors import UsageError
from syncheck.messages import Detail, Note, Refusal, Undecided
from syncheck.records import Counts, Group, Replica, Report, TensorDiff, Unreadable, ValueDiff
from syncheck.report.undecided import undecided_reason
from syncheck.testing import OutOfSync, assert_in_sync, compare, message

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ranks = Callable[..., list[Path]]


def failing(*things: Any, **options: Any) -> OutOfSync:
    """Return the error of a failing comparison."""
    with pytest.raises(OutOfSync) as caught:
        assert_in_sync(*things, **options)
    return caught.value


# --- files ---


def test_equal_files_give_the_report(ranks: Ranks) -> None:
    """Files in sync return a report with every tensor compared."""
    report = assert_in_sync(*ranks())
    assert report.verdict == "in_sync"
    assert report.counts.compared == report.counts.identical == 14


def test_a_glob_of_files_that_differ_raises(ranks: Ranks) -> None:
    """A difference injected into the second of three files raises with the rank, tensor, finding and last line."""
    paths = ranks(network(), changed(network(), "fc.weight", by=0.5), network())
    error = failing(f"{paths[0].parent}/*.pth")
    lines = str(error).splitlines()
    assert lines[0] == "replicas are out of sync: SYN299"
    facts = error.report.groups[0].findings[0].facts
    assert Common.AGREE(ranks=(0, 2)) in facts
    assert str(Common.DIFFERS(ranks=(1,))) in str(error)
    assert any(line.split()[:2] == ["fc.weight", "parameter"] and "40 of 40" in line for line in lines)
    assert lines[-2:] == ["OUT OF SYNC", "14 tensors: 13 identical, 0 close, 1 different, 0 not compared"]
    assert error.report.groups[0].findings[0].ranks == (1,)
    assert compare(*paths) == error.report


@pytest.mark.parametrize(
    "tolerated",
    [
        {"only": "params"},
        {"only": ("params", "optimizer")},
        {"allow": "syn201"},
        {"exclude": "*.running_*"},
        {"rtol": 0.0, "atol": 2.0},
    ],
    ids=str,
)
def test_options_by_name(ranks: Ranks, tolerated: dict[str, Any]) -> None:
    """BatchNorm drift fails, and passes with each option that excludes or allows it."""
    paths = ranks(network(), changed(network(), "running_mean", "running_var"))
    assert "SYN201" in str(failing(*paths))
    assert_in_sync(*paths, **tolerated)


def test_a_file_that_cannot_be_read_never_passes(ranks: Ranks, tmp_path: Path) -> None:
    """Two equal files and a damaged file fail, and the text names the damaged file."""
    broken = tmp_path / "run_rank2.pth"
    broken.write_bytes(b"PK\x03\x04 and no more")
    error = failing(*ranks(), broken)
    assert error.report.verdict == "undecided"
    assert "could not be read" in str(error)
    assert "run_rank2.pth" in str(error)


def test_nothing_compared_never_passes(ranks: Ranks) -> None:
    """Options that exclude every tensor fail."""
    excluded = failing(*ranks(), include="no.such.tensor").report
    assert undecided_reason(excluded) == Undecided.ALL_EXCLUDED(count=14)
    assert undecided_reason(failing({"step": 1}, {"step": 1}).report).code is Undecided.NOTHING


def test_texts_spell_options_in_python(ranks: Ranks, tmp_path: Path) -> None:
    """Texts of assertions and errors spell options in Python: allow='SYN201', not --allow SYN201."""
    text = str(failing(*ranks(network(), changed(network(), "running_mean", "running_var"))))
    assert "allow='SYN201'" in text
    assert "--allow" not in text
    for name in ("best.pth", "model_0.pth", "ckpt-rank1-step100.pt"):
        save_pth(tmp_path / "unlike" / name, network())
    assert "group_by=REGEX" in str(failing(tmp_path / "unlike"))
    for options, says in (({"allow": "SYN999"}, "allow='SYN999': no such"), ({"rtol": 0.1}, "rtol and atol belong")):
        with pytest.raises(UsageError) as caught:
            compare(*ranks(), **options)
        assert str(caught.value).startswith(says)


# --- in memory ---


def test_arrays_in_memory_are_replicas(ranks: Ranks) -> None:
    """State dicts of arrays are compared by position, and one changed element is found."""
    second = network()
    assert_in_sync(network(), second, network())
    second["fc.bias"][3] += 1
    error = failing(network(), second, network())
    [diff] = error.report.groups[0].tensors
    assert (diff.name, diff.mismatched, diff.index, diff.minority) == ("fc.bias", 1, (3,), (1,))
    assert "rank 1: things[1], dict (memory, 14 tensors" in str(error)


def test_a_file_beside_memory(ranks: Ranks) -> None:
    """The path of one file and a state dict are replicas: equal passes, changed fails."""
    [path] = ranks(network())
    report = assert_in_sync(path, network())
    assert list_fields(report.groups[0].replicas, "format") == ["torch-zip", "memory"]
    assert failing(network(1), path).report.counts.different > 0


def test_an_unreadable_file_beside_memory_never_passes(tmp_path: Path) -> None:
    """Equal state dicts and an unreadable file fail."""
    error = failing(network(), network(), tmp_path / "gone.pth")
    assert error.report.verdict == "undecided"
    assert "gone.pth" in str(error)


def test_array_layouts_and_byte_orders_do_not_count() -> None:
    """Equal values in Fortran order, reversed or big-endian are equal."""
    plain = np.arange(24, dtype=np.float32).reshape(4, 6)
    for second in (np.asfortranarray(plain), plain[::-1].copy()[::-1], plain.astype(">f4")):
        report = assert_in_sync({"w": plain}, {"w": second})
        assert report.counts.identical == 1
    assert failing({"w": plain}, {"w": np.asfortranarray(plain + 1)}).report.counts.different == 1


def test_names_equal_the_names_of_the_file(tmp_path: Path) -> None:
    """A nested checkpoint and its file have the same names."""
    tree = {
        "model": network(),
        "optimizer": {
            "state": {i: {"exp_avg": np.ones(4, np.float32), "step": np.array(3.0, np.float32)} for i in range(8)},
            "param_groups": [{"params": list(range(8)), "lr": 0.1, "betas": (0.9, 0.999)}],
        },
        "epoch": 3,
        "history": [1.0, 2.0, {"best": None}],
    }
    report = assert_in_sync(tree, save_pth(tmp_path / "checkpoint.pth", tree))
    assert report.groups[0].values == ()
    assert report.counts.identical == 14 + 16


def test_an_array_of_objects_is_counted_as_not_compared() -> None:
    """An object array is counted as not compared, and alone it fails."""
    outlier = {"names": np.array(["a", "b"])}
    report = compare(outlier, outlier)
    assert report.verdict == "undecided"
    assert report.groups[0].tensors[0].detail == Detail.REFUSED(refusal=Refusal.NUMPY_DTYPE(name="U1"))


def test_keys_with_the_same_text() -> None:
    """The keys 1 and "1" of a mapping keep their tensors in any order."""
    first, text = np.zeros(2), np.ones(2)
    assert_in_sync({1: first, "1": text}, {"1": text, 1: first})
    assert failing({1: first, "1": text}, {1: text, "1": first}).report.counts.different == 2


def test_recursive_containers() -> None:
    """A dict that contains itself is compared without infinite recursion."""
    first: dict[str, Any] = {"w": np.ones(2)}
    second: dict[str, Any] = {"w": np.ones(2)}
    first["self"], second["self"] = first, second
    assert assert_in_sync(first, second).counts.identical == 1


def test_tensors_in_objects_of_unknown_classes_are_found() -> None:
    """Attributes of an object are compared as in a pickle, with a note about the unknown class."""

    class Average:
        def __init__(self, value: float) -> None:
            self.shadow = {"w": np.full(3, value)}

    error = failing({"average": Average(1.0)}, {"average": Average(2.0)})
    assert error.report.groups[0].tensors[0].name == "average.shadow.w"
    (note,) = find_all(error.report.groups[0].notes, code=Note.UNKNOWN_CLASSES)
    assert "Average" in "".join(note.parameters["classes"])


# --- wrong usage ---


@pytest.mark.parametrize(
    "things, options, says",
    [
        ((), {}, "nothing to compare"),
        (({"w": np.ones(1)},), {}, "one object to compare"),
        (({"w": np.ones(1)}, 3), {}, "class int cannot be compared"),
        (({}, {}), {"onyl": "params"}, "onyl=: no such option"),
        (({}, {}), {"only": "weights"}, "only='weights'"),
        (({}, {}), {"rtol": 0.1}, "belong together"),
        (({}, {}), {"rtol": "a", "atol": 0.0}, "rtol='a': must be a number"),
        (({}, {}), {"ulp": 1.5}, "ulp=1.5: must be a whole number"),
        (({}, {}), {"ulp": True}, "ulp=True: must be a whole number"),
        (({}, {}), {"only": 3}, "only=3: must be a list"),
        (({}, {}), {"include": [1]}, "include=(1,): must be a list"),
        (({}, {}), {"group_by": 3}, "group_by=3: must be a regular expression"),
        (({}, {}), {"options": {}}, "options={}: must be syncheck.Options"),
        (({}, {}), {"limit": None}, "limit=None: must be"),
        (({}, {}), {"limit": "x"}, "limit='x': must be"),
        (({}, {}), {"limit": -1}, "limit=-1: must be"),
        (({}, {}), {"across_ranks": True}, "no process group"),
        (("*.pth",), {"group": "any"}, "remove group="),
        (("no_such_*.pth",), {}, "no file matches"),
    ],
    ids=str,
)
def test_invalid_calls(things: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    """An invalid call raises UsageError with the reason, never OutOfSync."""
    with pytest.raises(UsageError) as caught:
        assert_in_sync(*things, **options)
    assert says in str(caught.value)


def test_a_folder_beside_memory_is_refused(ranks: Ranks) -> None:
    """With objects in memory a path is one replica, so a folder of several files is an error."""
    paths = ranks()
    with pytest.raises(UsageError, match="2 checkpoints; "):
        assert_in_sync(network(), paths[0].parent)


# --- the text of a failure ---


def hostile(length: int, tensors: int = 500) -> Report:
    """Return a report whose texts are long and contain terminal control sequences."""
    bad = "\x1b[31m\n" + "x" * length
    diffs = tuple(
        TensorDiff(f"{bad}{i}", "parameter", "float32", (2,), "different", clusters=((0,), (1,)), mismatched=1, numel=2)
        for i in range(tensors)
    )
    finding = make_finding("SYN299", "unexplained", "error", (0, 1), (), bad, bad, "fix")
    group = Group(
        name=bad,
        run=bad,
        step=None,
        verdict="out_of_sync",
        replicas=tuple(Replica(bad, i, "torch-zip", 1, 1) for i in range(50)),
        counts=Counts(tensors=tensors, different=tensors),
        tensors=diffs,
        findings=(finding,) * 40,
        values=tuple(ValueDiff(f"{bad}{i}", {0: bad, 1: 2}, counts=False) for i in range(50)),
        kinds={"parameter": Counts(tensors=tensors, different=tensors)},
        notes=(message_of(bad),) * 50,
    )
    return Report("out_of_sync", (group,) * 40, unreadable=(Unreadable(bad, bad),) * 50)


def test_a_failure_is_bounded_and_escaped() -> None:
    """Names of 100,000 characters with control codes give a few short, escaped lines."""
    lines = message(hostile(100_000)).split("\n")
    assert len(lines) < 400
    assert measure_width(lines) <= 1000
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == "20000 tensors: 0 identical, 0 close, 20000 different, 0 not compared"
    assert "and 37 more groups" in "\n".join(lines)
    assert sum("42 more lines" in line for line in lines) == 3  # of the notes of each group
    rows = find_texts(lines, "1 of 2")
    assert len(rows) == 30
    assert measure_width(rows) < 250  # long names do not push columns out of sight


def test_the_limit_bounds_the_rows_of_tensors() -> None:
    """`limit` rows per group are shown and the rest is counted; 0 shows all."""
    report = hostile(3, tensors=30)
    assert message(report, 4).count("1 of 2") == 3 * 4
    assert "... and 26 more; limit=0 shows all" in message(report, 4)
    assert message(report, 0).count("1 of 2") == 3 * 30


def test_a_failure_skips_groups_in_sync(ranks: Ranks) -> None:
    """A failure shows the failed step only; the last line counts all steps."""
    paths = ranks(network(), network(), name="step_1/run_rank{}.pth")
    paths += ranks(network(), changed(network(), "fc.bias"), name="step_2/run_rank{}.pth")
    text = str(failing(paths[0].parents[1]))
    assert "step_2/run_rank1.pth" in text
    assert "step_1/run_rank1.pth" not in text
    assert text.splitlines()[-1].startswith("28 tensors: 27 identical")


def test_the_error_can_be_sent_to_another_process(ranks: Ranks) -> None:
    """The error can be pickled with text and report."""
    error = failing(*ranks(network(), network(1)))
    messages = pickle.loads(pickle.dumps(error))
    assert (str(messages), messages.report) == (str(error), error.report)


@pytest.mark.slow
def test_pytest_shows_the_line_of_the_test(pytester: pytest.Pytester) -> None:
    """Under pytest both kinds of errors point at the caller's line, without frames of syncheck."""
    pytester.makepyfile(
        """
        import numpy
        from syncheck.testing import assert_in_sync

        def test_differs():
            assert_in_sync({"w": numpy.eye(2)}, {"w": numpy.zeros((2, 2))})

        def test_misuse():
            assert_in_sync({"w": numpy.eye(2)}, {}, only="wieghts")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    assert "test_pytest_shows_the_line_of_the_test.py:5: OutOfSync" in text
    assert "test_pytest_shows_the_line_of_the_test.py:8: OptionError" in text
    assert "syncheck/testing.py:" not in text


# --- imports ---


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import syncheck.testing", ("torch", "numpy", "pytest", "rich", "syncheck.live.memory")),
        ("assert_in_sync(*EQUAL)", ("torch", "numpy", "pytest", "rich", "syncheck.live.memory")),
        ("compare(*UNEQUAL)", ("torch", "pytest", "rich")),
        ("import numpy; compare({'w': numpy.ones(3)}, {'w': numpy.zeros(3)})", ("torch", "pytest", "rich")),
    ],
)
def test_unneeded_modules_are_not_loaded(ranks: Ranks, code: str, forbidden: tuple[str, ...]) -> None:
    """Importing and comparing load neither torch nor pytest, and numpy only if bytes differ."""
    equal = [str(path) for path in ranks()]
    unequal = [str(path) for path in ranks(network(), network(1), name="other_rank{}.pth")]
    before = f"from syncheck.testing import assert_in_sync, compare\nEQUAL, UNEQUAL = {equal!r}, {unequal!r}\n"
    after = f"\nimport sys\nprint([name for name in {forbidden!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", before + code + after], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
