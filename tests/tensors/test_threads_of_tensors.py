"""Threads and limits of the system, which change the speed but not the result."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from support.checkpoints import save_pth, save_safetensors
from support.listings import list_fields

import syncheck
from syncheck.tensors import blocks
from syncheck.tensors.blocks import BLOCK, Files, ranges
from syncheck.tensors.clustering import cluster_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from syncheck.snapshots import Tensor

ELEMENTS = 5 * BLOCK + 3


def write_replicas(folder: Path, flips: list[list[int]]) -> list[Tensor]:
    """Write one replica per list. flips: the indices of the changed elements of each replica."""
    tensors = []
    for i, flipped in enumerate(flips):
        array = np.zeros(ELEMENTS, np.uint8)
        array[flipped] = 1
        path = save_safetensors(folder / f"rank{i}.safetensors", {"w": array})
        tensors.append(syncheck.read(str(path)).tensors["w"])
    return tensors


@pytest.fixture(autouse=True)
def _all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LARGE", 1)


@pytest.mark.parametrize("jobs", [1, 2, 3, 9])
@pytest.mark.parametrize(
    "flips, expected",
    [
        ([[], [], []], ((0, 1, 2),)),
        ([[], [BLOCK], [BLOCK]], ((1, 2), (0,))),
        ([[0], [BLOCK], [], [0], [BLOCK]], ((0, 3), (1, 4), (2,))),
        # Differences in blocks of different threads.
        ([[], [0], [0, BLOCK], [0, 2 * BLOCK], [0]], ((1, 4), (0,), (2,), (3,))),
        ([[], [ELEMENTS - 1]], ((0,), (1,))),
    ],
)
def test_threads_find_the_same_clusters(tmp_path: Path, flips: list[list[int]], expected: object, jobs: int) -> None:
    """Differences in blocks of different threads give the same clusters as a single thread."""
    with Files(jobs=jobs) as files:
        assert cluster_replicas(write_replicas(tmp_path, flips), files) == expected


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_shares_cover_every_block_once(tmp_path: Path, jobs: int) -> None:
    """Each block is assigned to exactly one thread."""
    tensors = write_replicas(tmp_path, [[], []])
    with Files(jobs=jobs) as files:
        assigned = blocks.run_in_shares(tensors, files, lambda share, _: list(share))
    assert len(assigned) == jobs
    assert sorted(chain.from_iterable(assigned)) == list(ranges(tensors))
    assert sum(list_fields(chain.from_iterable(assigned), 1)) == ELEMENTS


def test_error_in_a_thread_stops_the_other_threads(tmp_path: Path) -> None:
    """An error in a thread is raised in the caller, and stops the other threads."""
    tensors = write_replicas(tmp_path, [[], []])
    processed = []

    def work(share: Iterator[tuple[int, int]], job: int) -> None:
        if job:
            raise ValueError(f"in thread {job}")
        for block in share:
            processed.append(block)
            while threading.active_count() > before:  # until the other thread has failed
                time.sleep(0.001)

    before = threading.active_count()
    with Files(jobs=2) as files, pytest.raises(ValueError, match="in thread 1"):
        blocks.run_in_shares(tensors, files, work)
    assert len(processed) <= 1


@pytest.mark.parametrize("starting", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_thread_that_cannot_start(starting: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """If a thread cannot start, all jobs still run; after an interrupt, no started thread remains."""
    started: list[threading.Thread] = []
    real, done = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(started) == starting:
            raise error("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
        blocks.run_in_threads(lambda job, _: done.append(job), 4)
    assert len(started) == starting
    assert not any(thread.is_alive() for thread in started)
    assert sorted(done) == (list(range(4)) if error is RuntimeError else list(range(1, starting + 1)))


@pytest.mark.parametrize("jobs", [1, 3])
def test_file_that_shrinks(tmp_path: Path, jobs: int) -> None:
    """A file that shrinks during the comparison is malformed, not different."""
    tensors = write_replicas(tmp_path, [[], []])
    files = Files(jobs=jobs)
    for tensor in tensors:
        files.descriptor(tensor)
    os.truncate(tensors[1].path, ELEMENTS // 2)
    with pytest.raises(syncheck.CheckpointError, match="ends before byte"), files:
        cluster_replicas(tensors, files)


def test_default_number_of_threads() -> None:
    """The default is one thread per processor available to the process, at most four."""
    with Files() as files:
        assert files.jobs == min(4, len(os.sched_getaffinity(0)))
    with Files(jobs=7) as files:
        assert files.jobs == 7


@pytest.mark.parametrize("mapped", [False, True])
def test_more_replicas_than_file_descriptors(tmp_path: Path, mapped: bool) -> None:
    """With `ulimit -n 32`, 60 replicas are compared and the odd rank is found, also if tensors are memory-mapped."""
    torch = pytest.importorskip("torch")
    for i in range(60):
        w = (torch.arange(6.0) + (i == 42)).view(2, 3)
        torch.save({"w": w.t() if mapped else w}, tmp_path / f"rank{i}.pth")
    command = f"ulimit -n 32 && exec {sys.executable} -m syncheck compare --format json {tmp_path}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    (diff,) = json.loads(done.stdout)["groups"][0]["tensors"]
    assert diff["clusters"] == [[rank for rank in range(60) if rank != 42], [42]]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [32, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_renamed_shards_need_few_file_descriptors(tmp_path: Path, limit: int, transposed: bool) -> None:
    """Under a low `ulimit -n`, 150 shards with other names are compared through a map."""
    for i in range(150):
        tensor = np.random.default_rng(i).standard_normal((6, 4)).astype(np.float32)
        save_pth(tmp_path / "a" / f"stage{i}.pth", {f"layers.{i}.w": tensor})
        second = np.ascontiguousarray(tensor.T) if transposed else tensor
        save_pth(tmp_path / "b" / f"stage{i}.pth", {f"h.{i}.weight": second})
    rule = '[[rule]]\nname = "layers.{i}.w"\nparts = ["h.{i}.weight"]\n'
    (tmp_path / "map.toml").write_text(rule + ("transpose = true\n" if transposed else ""))
    command = f"ulimit -n {limit} && exec {sys.executable} -m syncheck diff --format json --map map.toml a b"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["identical"] == 150


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc here")
def test_files_make_room_for_other_descriptors(tmp_path: Path) -> None:
    """If the process runs out of descriptors, files that were opened earlier are closed."""
    paths = [save_pth(tmp_path / f"{i}.pth", {"w": np.full(4, i, np.float32)}) for i in range(12)]
    tensors = [syncheck.read(str(path)).tensors["w"] for path in paths]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Files(limit=12, jobs=1) as first, Files(limit=12, jobs=1) as second:
        for tensor in tensors[:4]:
            first.read(tensor, 0, 4, 0)
            second.read(tensor, 0, 4, 0)
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, before[1]))
        try:
            values = [bytes(files.read(t, 0, 4, 0)) for t, files in product(tensors, (first, second))]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert values == [np.full(4, i // 2, np.float32).tobytes() for i in range(24)]


def test_excessive_number_of_threads(tmp_path: Path) -> None:
    """An excessive number of threads is reduced to the useful maximum."""
    with Files(jobs=10**30) as files:
        assert (
            len(blocks.run_in_shares(write_replicas(tmp_path, [[], []]), files, lambda share, _: list(share)))
            == blocks.MOST_THREADS
        )


@pytest.mark.parametrize("shape", [(3, 0, 2), (0, 5), (0,)])
def test_tensors_without_elements_are_identical(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Tensors without elements are identical, whatever their strides."""
    torch = pytest.importorskip("torch")
    for i in range(2):
        empty = torch.zeros(shape[::-1]).permute(*reversed(range(len(shape))))
        torch.save({"w": empty, "v": torch.ones(2)}, tmp_path / f"rank{i}.pth")
    assert syncheck.compare(tmp_path).counts.identical == 2
