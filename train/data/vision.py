"""MNIST, CIFAR-10 and CIFAR-100, read by torchvision from the folder that it calls root, and kept in memory as bytes.

CIFAR's files are pickles, which can run anything when they are read. torchvision reads one only if its MD5 is that of
the published file; so they are checked here too, to say which is not.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.data.augment import augmentation
from train.data.dataset import Data, DataOptions, Images, Normalize
from train.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# What reading a damaged file raises, in torchvision, numpy, torch and pickle.
BROKEN = (OSError, EOFError, RuntimeError, LookupError, ValueError, TypeError, AssertionError, pickle.UnpicklingError)


@dataclass(frozen=True)
class Source:
    """One of the data sets; to call it is to read it.

    name: for --data. kind: torchvision's class. shape: channels, H and W. flip: whether a mirrored image means the
    same. holds: what is expected in the folder. address: where to get it by hand.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    classes: int
    normalize: Normalize
    flip: bool
    holds: str
    address: str

    def __call__(self, folder: Path | None, options: DataOptions) -> Data:
        """Read it from `folder`. Raises UserError for files that are missing, damaged or of another shape."""
        augment = augmentation(options, self.shape[0], flip=self.flip)
        train, test = self.read(folder)
        trained, tested = Images(*train, self.normalize, augment), Images(*test, self.normalize)
        return Data(trained, tested, self.shape[0], self.classes, self.shape[-1])

    def read(self, folder: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Read the images, uint8 [N, channels, H, W], and labels, int64 [N], to train on and to test on.

        Raises UserError.
        """
        if folder is None:
            raise UserError(f"--data {self.name}: needs --data-dir, the folder that holds {self.holds}")
        self.check(folder)
        return self._part(folder, train=True), self._part(folder, train=False)

    def check(self, folder: Path) -> None:
        """Look for the files, without reading them into anything. Raises UserError."""
        files = self.files(folder)
        absent = [path for path, _ in files if not path.is_file()]
        if absent:
            found = f"no {absent[0].relative_to(folder)} in {folder} ({len(absent)} of {len(files)} files are missing)"
            raise UserError(f"--data {self.name}: {found}; add --download, or put there {self.holds} of {self.address}")
        from torchvision.datasets.utils import check_integrity  # type: ignore[import-untyped]

        for path, md5 in files:
            try:
                fits = md5 is None or check_integrity(path, md5)
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from error
            if not fits:
                raise UserError(f"{path} is not the published file, whose MD5 is {md5}; --download replaces it")

    def files(self, folder: Path) -> list[tuple[Path, str | None]]:
        """List the files that torchvision reads, each with its MD5 where that is known."""
        kind = self.dataset()
        if self.kind == "MNIST":  # the MD5s are those of the packed files
            return [(folder / "MNIST" / "raw" / name.removesuffix(".gz"), None) for name, _ in kind.resources]
        batches = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        return [(folder / kind.base_folder / name, md5) for name, md5 in batches]

    def archives(self, folder: Path) -> list[tuple[Path, str]]:
        """List the files that torchvision downloads, with their MD5s."""
        kind = self.dataset()
        if self.kind == "MNIST":
            return [(folder / "MNIST" / "raw" / name, md5) for name, md5 in kind.resources]
        return [(folder / kind.filename, kind.tgz_md5)]

    def dataset(self) -> Any:
        """Give torchvision's class. Raises UserError where torchvision is missing."""
        try:
            from torchvision import datasets  # type: ignore[import-untyped]  # here, because it takes seconds and few runs need it
        except ImportError as error:
            raise UserError(f"--data {self.name} needs torchvision: pip install -e '.[train]'") from error
        return getattr(datasets, self.kind)

    def _part(self, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
        part = "training" if train else "test"
        try:
            samples = self.dataset()(folder, train=train)
            images, labels = torch.as_tensor(samples.data), torch.as_tensor(samples.targets)
        except BROKEN as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"--data {self.name}: the {part} files in {folder} are damaged: {reason}; --download replaces them"
            ) from error
        # Channels are the last dimension in CIFAR's, and there is none in MNIST's.
        images = images.unsqueeze(1) if self.shape[0] == 1 else images.movedim(-1, 1)
        fits = images.dtype == torch.uint8 and images.shape == (len(labels), *self.shape) and len(labels) > 0
        if not fits or labels.ndim != 1 or not 0 <= labels.min() <= labels.max() < self.classes:
            found = f"the {part} files in {folder} hold {images.dtype} {list(images.shape)}, {len(labels)} labels"
            raise UserError(
                f"--data {self.name}: {found}; needs uint8 {['N', *self.shape]}, N labels below {self.classes}"
            )
        return images.contiguous(), labels.long()


# The mean and deviation of all pixels of the training images: those of MNIST as in PyTorch's example
# (https://github.com/pytorch/examples/blob/main/mnist/main.py), those of CIFAR as computed in
# https://github.com/Armour/pytorch-nn-practice/blob/master/utils/meanstd.py. The 0.2023, 0.1994 and 0.2010 that are
# often given for CIFAR-10 are no deviations of its pixels: https://github.com/kuangliu/pytorch-cifar/issues/16.
SOURCES = (
    Source(
        name="mnist",
        kind="MNIST",
        shape=(1, 28, 28),
        classes=10,
        normalize=Normalize((0.1307,), (0.3081,)),
        flip=False,
        holds="MNIST/raw with the unpacked files",
        address="https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    Source(
        name="cifar10",
        kind="CIFAR10",
        shape=(3, 32, 32),
        classes=10,
        normalize=Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        flip=True,
        holds="the folder cifar-10-batches-py",
        address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    Source(
        name="cifar100",
        kind="CIFAR100",
        shape=(3, 32, 32),
        classes=100,
        normalize=Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        flip=True,
        holds="the folder cifar-100-python",
        address="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    ),
)
