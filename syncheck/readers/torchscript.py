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
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.readers.pickles.tree import flatten
from syncheck.snapshots import Membership
from syncheck.tensors.names import CODE

if TYPE_CHECKING:
    from syncheck.readers.zip_archive import Archive
    from syncheck.snapshots import Snapshot, Tensor

# The name of the constants in the code.
_CONSTANTS = "CONSTANTS"
_RECORD = "constants.pkl"
_AGAIN = "it is damaged: save or copy the file again"
# Limit of all code together in bytes, far above any model.
_MOST_CODE = 1 << 26
_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, ValueError)
_MANGLED = r"[./]___torch_mangle_\d+"
_CODE_FILE = re.compile(r"code/.*\.py$")
_DEFINITION = r"(?m)^(?=class |def )"


def is_script(archive: Archive) -> bool:
    """Whether an archive was written by torch.jit.save."""
    return any(_is_code(name, archive) for name in archive.directory.records)


def _is_code(name: str, archive: Archive) -> bool:
    """Whether a record is a file of code."""
    return _CODE_FILE.match(name.removeprefix(archive.stem)) is not None


def add_script(archive: Archive, snapshot: Snapshot) -> Snapshot:
    """Return the checkpoint in an archive of torch.jit.save with its constants and the digest of its code."""
    tensors, values = _read_constants(archive)
    values[CODE] = _digest_code(archive)
    # A state dict of the same model has neither code nor constants.
    may_be_missing = dict.fromkeys(values, Membership.MODULE)
    return replace(
        snapshot,
        tensors={**snapshot.tensors, **tensors},
        values={**snapshot.values, **values},
        model_values={**snapshot.model_values, **may_be_missing},
    )


def _read_constants(archive: Archive) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the constants of the code by name: tensors, and plain values. Raises MalformedFile."""
    if archive.stem + _RECORD not in archive.directory.records:
        return {}, {}

    pickled = archive.unpickle(archive.read_record(_RECORD), _RECORD)
    if not isinstance(pickled.tree, tuple):
        kind = type(pickled.tree).__name__
        raise MalformedFile(
            archive.path,
            place=_RECORD,
            found=kind,
            needed="a tuple",
            next_step=_AGAIN,
        )

    # Their names in the code.
    constants = {f"c{number}": constant for number, constant in enumerate(pickled.tree)}
    flat = flatten({_CONSTANTS: constants}, archive.path, pickled.size, pickled.rebuilt)
    tensors = {name: archive.tensor(name, location, "constants") for name, location in flat.tensors.items()}
    return tensors, flat.values


def _digest_code(archive: Archive) -> str:
    """Return the digest of all classes and functions, which does not depend on their order.

    torch.jit numbers the classes of a process that have the same name; these numbers are removed.
    """
    definitions: list[str] = []
    size = 0
    for name, info in archive.directory.records.items():
        if not _is_code(name, archive):
            continue
        # The sizes in the directory limit how much is unpacked.
        size += info.file_size
        if size > _MOST_CODE:
            problem = f"more than {_MOST_CODE} bytes of code"
            raise MalformedFile(
                archive.path,
                place=name,
                found=problem,
                needed="less",
                next_step=_AGAIN,
            )
        text = re.sub(_MANGLED, "", _read_code(archive, name))
        label = re.sub(_MANGLED, "", name.removeprefix(archive.stem))
        # Classes with one name are in several files, or in one file if they are new in the process.
        definitions += [f"{label}\n{definition.strip()}" for definition in re.split(_DEFINITION, text)]

    from hashlib import blake2b  # loads OpenSSL, which files of torch.save do not need

    text = "\0".join(sorted(definitions))
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return f"{len(definitions)} definitions, blake2b-128 {digest}"


def _read_code(archive: Archive, name: str) -> str:
    """Return the text of a file of code. Raises MalformedFile for a damaged record."""
    try:
        return archive.read_text(name)
    except _ERRORS as error:
        problem = f"{error!s:.100}"
        raise MalformedFile(
            archive.path,
            place=name,
            found=problem,
            next_step=_AGAIN,
        ) from None
