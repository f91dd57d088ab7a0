"""MNIST, CIFAR-10 and CIFAR-100, read by torchvision from its `root` folder, and kept in memory as bytes.

CIFAR files are pickles, which can execute code when loaded. torchvision loads them only if their MD5 matches the
published files. This module checks the MD5 first, to report the path of a file that does not match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.data.augment import build_augment
from train.data.dataset import Data, DataOptions, Images, Normalize
from train.data.folders import check_folder
from train.errors import UserError, explain_os_error, join_lines

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A data set of torchvision.

    name: value of --data. kind: torchvision's class. shape: channels, H and W. flip: whether mirroring preserves the
    class. contents: expected contents of the folder. address: source for a manual download.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]
    classes: int
    normalize: Normalize
    flip: bool
    contents: str
    address: str

    def load(self, folder: Path | None, options: DataOptions) -> Data:
        """Load the data set from `folder`. Raises UserError for missing, damaged or unexpected files."""
        augment = build_augment(options, self.shape[0], flip=self.flip)
        train, test = self.read(folder)
        train_images, test_images = Images(*train, self.normalize, augment), Images(*test, self.normalize)
        return Data(train_images, test_images, self.shape[0], self.classes, self.shape[-1])

    def read(self, folder: Path | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Read images, uint8 [N, channels, H, W], and labels, int64 [N], of the training and the test set.

        Raises UserError.
        """
        if folder is None:
            raise UserError(f"--data {self.name}: needs --data-dir, a folder with {self.contents}")
        first_file, _ = self.list_files(folder)[0]
        check_folder(folder, str(first_file.parent.relative_to(folder)), "add --download")
        self.check_files(folder)
        return self._read_part(folder, train=True), self._read_part(folder, train=False)

    def check_files(self, folder: Path) -> None:
        """Check that all files exist and have the published MD5. Raises UserError."""
        files = self.list_files(folder)
        missing = [path for path, _ in files if not path.is_file()]
        if missing:
            count = f"{len(missing)} of {len(files)} files are missing"
            advice = f"add --download, or get {self.contents} from {self.address}"
            raise UserError(f"--data {self.name}: {missing[0]} not found ({count}); {advice}")
        from torchvision.datasets.utils import check_integrity  # type: ignore[import-untyped]

        for path, md5 in files:
            with explain_os_error(f"{path}: cannot be read"):
                is_published = md5 is None or check_integrity(path, md5)
            if not is_published:
                raise UserError(f"{path}: not the published file (MD5 {md5}); replace it with --download")

    def list_files(self, folder: Path) -> list[tuple[Path, str | None]]:
        """List the files that torchvision reads, with the MD5 of each file if it is published."""
        kind = self.import_class()
        if self.kind == "MNIST":  # only MD5s of the packed files are published
            return [(folder / "MNIST" / "raw" / name.removesuffix(".gz"), None) for name, _ in kind.resources]
        batches = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        return [(folder / kind.base_folder / name, md5) for name, md5 in batches]

    def list_archives(self, folder: Path) -> list[tuple[Path, str]]:
        """List the files that torchvision downloads, with their MD5s."""
        kind = self.import_class()
        if self.kind == "MNIST":
            return [(folder / "MNIST" / "raw" / name, md5) for name, md5 in kind.resources]
        return [(folder / kind.filename, kind.tgz_md5)]

    def import_class(self) -> Any:
        """Return torchvision's class. Raises UserError if torchvision is missing."""
        try:
            # Imported only for torchvision data sets, because the import takes seconds.
            from torchvision import datasets  # type: ignore[import-untyped]
        except ImportError as error:
            raise UserError(f"--data {self.name} needs torchvision: pip install -e '.[train]'") from error
        return getattr(datasets, self.kind)

    def _read_part(self, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
        part = "training" if train else "test"
        try:
            samples = self.import_class()(folder, train=train)
            images, labels = torch.as_tensor(samples.data), torch.as_tensor(samples.targets)
        except Exception as error:  # torchvision, numpy, torch and pickle raise many kinds for damaged files
            problem = f"the {part} files in {folder} are damaged: {join_lines(error)}"
            raise UserError(f"--data {self.name}: {problem}; replace them with --download") from error
        # CIFAR's images are [N, H, W, channels], MNIST's [N, H, W].
        images = images.unsqueeze(1) if self.shape[0] == 1 else images.movedim(-1, 1)
        has_shape = (images.dtype, images.shape) == (torch.uint8, (len(labels), *self.shape))
        # numel: without labels, there is no smallest label.
        has_labels = labels.ndim == 1 and labels.numel() and 0 <= labels.min() <= labels.max() < self.classes
        if not (has_shape and has_labels):
            problem = f"the {part} files in {folder} contain {images.dtype} {list(images.shape)}, {len(labels)} labels"
            raise UserError(
                f"--data {self.name}: {problem}; expected uint8 {['N', *self.shape]}, N labels below {self.classes}"
            )
        return images.contiguous(), labels.long()


# Mean and standard deviation of all pixels of the training images. Sources: for MNIST, PyTorch's example
# (https://github.com/pytorch/examples/blob/main/mnist/main.py); for CIFAR,
# https://github.com/Armour/pytorch-nn-practice/blob/master/utils/meanstd.py. The common values 0.2023, 0.1994 and
# 0.2010 for CIFAR-10 are not standard deviations of its pixels: https://github.com/kuangliu/pytorch-cifar/issues/16.
SOURCES = (
    Source(
        name="mnist",
        kind="MNIST",
        shape=(1, 28, 28),
        classes=10,
        normalize=Normalize((0.1307,), (0.3081,)),
        flip=False,
        contents="MNIST/raw with the unpacked files",
        address="https://ossci-datasets.s3.amazonaws.com/mnist/",
    ),
    Source(
        name="cifar10",
        kind="CIFAR10",
        shape=(3, 32, 32),
        classes=10,
        normalize=Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        flip=True,
        contents="the folder cifar-10-batches-py",
        address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    ),
    Source(
        name="cifar100",
        kind="CIFAR100",
        shape=(3, 32, 32),
        classes=100,
        normalize=Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        flip=True,
        contents="the folder cifar-100-python",
        address="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    ),
)
