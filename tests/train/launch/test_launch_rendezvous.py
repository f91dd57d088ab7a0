"""The rendezvous and the report of lost ranks, in threads with a file store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from torch.distributed import FileStore

from train.errors import RankError, UserError
from train.launch import RankContext
from train.launch.process_group import (
    check_store_file,
    describe_lost_ranks,
    format_ranks,
    open_store,
    wait_for_all_ranks,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_context(rank: int, world_size: int, backend: str = "gloo") -> RankContext:
    """Return the context of a rank."""
    return RankContext(rank, world_size, rank, backend=backend, init_method="tcp://store:1")


def wait(path: Path, ctx: RankContext, timeout: float = 20.0) -> str:
    """Wait for the other ranks in a file; return the error, or an empty string."""
    try:
        wait_for_all_ranks(ctx, FileStore(str(path)), timeout)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_together(path: Path, *ranks: RankContext, timeout: float = 20.0) -> list[str]:
    """Run `wait` for several ranks at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda ctx: wait(path, ctx, timeout), ranks))


def test_all_ranks_join(tmp_path: Path) -> None:
    """Ranks can join in any order, late, and repeatedly in the same store."""
    for size in (4, 3, 5):
        ranks = [make_context(rank, size) for rank in range(size)]
        assert wait_together(tmp_path / "f", *ranks[size - 2 :], *ranks[: size - 2]) == [""] * size
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(wait, tmp_path / "f", make_context(0, 2))
        time.sleep(1.0)
        assert (wait(tmp_path / "f", make_context(1, 2)), early.result()) == ("", "")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """After the timeout every waiting rank names the missing ranks, in a RankError if rank 0 is missing."""
    start = time.monotonic()
    zero, three = wait_together(tmp_path / "f", make_context(0, 5), make_context(3, 5), timeout=2.0)
    assert 2.0 < time.monotonic() - start < 10.0
    assert zero.startswith("UserError: rank 0 of 5 waited 2 s at tcp://store:1: ranks 1, 2, 4 did not join")
    assert three.startswith("UserError: rank 3 of 5 waited 2 s at tcp://store:1: ranks 1, 2, 4 did not join")
    message = wait(tmp_path / "g", make_context(1, 2), timeout=0.5)
    assert message.startswith("RankError: rank 1 of 2 waited 0.5 s at tcp://store:1: rank 0 did not join")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (make_context(0, 2), make_context(1, 3), ["2 ranks on gloo", "3 ranks on gloo"]),
        (make_context(0, 2, "nccl"), make_context(1, 2), ["2 ranks on nccl", "2 ranks on gloo"]),
        (make_context(0, 3), make_context(0, 3), ["rank 0 of 3 has already joined"]),
    ],
    ids=["world size", "backend", "rank"],
)
def test_contradictory_ranks(tmp_path: Path, first: RankContext, second: RankContext, words: list[str]) -> None:
    """A rank that contradicts rank 0 reports the contradiction at once, and rank 0 times out."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, tmp_path / "f", first, 4.0)
        FileStore(str(tmp_path / "f")).wait(["joined/0"])
        start = time.monotonic()
        message = wait(tmp_path / "f", second)
        assert time.monotonic() - start < 3.0
    assert message.startswith("RankError")
    assert all(word in message for word in words)
    assert "did not join" in waiting.result()


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
    """The file may be empty, or contain FileStore's keys, which do not collide with the trainer's keys."""
    path = tmp_path / "my file"
    path.touch()
    check_store_file(path)
    FileStore(str(path)).set("default_pg/0//cpu//0", "address")
    ctx = RankContext(0, 1, backend="gloo", init_method=path.as_uri())
    wait_for_all_ranks(ctx, open_store(ctx, 5.0), 5.0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([3], "rank 3"), ([1, 2], "ranks 1, 2"), (list(range(12)), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more")],
)
def test_format_ranks(ranks: list[int], expected: str) -> None:
    """A list of ranks is truncated after ten ranks."""
    assert format_ranks(ranks) == expected
