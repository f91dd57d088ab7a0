"""The rendezvous and the report of lost ranks, in threads with a file store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from torch.distributed import FileStore

from train.errors import RankError
from train.launch import RankContext
from train.launch.process_group import (
    agree_on_attempt,
    check_store_file,
    describe_lost_ranks,
    format_ranks,
    join_process_group,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_context(rank: int, world_size: int, backend: str = "gloo") -> RankContext:
    """Return the context of a rank."""
    return RankContext(rank, world_size, rank, backend=backend, init_method="tcp://store:1")


@pytest.mark.slow
def test_a_missing_rank(free_port: int) -> None:
    """After the timeout, a waiting rank raises torch's reason with its address."""
    ctx = replace(make_context(0, 2), init_method=f"tcp://127.0.0.1:{free_port}")
    with pytest.raises(RankError, match=rf"rank 0 of 2 .*tcp://127.0.0.1:{free_port}"):
        join_process_group(ctx, 1.0)


def test_each_start_has_its_own_keys(tmp_path: Path) -> None:
    """If a start in a store fails between two others, the ranks of each of them agree on a name of their own."""

    def agree(rank: int) -> str:
        time.sleep(0.1 * ((rank + 1) % 3))  # rank 2 looks first, and rank 0 before rank 1
        return agree_on_attempt(make_context(rank, 3), FileStore(str(tmp_path / "f")), 10.0 if rank != 1 else 1.0)

    with ThreadPoolExecutor(3) as pool:
        first = set(pool.map(agree, range(3)))
        with pytest.raises(TimeoutError, match="rank 0 did not join"):
            agree(1)
        third = set(pool.map(agree, range(3)))
    assert len(first) == len(third) == 1
    assert first != third


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """Rank 0 names the ranks that have not said hello, even if an earlier start has left their keys."""
    store = FileStore(str(tmp_path / "f"))
    store.set("hello/1", "stale")
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not join"):
        agree_on_attempt(make_context(0, 3), store, 0.1)


class EndedStore:
    """A store whose server has exited."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> NoReturn:
            raise RuntimeError("Connection reset by peer")

        return fail


class StoppedStore:
    """A store whose server does not respond."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: time.sleep(20)


@pytest.mark.parametrize("store", [EndedStore(), StoppedStore()], ids=["ended", "stopped"])
@pytest.mark.parametrize(("agent", "expected"), [("False", "rank 0"), ("True", "another rank")])
def test_lost_store(monkeypatch: pytest.MonkeyPatch, store: Any, agent: str, expected: str) -> None:
    """If the store is lost, rank 0 is reported as lost, unless torchrun's agent serves the store."""
    monkeypatch.setattr("train.launch.process_group.LIVENESS_SECONDS", 0.1)
    monkeypatch.setattr("train.launch.process_group.CONNECT_SLACK", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    error = RuntimeError("[gloo/pair.cc:5] Connection closed by peer [10.0.0.3]:1. This is typically caused by a crash")
    message = describe_lost_ranks(make_context(1, 2, "nccl"), store, error)
    assert message == f"rank 1 lost {expected} (Connection closed by peer [10.0.0.3]:1.)"


@pytest.mark.slow
def test_silent_ranks_are_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two of four ranks report a failed collective, and both name the two silent ranks as lost."""
    monkeypatch.setattr("train.launch.process_group.LIVENESS_SECONDS", 2.0)

    def describe_error(rank: int) -> str:
        store = FileStore(str(tmp_path / "f"))
        return describe_lost_ranks(make_context(rank, 4, "nccl"), store, RuntimeError("closed"))

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(describe_error, (0, 3)))
    assert messages == ["rank 0 lost ranks 1, 2 (closed)", "rank 3 lost ranks 1, 2 (closed)"]


@pytest.mark.parametrize(
    "content", [b"learning rate 0.1\n" * 9, b"\x80\x02\x8a\x0a" * 100, b"\x01\0\0\0a\x01\0\0\0b"], ids=repr
)
def test_other_files_are_rejected(tmp_path: Path, content: bytes) -> None:
    """A file of another kind is rejected and remains unchanged."""
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(RankError, match=f"file://{path}"):
        check_store_file(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("path", "reason"),
    [("", "not a rendezvous file"), ("none/f", "No such file or directory"), ("file/f", "Not a directory")],
)
def test_unusable_paths(tmp_path: Path, path: str, reason: str) -> None:
    """A folder, a path in a missing folder, and a path below a regular file are rejected."""
    (tmp_path / "file").touch()
    with pytest.raises(RankError, match=f"file://{tmp_path / path} .*{reason}"):
        check_store_file(tmp_path / path)


def test_empty_or_used_file_is_accepted(tmp_path: Path) -> None:
    """The file may be empty, or contain FileStore's keys, because another rank may have created it."""
    path = tmp_path / "my file"
    path.touch()
    check_store_file(path)
    FileStore(str(path)).set("default_pg/0//cpu//0", "address")
    check_store_file(path)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([3], "rank 3"), ([1, 2], "ranks 1, 2"), (list(range(12)), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more")],
)
def test_format_ranks(ranks: list[int], expected: str) -> None:
    """A list of ranks is truncated after ten ranks."""
    assert format_ranks(ranks) == expected
