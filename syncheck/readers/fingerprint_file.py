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
_START = rb"\s*\{\s*\"" + KEY.encode() + rb"\"\s*:"
_DIGEST = r"[0-9a-f]{16,128}"
_REFUSALS = {refusal.value: refusal for refusal in Refusal}
# The floats that JSON lacks.
_SPECIAL_FLOATS = ({"float": "nan"}, {"float": "inf"}, {"float": "-inf"})
_MOMENTS = ("min", "max", "mean", "std")
MOST_TEXT = 1_000  # characters of a dtype, a reason or a note
_MOST_RANKS = 1_000_000
_AGAIN = "it is cut short or was edited: recreate it with: syncheck fingerprint"


def matches(head: bytes) -> bool:
    """Whether the first bytes are the start of a JSON object with the fingerprint's first key."""
    return re.match(_START, head) is not None


def read(path: str) -> Snapshot:
    """Open a fingerprint, whose tensors have digests and no bytes.

    Raises MalformedFile for invalid JSON or content, UnsupportedFormat for a newer version.
    """
    raw = read_whole(path, MAX_SIZE, _AGAIN)
    document = parse_json_object(raw, path, "file", _AGAIN, entry=b'"shape"', finite=True)
    _check_version(path, document.get(KEY))
    algorithm = document.get("algorithm")
    if not _is_text(algorithm) or not algorithm:
        raise _malformed(
            path,
            "algorithm",
            problem=brief(algorithm),
            needed="a name",
        )

    entries = _get_dict(document, "tensors", path)
    if len(entries) > untrusted.MOST_TENSORS:
        raise _malformed(
            path,
            "tensors",
            problem=f"{len(entries)} tensors",
            needed=f"at most {untrusted.MOST_TENSORS}",
        )

    metadata = None
    if document.get("metadata") is not None:
        metadata = parse_metadata(document["metadata"], path)
    tensors = {name: _check_tensor(path, name, entry, algorithm) for name, entry in entries.items()}
    document_values = _get_dict(document, "values", path)
    values = {name: _check_value(path, name, value) for name, value in document_values.items()}
    stubs = _get_texts(document, "stubs", path)
    notes = [Note.STORED(text=text) for text in _get_texts(document, "notes", path)]
    return Snapshot(
        path=path,
        format=FORMAT,
        bytes=len(raw),
        tensors=tensors,
        values=values,
        stubs=stubs,
        metadata=metadata,
        notes=(Note.FINGERPRINT(), *notes),
        model_values=_get_model_values(document, path),
    )


def _check_version(path: str, version: Any) -> None:
    """Raise MalformedFile for an invalid version, and UnsupportedFormat for a newer one."""
    if type(version) is not int or version < 1:
        raise _malformed(
            path,
            KEY,
            problem=brief(version),
            needed="a version number",
        )
    # A newer version may have fields that change the meaning of the others.
    if version > VERSION:
        raise UnsupportedFormat(
            path,
            place=KEY,
            found=f"version {brief(version)}",
            needed=f"at most {VERSION}",
            next_step="install a newer syncheck",
        )


def _get_dict(document: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = document.get(key)
    if not isinstance(value, dict):
        raise _malformed(
            path,
            key,
            problem=brief(value),
            needed="an object by name",
        )
    return value


def _get_model_values(document: dict[str, Any], path: str) -> dict[str, Membership]:
    """Return the names of the model's values; fingerprints of version 0.2 have none."""
    if "model_values" not in document:
        return {}

    texts = _get_dict(document, "model_values", path)
    memberships = {membership.value: membership for membership in Membership}
    model_values = {}
    for name, text in texts.items():
        if not isinstance(text, str) or text not in memberships:
            raise _malformed(
                path,
                "model_values",
                problem=brief(texts),
                needed=f"{', '.join(memberships)} by name",
            )
        model_values[name] = memberships[text]
    return model_values


def _get_texts(document: dict[str, Any], key: str, path: str) -> tuple[str, ...]:
    texts = document.get(key)
    if not _are_texts(texts):
        raise _malformed(
            path,
            key,
            problem=brief(texts),
            needed="a list of strings",
        )
    return tuple(texts)


def _check_value(path: str, name: str, value: Any) -> Any:
    """Read one value; floats that JSON lacks are stored as {"float": "nan"}."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict) and value in _SPECIAL_FLOATS:
        return float(value["float"])
    raise _malformed(
        path,
        f"value '{name}'",
        problem=brief(value),
        needed='a number, a string, null or {"float": "nan"}',
    )


def _check_tensor(path: str, name: str, entry: Any, algorithm: str) -> Tensor:
    label = f"tensor '{name}'"
    if not isinstance(entry, dict):
        raise _malformed(
            path,
            label,
            problem=brief(entry),
            needed="an object",
        )

    dtype, refused, digest = entry.get("dtype"), entry.get("refused"), entry.get("digest")
    shape = _check_naturals(entry.get("shape"), MOST_DIMENSIONS)
    if not _is_text(dtype) or shape is None or math.prod(shape) > MOST_ELEMENTS:
        raise _malformed(
            path,
            label,
            problem=f"{brief(dtype, 20)} {brief(entry.get('shape'))}",
            needed="a dtype and sizes",
        )

    strides = contiguous_strides(shape)
    if digest is None and _is_text(refused):
        return Tensor(
            name=name,
            dtype=dtype,
            shape=shape,
            strides=strides,
            path=path,
            offset=0,
            refused=_find_refusal(refused, entry),
        )
    if refused is not None or not _is_digest(digest):
        problem = f"digest {brief(digest)}, refused {brief(refused)}"
        raise _malformed(
            path,
            label,
            problem=problem,
            needed="a digest of 16 to 128 hex digits, or a reason for its absence",
        )
    if dtype not in DTYPES:
        raise _malformed(
            path,
            label,
            problem=f"dtype {brief(dtype)}",
            needed=f"one of {', '.join(DTYPES)}",
        )

    tensor_digest = _read_digest(path, label, entry, algorithm, elements=math.prod(shape))
    sharding_entry = entry.get("sharding")
    sharding = None if sharding_entry is None else _check_sharding(path, label, sharding_entry)
    return Tensor(
        name=name,
        dtype=dtype,
        shape=shape,
        strides=strides,
        path=path,
        offset=0,
        sharding=sharding,
        digest=tensor_digest,
    )


def _read_digest(path: str, label: str, entry: dict[str, Any], algorithm: str, elements: int) -> Digest:
    """Return the digest and the statistics of a tensor. elements: number of elements of the tensor."""
    moments = {key: _check_number(path, label, key, entry.get(key)) for key in _MOMENTS}
    nonfinite = _check_count(path, label, entry.get("nonfinite"), most=elements)
    return Digest(algorithm, entry["digest"], nonfinite, **moments)


def _is_digest(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and re.fullmatch(_DIGEST, value) is not None


def _check_count(path: str, label: str, value: Any, most: int) -> int | None:
    """Return the number of non-finite elements, or None if it is unknown."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= most:
        raise _malformed(
            path,
            label,
            problem=f"nonfinite {brief(value)}",
            needed="a number of elements",
        )
    return value


def _check_number(path: str, label: str, key: str, value: Any) -> float | None:
    if value is None:
        return None

    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # JSON integers have no upper limit, and 1e999 is read as infinity.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise _malformed(
            path,
            label,
            problem=f"{key} {brief(value)}",
            needed="a finite number or null",
        )
    return float(value)


