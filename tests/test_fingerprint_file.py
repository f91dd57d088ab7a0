"""Reading fingerprint files: they are untrusted, as any checkpoint is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import save_pth

from syncheck import readers
from syncheck.errors import CheckpointError, MalformedFile, UnsupportedFormat
from syncheck.fingerprint import fingerprint
from syncheck.readers import fingerprint_file

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """Return a good fingerprint of one tensor."""
    path = save_pth(tmp_path / "a.pth", {"w": np.ones((2, 3)), "step": 3})
    made: dict[str, Any] = json.loads(fingerprint(readers.read(str(path))))
    return made


def put(path: Path, document: Any) -> str:
    """Write any text or JSON."""
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_other_spellings_of_the_json_are_read(tmp_path: Path, document: dict[str, Any]) -> None:
    """A file that another tool has indented, or written on one line, is the same fingerprint."""
    for text in (json.dumps(document), json.dumps(document, indent=4), f"\n {json.dumps(document)}"):
        found = readers.read(put(tmp_path / "f", text))
        assert found.format == "fingerprint"
        assert found.tensors["w"].shape == (2, 3)
        assert found.values == {"step": 3}


SHARDING = {"mesh": [2], "ranks": [0, 1], "placements": ["S(0)"], "shape": [4, 3], "names": [], "coordinate": [1]}


@pytest.mark.parametrize(
    ("keys", "value", "place"),
    [
        (["syncheck_fingerprint"], "1", "syncheck_fingerprint"),
        (["syncheck_fingerprint"], 0, "syncheck_fingerprint"),
        (["syncheck_fingerprint"], True, "syncheck_fingerprint"),
        (["algorithm"], None, "algorithm"),
        (["algorithm"], "", "algorithm"),
        (["tensors"], [], "tensors"),
        (["tensors"], None, "tensors"),
        (["tensors", "w"], 3, "tensor 'w'"),
        (["tensors", "w", "dtype"], "float33", "tensor 'w'"),
        (["tensors", "w", "dtype"], None, "tensor 'w'"),
        (["tensors", "w", "dtype"], "x" * 2000, "tensor 'w'"),
        (["tensors", "w", "shape"], [2, -3], "tensor 'w'"),
        (["tensors", "w", "shape"], [2, 3.0], "tensor 'w'"),
        (["tensors", "w", "shape"], [2, True], "tensor 'w'"),
        (["tensors", "w", "shape"], [2**40, 2**40], "tensor 'w'"),
        (["tensors", "w", "shape"], [1] * 65, "tensor 'w'"),
        (["tensors", "w", "shape"], "23", "tensor 'w'"),
        (["tensors", "w", "digest"], "", "tensor 'w'"),
        (["tensors", "w", "digest"], "xyz" * 10, "tensor 'w'"),
        (["tensors", "w", "digest"], "ab", "tensor 'w'"),
        (["tensors", "w", "digest"], None, "tensor 'w'"),
        (["tensors", "w", "refused"], "both", "tensor 'w'"),
        (["tensors", "w", "nonfinite"], 7, "tensor 'w'"),
        (["tensors", "w", "nonfinite"], -1, "tensor 'w'"),
        (["tensors", "w", "mean"], "0", "tensor 'w'"),
        (["tensors", "w", "mean"], True, "tensor 'w'"),
        (["tensors", "w", "max"], 10**400, "tensor 'w'"),
        (["tensors", "w", "sharding"], [], "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"mesh": [3]}, "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"ranks": [0, -1]}, "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"placements": []}, "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"placements": [""]}, "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"names": ["a", "b"]}, "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"coordinate": [2]}, "tensor 'w'"),
        (["tensors", "w", "sharding"], SHARDING | {"shape": None}, "tensor 'w'"),
        (["values"], 3, "values"),
        (["values", "step"], [1], "value 'step'"),
        (["values", "step"], {"float": "1.5"}, "value 'step'"),
        (["stubs"], "no list", "stubs"),
        (["notes"], [3], "notes"),
        (["metadata"], {"rank": "zero"}, "metadata block"),
        (["metadata"], 3, "metadata block"),
    ],
)
def test_what_is_not_as_we_write_it_is_named(
    tmp_path: Path, document: dict[str, Any], keys: list[str], value: Any, place: str
) -> None:
    """A wrong field is a one-line error with file and place, never another exception and never believed."""
    entry = document
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    with pytest.raises(MalformedFile) as caught:
        readers.read(put(tmp_path / "f.json", document))
    assert str(caught.value).startswith(f"{tmp_path}/f.json: {place}")
    assert "\n" not in str(caught.value)


def test_a_good_shard_is_read(tmp_path: Path, document: dict[str, Any]) -> None:
    """The sharding that the cases above break is itself right."""
    document["tensors"]["w"]["sharding"] = SHARDING
    found = readers.read(put(tmp_path / "f.json", document)).tensors["w"].sharding
    assert found is not None
    assert (found.mesh, found.coordinate) == ((2,), (1,))


@pytest.mark.parametrize("field", ["tensors", "values", "stubs", "notes", "algorithm"])
def test_a_field_that_lacks_is_named(tmp_path: Path, document: dict[str, Any], field: str) -> None:
    """A file without one of its parts is no fingerprint of an empty checkpoint."""
    del document[field]
    with pytest.raises(MalformedFile, match=field):
        readers.read(put(tmp_path / "f.json", document))


def test_broken_json_is_named(tmp_path: Path, document: dict[str, Any]) -> None:
    """A file cut short, a name that stands twice, NaN and endless nesting are errors of that file."""
    text = json.dumps(document)
    start = text[: text.index(":") + 1]
    for broken in (
        text[:-1], text[:40], text.replace('"values"', '"tensors"'), text.replace('"stubs": []', '"stubs": [NaN]'),
        f"{start} {'[' * 100_000}", f"{start} {'9' * 5000}}}", f"{text} more",
    ):  # fmt: skip
        with pytest.raises(MalformedFile, match="cut short or was edited"):
            readers.read(put(tmp_path / "f.json", broken))


def test_every_cut_is_an_error_of_the_file(tmp_path: Path, document: dict[str, Any]) -> None:
    """Wherever the file ends, the answer is a checkpoint's error."""
    text = json.dumps(document)
    for end in range(0, len(text) - 1, 7):
        with pytest.raises(CheckpointError):
            readers.read(put(tmp_path / "f.json", text[:end]))


def test_a_later_version_is_not_guessed_at(tmp_path: Path, document: dict[str, Any]) -> None:
    """A version that this syncheck does not know is refused with what to do."""
    document["syncheck_fingerprint"] = 2
    with pytest.raises(UnsupportedFormat, match=r"version 2; needed at most 1\. Install a newer syncheck"):
        readers.read(put(tmp_path / "f.json", document))


def test_a_huge_file_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    """A file beyond the bound is refused before it is read."""
    monkeypatch.setattr(fingerprint_file, "MAX_SIZE", 100)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(MalformedFile, match="at most 100"):
        readers.read(put(tmp_path / "f.json", document))
