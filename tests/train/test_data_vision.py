"""MNIST and CIFAR from files: reading, downloads, and missing or damaged files."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from support.data_files import cifar, cifar_batch, digits, idx, mnist, publish_mnist
from support.imports import import_or_skip
from support.listings import list_fields, list_files, list_names, list_pairs

from train.data import DataOptions, download, load_data
from train.engine import train
from train.errors import UserError
from train.evaluate.__main__ import main as evaluate
from train.launch import RankContext
from train.models import build_model
from train.parts import load
from train.recorders.base import Recorder
from train.run import main
from train.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


import_or_skip("torchvision")


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and yield its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}/"
        finally:
            listening.shutdown()
            thread.join()


def test_mnist_is_read_and_normalized(tmp_path: Path) -> None:
    """Images are [1, 28, 28], normalized by the published mean and deviation, kept as bytes, labels beside them."""
    mnist(tmp_path)
    data = load_data("mnist", tmp_path, None)
    assert (len(data.train), len(data.test), data.channels, data.classes, data.image_size) == (200, 40, 1, 10, 28)
    pixels, labels = digits(200, test=False, size=28)
    x, y = data.train[:]
    assert (x.dtype, x.shape, y.dtype) == (torch.float32, (200, 1, 28, 28), torch.int64)
    assert np.allclose(x[:, 0].numpy(), (pixels / 255 - 0.1307) / 0.3081, atol=1e-5)
    assert np.array_equal(y.numpy(), labels)
    assert data.train.images.dtype == torch.uint8
    assert np.array_equal(data.test[:][1].numpy(), digits(40, test=True, size=28)[1])


@pytest.mark.parametrize(("name", "kind", "classes"), [("cifar10", "CIFAR10", 10), ("cifar100", "CIFAR100", 100)])
def test_cifar_is_read_and_normalized(
    name: str, kind: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training batches are concatenated, channels first, and each channel has its own mean and deviation."""
    folder = cifar(tmp_path, kind, monkeypatch)
    data = load_data(name, tmp_path, None)
    batches = sorted(path for path in folder.iterdir() if "batch_" in path.name or path.name == "train")
    contents = [pickle.loads(path.read_bytes()) for path in batches]
    pixels = np.concatenate(list_fields(contents, "data")).reshape(-1, 3, 32, 32)
    labels = np.concatenate([content.get("labels", content.get("fine_labels")) for content in contents])
    assert (len(data.train), len(data.test), data.channels, data.classes) == (len(pixels), 20, 3, classes)
    assert data.train.images.dtype == torch.uint8
    x, y = data.train[:]
    assert np.array_equal(y.numpy(), labels)
    mean = np.array(data.train.normalize.mean).reshape(3, 1, 1)
    std = np.array(data.train.normalize.std).reshape(3, 1, 1)
    assert np.allclose(x.numpy(), (pixels / 255 - mean) / std, atol=1e-5)
    assert len({*mean.flat}) == 3


def fail(capsys: pytest.CaptureFixture[str], name: str, folder: Path, *options: str) -> str:
    """Run the trainer on an invalid data set, check for exit code 2, and return the text of the only line."""
    assert main(["--data", name, "--data-dir", str(folder), "--progress", "none", *options]).code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("run.py: error: ")


