"""Fingerprint files: JSON written by `syncheck fingerprint`, with a digest instead of each tensor's bytes.

The writer is `syncheck/readers/fingerprints.py`. Like all files, fingerprints are untrusted.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any, TypeGuard

from syncheck.errors import MalformedFile, UnsupportedFormat
from syncheck.messages import Message, Note, Refusal
from syncheck.readers import untrusted
from syncheck.readers.metadata_block import parse_metadata
from syncheck.readers.untrusted import parse_json_object, read_whole
from syncheck.snapshots import (
    MOST_DIMENSIONS,
    MOST_ELEMENTS,
    Digest,
    Membership,
    Sharding,
    Snapshot,
    Tensor,
    are_naturals,
    contiguous_strides,
)
from syncheck.tensors.dtypes import DTYPES
from syncheck.text import brief

FORMAT = "fingerprint"
KEY = "syncheck_fingerprint"
VERSION = 1
# Limit in bytes. An entry takes about 250, so this is 400,000 tensors, at most about 1 GB when parsed.
MAX_SIZE = 100_000_000
_START = re.compile(rb"\s*\{\s*\"" + KEY.encode() + rb"\"\s*:")
_DIGEST = re.compile(r"[0-9a-f]{16,128}")
_MOMENTS = ("min", "max", "mean", "std")
MOST_TEXT = 1_000  # characters of a dtype, a reason or a note
_MOST_RANKS = 1_000_000
_AGAIN = "it is cut short or was edited: recreate it with: syncheck fingerprint"


def matches(head: bytes) -> bool:
    """Whether the first bytes are the start of a JSON object with the fingerprint's first key."""
    return _START.match(head) is not None


def read(path: str) -> Snapshot:
    """Open a fingerprint, whose tensors have digests and no bytes.

    Raises MalformedFile for invalid JSON or content, UnsupportedFormat for a newer version.
    """
    raw = read_whole(path, MAX_SIZE, _AGAIN)
    document = parse_json_object(raw, path, "file", _AGAIN, entry=b'"shape"', finite=True)
    version = document.get(KEY)
    if type(version) is not int or version < 1:
        raise _malformed(path, KEY, brief(version), "a version number")
    if version > VERSION:
        raise UnsupportedFormat(
            path,
            place=KEY,
            found=f"version {brief(version)}",
            needed=f"at most {VERSION}",
            next_step="install a newer syncheck",
        )
    algorithm = document.get("algorithm")
    if not _is_text(algorithm) or not algorithm:
        raise _malformed(path, "algorithm", brief(algorithm), "a name")
    tensors = _get_dict(document, "tensors", path)
    if len(tensors) > untrusted.MOST_TENSORS:
        raise _malformed(path, "tensors", f"{len(tensors)} tensors", f"at most {untrusted.MOST_TENSORS}")
    metadata = None if document.get("metadata") is None else parse_metadata(document["metadata"], path)
    return Snapshot(
        path,
        FORMAT,
        len(raw),
        {name: _check_tensor(path, name, entry, algorithm) for name, entry in tensors.items()},
        {name: _check_value(path, name, value) for name, value in _get_dict(document, "values", path).items()},
        _get_texts(document, "stubs", path),
        metadata,
        (Note.FINGERPRINT(), *(Note.STORED(text=text) for text in _get_texts(document, "notes", path))),
        model_values=_get_model_values(document, path),
    )


