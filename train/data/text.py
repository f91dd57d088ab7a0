"""The text in the repository: two plays of Shakespeare as bytes; see files/text/LICENSE."""

from __future__ import annotations

from pathlib import Path

import torch

from train.data.dataset import Data, DataOptions, Images, locate_file
from train.errors import UserError

FOLDER = Path(__file__).resolve().parent / "files" / "text"
FILE = "text.txt"
SEQUENCE = 64  # bytes of a sample
VOCABULARY = 256


def load_text(folder: Path | None, options: DataOptions) -> Data:
    """Read text.txt from `folder` (None: the copy in the repository); its last tenth is the test set.

    A sample is (x, y), int64 [64] each: 64 bytes and the byte after each byte. Each byte is predicted once.
    Raises UserError if the file is missing or too short, and for --augment, --mixup and --label-smoothing.
    """
    if options.augment != "none":
        raise UserError(f"--augment {options.augment}: changes images; not supported by --data text")
    for option, number in (("--mixup", options.mixup), ("--label-smoothing", options.label_smoothing)):
        if number:
            raise UserError(f"{option} {number}: changes images and their labels; not supported by --data text")
    path, hint = locate_file(folder, FOLDER, FILE)
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found; {hint}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    # The test set, a tenth, needs one sample, and the byte after it.
    least = 10 * (SEQUENCE + 1)
    if len(text) < least:
        raise UserError(f"{path}: a text of {len(text)} bytes is too short; needs at least {least}")
    end = len(text) - len(text) // 10
    train, test = split_windows(text[:end]), split_windows(text[end:])
    return Data(train, test, channels=0, classes=VOCABULARY, image_size=SEQUENCE)


def split_windows(text: bytes) -> Images:
    """Split the text into consecutive samples; the rest of the text is omitted."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    end = (len(tokens) - 1) // SEQUENCE * SEQUENCE
    return Images(tokens[:end].view(-1, SEQUENCE), tokens[1 : end + 1].view(-1, SEQUENCE))