def _check_sharding(path: str, label: str, entry: Any) -> Sharding:
    """Return the layout of a DTensor. label: of its tensor, for errors."""
    sharding = _read_sharding(entry) if isinstance(entry, dict) else None
    if sharding is None or not _is_consistent(sharding):
        needed = "a mesh, its ranks, and a placement by dimension"
        raise _malformed(
            path,
            label,
            problem=f"sharding {brief(entry)}",
            needed=needed,
        )
    return sharding


def _read_sharding(entry: dict[str, Any]) -> Sharding | None:
    """Return a layout whose fields have the right types, or None."""
    mesh = _check_naturals(entry.get("mesh"), MOST_DIMENSIONS)
    ranks = _check_naturals(entry.get("ranks"), _MOST_RANKS)
    placements = _check_words(entry.get("placements"))
    shape = _check_naturals(entry.get("shape"), MOST_DIMENSIONS)
    names = _check_words(entry.get("names"))
    coordinate = _check_naturals(entry.get("coordinate"), MOST_DIMENSIONS)
    root_coordinate = _check_root_coordinate(entry.get("beside", []))
    fields = (mesh, ranks, placements, shape, names, coordinate, root_coordinate)
    if None in fields:
        return None
    return Sharding(*fields)  # type: ignore[arg-type]  # none of them is None


def _check_root_coordinate(pairs: Any) -> tuple[tuple[str, int], ...] | None:
    """Return pairs of a name and a coordinate as tuples, or None if they are invalid."""
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        return None

    names = [name for name, _ in pairs]
    coordinate = [index for _, index in pairs]
    if not _are_texts(names) or _check_naturals(coordinate, MOST_DIMENSIONS) is None:
        return None
    return tuple(zip(names, coordinate, strict=True))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _is_consistent(sharding: Sharding) -> bool:
    """Whether all fields have the dimensions of the mesh, and the rank is within it."""
    dimensions = len(sharding.mesh)
    if len(sharding.placements) != dimensions or math.prod(sharding.mesh) != len(sharding.ranks):
        return False

    # Names and coordinates may be unknown.
    for field in (sharding.names, sharding.coordinate):
        if len(field) not in (0, dimensions):
            return False
    return all(index < size for index, size in zip(sharding.coordinate, sharding.mesh, strict=False))


def _check_naturals(value: Any, most: int) -> tuple[int, ...] | None:
    """Return a list of sizes or ranks as a tuple, or None if it is invalid."""
    if not isinstance(value, list) or len(value) > most:
        return None
    return tuple(value) if are_naturals(value) else None


def _check_words(value: Any) -> tuple[str, ...] | None:
    """Return a list of texts that are not empty as a tuple, or None if it is invalid."""
    return tuple(value) if _are_texts(value) and "" not in value else None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MOST_TEXT


def _are_texts(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(_is_text(text) for text in value)


def _malformed(path: str, label: str, *, problem: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=label,
        found=problem,
        needed=needed,
        next_step=_AGAIN,
    )


def _find_refusal(text: str, entry: dict[str, Any]) -> Message:
    """Return the refusal of a tensor from its text in the fingerprint. entry: of the tensor."""
    reason: Message = Refusal.STORED(text=text or "no reason is given")
    # A reason of this version is the same message, so that it is counted and explained like that of a checkpoint.
    if text in _REFUSALS:
        reason = _REFUSALS[text]()
    return Refusal.IN_PARTS(refusal=reason) if entry.get("in_parts") is True else reason
