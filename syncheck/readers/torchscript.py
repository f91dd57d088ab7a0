"""The constants and the code of a TorchScript archive, beside the attributes of its modules.

Tracing and freezing turn tensors into constants, which the code names CONSTANTS.c0, CONSTANTS.c1 and so on. Numbers
are written into the code itself. The code is not interpreted: only its digest is compared.
Layout: torch/csrc/jit/serialization/export_module.cpp of torch 2.6 to 2.15.
"""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile
from syncheck.names import CODE
from syncheck.readers.pickles.tree import Flat, flatten

if TYPE_CHECKING:
    from syncheck.readers.torch_zip import Archive
    from syncheck.snapshots import Snapshot, Tensor

# The name of the constants in the code.
_CONSTANTS = "CONSTANTS"
_RECORD = "constants.pkl"
# Limit of all code together in bytes, far above any model.
_MOST_CODE = 1 << 26
_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, ValueError)
_MANGLED = re.compile(r"[./]___torch_mangle_\d+")
_DEFINITION = re.compile(r"(?m)^(?=class |def )")


def is_script(archive: Archive) -> bool:
    """Whether an archive was written by torch.jit.save."""
    return any(name.startswith(f"{archive.stem}code/") for name in archive.records)


def add_script(archive: Archive, snapshot: Snapshot) -> Snapshot:
    """Return the checkpoint in an archive of torch.jit.save with its constants and the digest of its code."""
    tensors, flat = _read_constants(archive)
    values = {**flat.values, CODE: _digest_code(archive)}
    return replace(
        snapshot, tensors={**snapshot.tensors, **tensors}, values={**snapshot.values, **values},
        # A state dict of the same model has neither code nor constants.
        model_values={**snapshot.model_values, **dict.fromkeys(values, False)},
    )  # fmt: skip


def _read_constants(archive: Archive) -> tuple[dict[str, Tensor], Flat]:
    """Return the tensors among the constants of the code, and all constants by name."""
    if archive.stem + _RECORD not in archive.records:
        return {}, Flat()
    pickled = archive.unpickle_record(_RECORD)
    constants = pickled.tree if isinstance(pickled.tree, (tuple, list)) else [pickled.tree]
    tree = {_CONSTANTS: {f"c{i}": part for i, part in enumerate(constants)}}
    flat = flatten(tree, archive.path, pickled.size, pickled.made)
    tensors = {}
    for name, location in flat.tensors.items():
        tensors[name] = archive.tensor(name, location, "constants")
    return tensors, flat


def _digest_code(archive: Archive) -> str:
    """Return the digest of all classes and functions, which does not depend on their order.

    torch.jit numbers the classes of a process that have the same name; these numbers are removed.
    """
    names = [name for name in archive.records if name.startswith(f"{archive.stem}code/") and name.endswith(".py")]
    size = sum(archive.records[name].file_size for name in names)
    if size > _MOST_CODE:
        raise MalformedFile(archive.path, place="code", found=f"{size} bytes of code", needed=f"at most {_MOST_CODE}")
    definitions: list[str] = []
    for name in names:
        try:
            text = archive.read_text(name)
        except _ERRORS as error:
            raise MalformedFile(archive.path, place=name, found=f"{error!s:.100}", next_step="save it again") from None
        label = _MANGLED.sub("", name.removeprefix(archive.stem))
        parts = _DEFINITION.split(_MANGLED.sub("", text))
        definitions += [f"{label}\n{part.strip()}" for part in parts]
    digest = blake2b(digest_size=16)
    for definition in sorted(definitions):
        digest.update(definition.encode("utf-8", "replace") + b"\0")
    return f"{len(definitions)} definitions, blake2b-128 {digest.hexdigest()}"
