"""Fingerprint files are untrusted, like any checkpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth
from support.listings import list_pairs

import syncheck
from syncheck.errors import CheckpointError, MalformedFile, UnsupportedFormat
from syncheck.readers import fingerprint_file
from syncheck.readers.fingerprints import fingerprint

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """Return a valid fingerprint of one tensor."""
    path = save_pth(tmp_path / "a.pth", {"w": np.ones((2, 3)), "step": 3})
    created: dict[str, Any] = json.loads(fingerprint(syncheck.read(str(path))))
    return created


def write_document(path: Path, document: Any) -> str:
    """Write any text or JSON."""
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_any_formatting_of_json_is_read(tmp_path: Path, document: dict[str, Any]) -> None:
    """A fingerprint indented by another tool, or written on one line, is read equally."""
    for text in (json.dumps(document), json.dumps(document, indent=4), f"\n {json.dumps(document)}"):
        result = syncheck.read(write_document(tmp_path / "f", text))
        assert result.format == "fingerprint"
        assert result.tensors["w"].shape == (2, 3)
        assert result.values == {"step": 3}


SHARDING = {"mesh": [2], "ranks": [0, 1], "placements": ["S(0)"], "shape": [4, 3], "names": [], "coordinate": [1]}


# Wrong values by field.
WRONG: dict[str, list[Any]] = {
    "syncheck_fingerprint": ["1", 0, True],
    "algorithm": [None, ""],
    "tensors": [[], None],
    "tensors.w": [3],
    "tensors.w.dtype": ["float33", None, "x" * 2000],
    "tensors.w.shape": [[2, -3], [2, 3.0], [2, True], [2**40, 2**40], [1] * 65, "23"],
    "tensors.w.digest": ["", "xyz" * 10, "ab", None],
    "tensors.w.refused": ["both"],
    "tensors.w.nonfinite": [7, -1],
    "tensors.w.mean": ["0", True],
    "tensors.w.max": [10**400],
    "tensors.w.sharding": [
        [],
        *(
            SHARDING | wrong
            for wrong in (
                {"mesh": [3]}, {"ranks": [0, -1]}, {"placements": []}, {"placements": [""]}, {"names": ["a", "b"]},
                {"coordinate": [2]}, {"shape": None},
            )
        ),
    ],
    "values": [3],
    "values.step": [[1], {"float": "1.5"}],
    "stubs": ["no list"],
    "notes": [[3]],
    "metadata": [{"rank": "zero"}, 3],
}  # fmt: skip
# The location in the error, if it is not the field.
LOCATIONS = {"tensors.w": "tensor 'w'", "values.step": "value 'step'", "metadata": "metadata block"}


@pytest.mark.parametrize(("field", "value"), list_pairs(WRONG))
def test_wrong_fields_are_malformed(tmp_path: Path, document: dict[str, Any], field: str, value: Any) -> None:
    """A wrong field is a one-line error with file and location, and no other exception."""
    entry = document
    *containers, key = field.split(".")
    for container in containers:
        entry = entry[container]
    entry[key] = value
    location = next((output for start, output in LOCATIONS.items() if field.startswith(start)), field)
    with pytest.raises(MalformedFile) as caught:
        syncheck.read(write_document(tmp_path / "f.json", document))
    assert str(caught.value).startswith(f"{tmp_path}/f.json: {location}")
    assert "\n" not in str(caught.value)


def test_a_valid_shard_is_read(tmp_path: Path, document: dict[str, Any]) -> None:
    """The unchanged sharding of the cases above is valid."""
    document["tensors"]["w"]["sharding"] = SHARDING
    result = syncheck.read(write_document(tmp_path / "f.json", document)).tensors["w"].sharding
    assert result is not None
    assert (result.mesh, result.coordinate) == ((2,), (1,))


@pytest.mark.parametrize("field", ["tensors", "values", "stubs", "notes", "algorithm"])
def test_a_missing_field_is_an_error(tmp_path: Path, document: dict[str, Any], field: str) -> None:
    """A missing field is an error that names the field."""
    del document[field]
    with pytest.raises(MalformedFile, match=field):
        syncheck.read(write_document(tmp_path / "f.json", document))


def test_invalid_json_is_an_error(tmp_path: Path, document: dict[str, Any]) -> None:
    """Truncation, duplicate keys, NaN, deep nesting, huge integers and trailing text are errors of the file."""
    text = json.dumps(document)
    start = text[: text.index(":") + 1]
    for broken in (
        text[:-1], text[:40], text.replace('"values"', '"tensors"'), text.replace('"stubs": []', '"stubs": [NaN]'),
        f"{start} {'[' * 100_000}", f"{start} {'9' * 5000}}}", f"{text} more",
    ):  # fmt: skip
        with pytest.raises(MalformedFile, match="cut short or was edited"):
            syncheck.read(write_document(tmp_path / "f.json", broken))


def test_truncated_files_are_errors(tmp_path: Path, document: dict[str, Any]) -> None:
    """A truncated file raises a CheckpointError."""
    text = json.dumps(document)
    for end in range(0, len(text) - 1, 7):
        with pytest.raises(CheckpointError):
            syncheck.read(write_document(tmp_path / "f.json", text[:end]))


def test_a_later_version_is_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    """A later version is refused with the advice to install a newer syncheck."""
    document["syncheck_fingerprint"] = 2
    with pytest.raises(UnsupportedFormat, match=r"version 2; needed at most 1\. Install a newer syncheck"):
        syncheck.read(write_document(tmp_path / "f.json", document))


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]) -> None:
    """A file larger than the limit is refused before parsing."""
    monkeypatch.setattr(fingerprint_file, "MAX_SIZE", 100)
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(MalformedFile, match="at most 100"):
        syncheck.read(write_document(tmp_path / "f.json", document))