def _get_dict(document: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    found = document.get(key)
    if not isinstance(found, dict):
        raise _malformed(path, key, brief(found), "an object by name")
    return found


def _get_model_values(document: dict[str, Any], path: str) -> dict[str, Membership]:
    """Return the names of the model's values; fingerprints of version 0.2 have none."""
    if "model_values" not in document:
        return {}
    found = _get_dict(document, "model_values", path)
    known = [membership.value for membership in Membership]
    if not all(text in known for text in found.values()):
        raise _malformed(path, "model_values", brief(found), f"{', '.join(known)} by name")
    return {name: Membership(text) for name, text in found.items()}


def _get_texts(document: dict[str, Any], key: str, path: str) -> tuple[str, ...]:
    found = document.get(key)
    if not isinstance(found, list) or not all(_is_text(text) for text in found):
        raise _malformed(path, key, brief(found), "a list of strings")
    return tuple(found)


def _check_value(path: str, name: str, value: Any) -> Any:
    """Read one value; floats that JSON lacks are stored as {"float": "nan"}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
        return float(value["float"])
    raise _malformed(path, f"value '{name}'", brief(value), 'a number, a string, null or {"float": "nan"}')


def _check_tensor(path: str, name: str, entry: Any, algorithm: str) -> Tensor:
    place = f"tensor '{name}'"
    if not isinstance(entry, dict):
        raise _malformed(path, place, brief(entry), "an object")
    dtype, shape, refused, digest = (entry.get(key) for key in ("dtype", "shape", "refused", "digest"))
    sizes = _check_naturals(shape, MOST_DIMENSIONS)
    if not _is_text(dtype) or sizes is None or math.prod(sizes) > MOST_ELEMENTS:
        raise _malformed(path, place, f"{brief(dtype, 20)} {brief(shape)}", "a dtype and sizes")
    strides = contiguous_strides(sizes)
    if digest is None and _is_text(refused):
        reason = _find_refusal(refused)
        if entry.get("in_parts") is True:
            reason = Refusal.IN_PARTS(refusal=reason)
        return Tensor(name, dtype, sizes, strides, path, 0, refused=reason)
    if refused is not None or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        found = f"digest {brief(digest)}, refused {brief(refused)}"
        raise _malformed(path, place, found, "a digest of 16 to 128 hex digits, or a reason for its absence")
    if dtype not in DTYPES:
        raise _malformed(path, place, f"dtype {brief(dtype)}", f"one of {', '.join(DTYPES)}")
    moments = {key: _check_number(path, place, key, entry.get(key)) for key in _MOMENTS}
    nonfinite = entry.get("nonfinite")
    if nonfinite is not None and (type(nonfinite) is not int or not 0 <= nonfinite <= math.prod(sizes)):
        raise _malformed(path, place, f"nonfinite {brief(nonfinite)}", "a number of elements")
    return Tensor(
        name, dtype, sizes, strides, path, 0,
        sharding=None if entry.get("sharding") is None else _check_sharding(path, place, entry["sharding"]),
        digest=Digest(algorithm, digest, nonfinite, **moments),
    )  # fmt: skip


def _check_number(path: str, place: str, key: str, value: Any) -> float | None:
    if value is None:
        return None
    # JSON integers have no upper limit, and 1e999 is read as infinity.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise _malformed(path, place, f"{key} {brief(value)}", "a finite number or null")
    return float(value)


def _check_sharding(path: str, place: str, entry: Any) -> Sharding:
    wrong = _malformed(path, place, f"sharding {brief(entry)}", "a mesh, its ranks, and a placement by dimension")
    if not isinstance(entry, dict):
        raise wrong

    def naturals(key: str, most: int = MOST_DIMENSIONS) -> tuple[int, ...]:
        found = _check_naturals(entry.get(key), most)
        if found is None:
            raise wrong
        return found

    def words(key: str) -> tuple[str, ...]:
        found = entry.get(key)
        if not isinstance(found, list) or not all(_is_text(word) and word for word in found):
            raise wrong
        return tuple(found)

    mesh, ranks = naturals("mesh"), naturals("ranks", _MOST_RANKS)
    beside = entry.get("beside", [])
    if not isinstance(beside, list) or not all(isinstance(at, list) and len(at) == 2 for at in beside):
        raise wrong
    if (
        not all(_is_text(name) for name, _ in beside)
        or _check_naturals([at for _, at in beside], MOST_DIMENSIONS) is None
    ):
        raise wrong
    root_coordinate = tuple((name, at) for name, at in beside)
    result = Sharding(
        mesh, ranks, words("placements"), naturals("shape"), words("names"), naturals("coordinate"), root_coordinate
    )
    lengths = len(result.placements) == len(mesh) and {len(result.names), len(result.coordinate)} <= {0, len(mesh)}
    inside = all(at < size for at, size in zip(result.coordinate, mesh, strict=False))
    if not lengths or not inside or math.prod(mesh) != len(ranks):
        raise wrong
    return result


def _check_naturals(value: Any, most: int) -> tuple[int, ...] | None:
    """Return a list of sizes or ranks as a tuple, or None if it is invalid."""
    right = isinstance(value, list) and len(value) <= most and are_naturals(value)
    return tuple(value) if right else None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MOST_TEXT


def _malformed(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(path, place=place, found=found, needed=needed, next_step=_AGAIN)


def _find_refusal(text: str) -> Message:
    """Return the refusal of a tensor from its text in the fingerprint."""
    known = next((refusal for refusal in Refusal if refusal.value == text), None)
    return known() if known else Refusal.STORED(text=text or "no reason is given")
