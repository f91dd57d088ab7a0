"""The environment for a bug report: versions of syncheck, Python, the platform and libraries."""

from __future__ import annotations

# Dependencies, then the optional libraries of live checks, HTML pages and the pytest plugin.
LIBRARIES = ("numpy", "ml_dtypes", "rich", "rich-argparse", "torch", "xxhash", "safetensors", "matplotlib", "pytest")


def list_versions() -> list[str]:
    """Return lines with the versions, syncheck first, without importing the libraries."""
    import platform
    from importlib import metadata
    from pathlib import Path

    from syncheck.report.files import version

    found = []
    for library in LIBRARIES:
        try:
            found.append(f"{library} {metadata.version(library)}")
        except metadata.PackageNotFoundError:
            found.append(f"{library} -")
    return [
        f"syncheck {version()}",
        f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}",
        ", ".join(found),
        f"in {Path(__file__).resolve().parents[1]}",
    ]
