"""The data set in the repository: 1,797 real handwritten digits of 8x8 pixels; see files/digits/SOURCE.md."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from train.data.augment import build_augment
from train.data.dataset import Data, DataOptions, Images, Normalize, locate_file
from train.errors import UserError

FOLDER = Path(__file__).resolve().parent / "files" / "digits"
FILE = "digits.npz"
# The other 360, 20 %, are the test set.
TRAIN = 1437
# Pixels are 0 to 16. Mean and standard deviation of the 1,437 training images divided by 16.
MEAN, STD = 0.3054, 0.3759


def load_digits(folder: Path | None, options: DataOptions) -> Data:
    """Read digits.npz from `folder` (None: the copy in the repository), and split it into training and test samples.

    The file is sorted by writer, and most writers wrote 0 to 9 in order, so neither the end of the file nor every fifth
    row would be a fair test set. The samples are therefore shuffled with a fixed seed. NumPy guarantees that the stream
    of RandomState never changes (NEP 19), so the split is the same everywhere. Raises UserError if the file is missing
    or invalid.
    """
    path, hint = locate_file(folder, FOLDER, FILE)
    try:
        with np.load(path) as archive:
            images, labels = archive["images"], archive["labels"]
    except FileNotFoundError as error:
        raise UserError(f"{path}: not found; {hint}") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    if images.shape != (1797, 8, 8) or labels.shape != (1797,):
        shapes = f"images {images.shape}, labels {labels.shape}"
        raise UserError(f"{path}: wrong shapes: found {shapes}; expected (1797, 8, 8) and (1797,)")
    order = np.random.RandomState(0).permutation(len(labels))
    x = torch.from_numpy((images[order, None].astype(np.float32) / 16 - MEAN) / STD)  # [1797, 1, 8, 8]
    y = torch.from_numpy(labels[order].astype(np.int64))  # [1797]
    train, test = Images(x[:TRAIN], y[:TRAIN]), Images(x[TRAIN:], y[TRAIN:])
    augment = build_augment(options, channels=1, flip=False)
    if augment is not None:
        # Augmentation needs bytes. Rounding changes a pixel by at most 1/510; the test images stay exact.
        pixels = torch.from_numpy(np.rint(images[order[:TRAIN], None] * (255 / 16)).astype(np.uint8))
        train = Images(pixels, y[:TRAIN], Normalize((MEAN,), (STD,)), augment)
    return Data(train, test, channels=1, classes=10, image_size=8)