def test_missing_data_dir_is_an_error() -> None:
    """A missing --data-dir, --download of a data set without files, and unsupported sizes are errors."""
    with pytest.raises(UserError, match=r"^--data mnist: .*--data-dir.*MNIST/raw"):
        load_data("mnist", None, None)
    with pytest.raises(UserError, match=r"^--data cifar10: .*--data-dir"):
        download("cifar10", None)
    for name in ("digits", "synthetic"):
        with pytest.raises(UserError, match=rf"^--download: .*--data {name} "):
            download(name, None)
    with pytest.raises(UserError, match=r"^--channels 3: .*mnist.*--data synthetic"):
        load_data("mnist", None, None, DataOptions(channels=3))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnist", "/MNIST/raw/train-images-idx3-ubyte .*4 of 4 .*--download"),
        ("cifar10", "/cifar-10-batches-py/data_batch_1 .*7 of 7 "),
        ("cifar100", "/cifar-100-python/train .*3 of 3 .*cifar-100-python.tar.gz$"),
    ],
)
def test_missing_files(name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without the files causes exit code 2, and a line with the path of the first file and the source."""
    with pytest.raises(UserError, match=message) as info:
        load_data(name, tmp_path, None)
    assert fail(capsys, name, tmp_path) == str(info.value)


def zeros(*shape: int) -> bytes:
    """Return a file of zeros in the format of MNIST."""
    return idx(np.zeros(shape, np.uint8))


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
DAMAGES: dict[str, dict[str, Callable[[bytes], bytes]]] = {
    "cut": {IMAGES: lambda content: content[:-1]},
    "empty": {IMAGES: lambda _: b""},
    "no idx": {IMAGES: lambda _: b"<html>404</html>"},
    "other type": {IMAGES: lambda content: content[:2] + b"\x0d" + content[3:]},
    "still packed": {IMAGES: gzip.compress},
    "larger images": {IMAGES: lambda _: zeros(200, 32, 32)},
    "no images": {IMAGES: lambda _: zeros(0, 28, 28), LABELS: lambda _: zeros(0)},
    "fewer labels": {LABELS: lambda _: zeros(7)},
    "a label too high": {LABELS: lambda _: idx(np.full(200, 10, np.uint8))},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_mnist(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged file causes one line with the folder and the part of the data."""
    mnist(tmp_path)
    for name, change in DAMAGES[damage].items():
        path = tmp_path / "MNIST" / "raw" / name
        path.write_bytes(change(path.read_bytes()))
    assert fail(capsys, "mnist", tmp_path).startswith(f"--data mnist: the training files in {tmp_path} ")


class Bomb:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (__import__("os").mkdir, (str(self.path),))


@pytest.mark.parametrize("file", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_pickle_with_another_md5_is_never_read(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CIFAR file without the published MD5 causes exit code 2, and its pickle is not loaded."""
    folder = cifar(tmp_path, "CIFAR10", monkeypatch)
    (folder / file).write_bytes(pickle.dumps(Bomb(tmp_path / "ran"), protocol=2))
    line = fail(capsys, "cifar10", tmp_path)
    assert line.startswith(f"{folder / file}: ")
    assert "MD5" in line
    assert not (tmp_path / "ran").exists()


BATCHES = {
    "data_batch_2": [b"", b"\x80\x02not a pickle", pickle.dumps({"labels": [1]}), pickle.dumps(3)],
    "test_batch": [cifar_batch(np.zeros((20, 3, 32, 32), np.uint8), [10] * 20, "labels")],  # a label too high
}


@pytest.mark.parametrize(("name", "content"), list_pairs(BATCHES))
def test_an_invalid_batch(name: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a batch has the right MD5 but is not a pickle, or has no images or invalid labels, the error is one line."""
    cifar(tmp_path, "CIFAR10", monkeypatch, lambda files: files.update({name: content}))
    part = "test" if name == "test_batch" else "training"
    with pytest.raises(UserError, match=f"^--data cifar10: the {part} files in {tmp_path} ") as info:
        load_data("cifar10", tmp_path, None)
    assert "\n" not in str(info.value)


def test_mnist_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--download writes the four files and nothing else, and does not need the server a second time."""
    (tmp_path / "there").mkdir()
    files = mnist(tmp_path / "made", packed=True)
    for name, content in files.items():
        (tmp_path / "there" / name).write_bytes(content)
    with server(tmp_path / "there") as address:
        publish_mnist(monkeypatch, files, address)
        settings = Settings(data="mnist", data_dir=tmp_path / "here" / "data", download=True)
        assert len(load(settings, RankContext()).train) == 200
    names = sorted(list_names((tmp_path / "here").rglob("*")))
    assert names == sorted(["data", "MNIST", "raw", *(name.removesuffix(".gz") for name in files)])
    assert len(load(settings, RankContext()).test) == 40


def test_packed_files_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--download unpacks archives in the folder without a network, keeps them, and replaces damaged files."""
    publish_mnist(monkeypatch, mnist(tmp_path, packed=True), "http://127.0.0.1:9/")
    raw = tmp_path / "MNIST" / "raw"
    (raw / "train-images-idx3-ubyte").write_bytes(b"half of it, from an earlier run that was killed")
    download("mnist", tmp_path)
    assert len(load_data("mnist", tmp_path, None).train) == 200
    assert len(list(raw.glob("*.gz"))) == 4
    assert not any(path.is_symlink() for path in raw.iterdir())


def test_cifar_is_downloaded_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--download replaces a damaged batch; an archive with another MD5 is refused and removed."""
    from torchvision.datasets import CIFAR10

    folder = cifar(tmp_path / "there", "CIFAR10", monkeypatch)
    data_dir = tmp_path / "here"
    shutil.copytree(folder, data_dir / folder.name)
    (data_dir / folder.name / "data_batch_1").write_bytes(b"damaged")
    with server(tmp_path / "there") as address:
        monkeypatch.setattr(CIFAR10, "url", f"{address}cifar-10-python.tar.gz")
        with monkeypatch.context() as patch:
            patch.setattr(CIFAR10, "tgz_md5", "0" * 32)
            with pytest.raises(UserError, match=rf"^--download: .*cifar10 .*{data_dir}.* corrupted") as info:
                download("cifar10", data_dir)
            assert "\n" not in str(info.value)
        assert list_files(data_dir) == ["cifar-10-batches-py"]
        assert (data_dir / folder.name / "data_batch_1").read_bytes() == b"damaged"
        download("cifar10", data_dir)
    assert len(load_data("cifar10", data_dir, None).train) == 100


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If no server answers, or the folder cannot be written, there is one line with the reason and another source."""
    publish_mnist(monkeypatch, mnist(tmp_path / "made"), "http://127.0.0.1:9/")  # the port of "discard"
    folder = tmp_path / "data"
    line = fail(capsys, "mnist", folder, "--download")
    assert line.startswith("--download: ")
    assert f"{folder}: Error downloading train-images" in line
    assert "refused" in line
    assert line.endswith(" https://ossci-datasets.s3.amazonaws.com/mnist/")
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--download: .*mnist .*(exists|[Nn]ot a directory)"):
        download("mnist", tmp_path / "file")


def test_checkpoints_are_evaluated_on_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train.evaluate --data-dir` scores a run on MNIST's test files; without the folder it is an error."""
    mnist(tmp_path)
    model = build_model("mnist_convnet", 1, 10, 4, image_size=28)
    config = {"model": "mnist_convnet", "width": 4, "data": "mnist"}
    for rank in range(2):
        block = {"schema": 1, "run": "made", "run_id": "1", "rank": rank, "world_size": 2, "step": 1, "config": config}
        torch.save({"model": model.state_dict(), "syncheck": block}, tmp_path / f"made_rank{rank}.pth")
    files = [str(tmp_path / f"made_rank{rank}.pth") for rank in range(2)]
    assert evaluate([*files, "--data-dir", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [rank["own"]["samples"] for rank in run["ranks"]] == [40, 40]
    assert evaluate(files) == 2
    assert capsys.readouterr().err.startswith("evaluate.py: --data mnist: needs --data-dir")


def test_mnist_convnet_learns_mnist_files(tmp_path: Path) -> None:
    """The network of PyTorch's example, with its dropout, learns real digits from files in MNIST's format."""
    mnist(tmp_path, parts=(("train", 600), ("t10k", 200)))
    settings = Settings(
        model="mnist_convnet", width=8, data="mnist", data_dir=tmp_path, epochs=2, batch_size=20, lr=0.003,
        optimizer="adamw",
    )  # fmt: skip
    assert train(settings, RankContext(), Recorder()).test.accuracy > 0.5
