"""The versions of syncheck and of its libraries, for bug reports. No library is imported."""

from __future__ import annotations

import os
import sys

# Importing `typing` would take as long as all the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# Dependencies, then the optional libraries of live checks, of the trainer's pictures and of the pytest plugin.
LIBRARIES = ("numpy", "ml_dtypes", "rich", "rich-argparse", "torch", "xxhash", "safetensors", "matplotlib", "pytest")


def list_versions() -> list[str]:
    """Return the environment for a bug report, syncheck first."""
    import platform

    versions = find_versions(LIBRARIES)
    libraries = [f"{library} {versions.get(library, '-')}" for library in LIBRARIES]
    return [
        f"syncheck {version()}",
        f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}",
        ", ".join(libraries),
        f"in {os.path.dirname(os.path.realpath(__file__))}",
    ]


def version() -> str:
    """Return the installed version of syncheck."""
    return find_versions(("syncheck",)).get("syncheck", "unknown")


def find_versions(names: Collection[str]) -> dict[str, str]:
    """Return the versions of the installed distributions among these names.

    Reads the names of the metadata folders on sys.path, for example `rich_argparse-1.7.0.dist-info`. importlib.metadata
    would parse the metadata as e-mails, and importing it takes three times as long as all of `syncheck --version`.
    """
    requested = {_normalize(name): name for name in names}
    versions: dict[str, str] = {}
    for path in _list_metadata():
        stem, _ = os.path.splitext(os.path.basename(path))
        distribution, _, number = stem.partition("-")
        # Only once: the first folder on sys.path has the code that would be imported.
        name = requested.pop(_normalize(distribution), None)
        if name is not None:
            versions[name] = number.partition("-")[0] or _read_version(path)
    return versions


def _normalize(name: str) -> str:
    return name.lower().replace("-", "_")


def _list_metadata() -> list[str]:
    """Return the metadata folders of all distributions, in the order of sys.path."""
    paths = []
    for folder in sys.path:
        try:
            entries = os.listdir(folder or os.curdir)
        except OSError:  # an archive, or a folder that does not exist
            continue
        paths += [os.path.join(folder, entry) for entry in entries if entry.endswith((".dist-info", ".egg-info"))]
    return paths


def _read_version(folder: str) -> str:
    """Return the version in a metadata folder of a source tree, whose name has none."""
    try:
        with open(os.path.join(folder, "PKG-INFO"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        if line.startswith("Version:"):
            return line.partition(":")[2].strip()
    return "unknown"
