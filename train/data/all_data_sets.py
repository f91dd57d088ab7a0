"""The table of data sets, and loading one by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.data.dataset import Data, DataOptions, limit
from train.data.digits import load_digits
from train.data.mixup import Mixup
from train.data.synthetic import load_synthetic
from train.data.text import load_text
from train.data.vision import SOURCES
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Each function takes the folder of --data-dir (None: the default of the data set) and the options.
DATASETS: dict[str, Callable[[Path | None, DataOptions], Data]] = {
    "digits": load_digits,
    "synthetic": load_synthetic,
    "text": load_text,
    **{source.name: source.load for source in SOURCES},
}
DEFAULT = DataOptions()
SYNTHETIC_OPTIONS = ("image_size", "channels", "classes", "train_samples")


def load_data(name: str, folder: Path | None, limit_train: int | None, options: DataOptions = DEFAULT) -> Data:
    """Load the data set `name` and keep its first `limit_train` training samples.

    Raises UserError for unknown names, unsupported options, and missing or invalid files.
    """
    if name not in DATASETS:
        raise UserError(f"--data {name}: unknown; supported: {', '.join(DATASETS)}")
    for field in SYNTHETIC_OPTIONS:
        if name != "synthetic" and getattr(options, field) is not None:
            option = f"--{field.replace('_', '-')} {getattr(options, field)}"
            raise UserError(f"{option}: not supported by --data {name}; use --data synthetic")
    data = DATASETS[name](folder, options)
    if options.mixup or options.label_smoothing:
        data.train.mixup = Mixup(options.seed, data.classes, options.mixup, options.label_smoothing)
    return limit(data, limit_train, name)
