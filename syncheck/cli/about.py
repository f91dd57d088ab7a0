"""What a bug report needs: versions of what takes part, and of the machine."""

from __future__ import annotations

# Dependencies, then what live checks, pages and the pytest plugin use where it is installed.
LIBRARIES = ("numpy", "ml_dtypes", "rich", "rich-argparse", "torch", "xxhash", "safetensors", "matplotlib", "pytest")


def lines() -> list[str]:
    """Return the versions a line each, that of syncheck first. Nothing of it is imported to ask it."""
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
