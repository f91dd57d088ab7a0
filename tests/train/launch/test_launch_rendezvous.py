"""How ranks wait for each other and report lost ranks, in threads with a store in a file."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from torch.distributed import FileStore

from train.errors import RankError, UserError
from train.launch import RankContext
from train.launch.group import check_store_file, describe_lost_ranks, format_ranks, open_store, wait_for_all_ranks

if TYPE_CHECKING:
    from pathlib import Path


def describe(rank: int, world_size: int, backend: str = "gloo") -> RankContext:
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
    """Let ranks wait for each other at the same time."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda ctx: wait(path, ctx, timeout), ranks))


def test_all_ranks_join(tmp_path: Path) -> None:
    """Ranks join in any order, a late one too, and more than once in the same store."""
    for size in (4, 3, 5):
        ranks = [describe(rank, size) for rank in range(size)]
        assert wait_together(tmp_path / "f", *ranks[size - 2 :], *ranks[: size - 2]) == [""] * size
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(wait, tmp_path / "f", describe(0, 2))
        time.sleep(1.0)
        assert (wait(tmp_path / "f", describe(1, 2)), early.result()) == ("", "")


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """After the timeout every waiting rank names the missing ones; rank 0 prints that once if it is not missing."""
    start = time.monotonic()
    zero, three = wait_together(tmp_path / "f", describe(0, 5), describe(3, 5), timeout=2.0)
    assert 2.0 < time.monotonic() - start < 10.0
    assert zero.startswith("UserError: rank 0 of 5 waited 2 s at tcp://store:1: ranks 1, 2, 4 did not join")
    assert three.startswith("UserError: rank 3 of 5 waited 2 s at tcp://store:1: ranks 1, 2, 4 did not join")
    message = wait(tmp_path / "g", describe(1, 2), timeout=0.5)
    assert message.startswith("RankError: rank 1 of 2 waited 0.5 s at tcp://store:1: rank 0 did not join")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (describe(0, 2), describe(1, 3), ["2 ranks on gloo", "3 ranks on gloo"]),
        (describe(0, 2, "nccl"), describe(1, 2), ["2 ranks on nccl", "2 ranks on gloo"]),
        (describe(0, 3), describe(0, 3), ["rank 0 of 3 has already joined"]),
    ],
    ids=["world size", "backend", "rank"],
)
def test_contradictions(tmp_path: Path, first: RankContext, second: RankContext, words: list[str]) -> None:
    """A rank that contradicts rank 0 reports both settings at once; rank 0 waits for it in vain."""
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
    """A store whose server has ended."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> NoReturn:
            raise RuntimeError("Connection reset by peer")

        return fail


class StoppedStore:
    """A store whose server is stopped."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: time.sleep(20)


@pytest.mark.parametrize("store", [EndedStore(), StoppedStore()], ids=["ended", "stopped"])
@pytest.mark.parametrize(("agent", "expected"), [("False", "rank 0"), ("True", "another rank")])
def test_the_store_is_lost_too(monkeypatch: pytest.MonkeyPatch, store: Any, agent: str, expected: str) -> None:
    """If the store does not respond, the lost rank is rank 0, unless torchrun's agent serves the store."""
    monkeypatch.setattr("train.launch.group.LIVENESS_SECONDS", 0.1)
    monkeypatch.setattr("train.launch.group.CONNECT_SLACK", 0.1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    error = RuntimeError("[gloo/pair.cc:5] Connection closed by peer [10.0.0.3]:1. This is typically caused by a crash")
    message = describe_lost_ranks(describe(1, 2, "nccl"), store, error)
    assert message == f"rank 1 lost {expected} (Connection closed by peer [10.0.0.3]:1.)"


def test_ranks_that_do_not_respond_are_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of four ranks, those that do not report the failed collective are named."""
    monkeypatch.setattr("train.launch.group.LIVENESS_SECONDS", 2.0)

    def describe_error(rank: int) -> str:
        store = FileStore(str(tmp_path / "f"))
        return describe_lost_ranks(describe(rank, 4, "nccl"), store, RuntimeError("closed"))

    with ThreadPoolExecutor(2) as pool:
        messages = list(pool.map(describe_error, (0, 3)))
    assert messages == ["rank 0 lost ranks 1, 2 (closed)", "rank 3 lost ranks 1, 2 (closed)"]


@pytest.mark.parametrize(
    "content", [b"learning rate 0.1\n" * 9, b"\x80\x02\x8a\x0a" * 100, b"\x01\0\0\0a\x01\0\0\0b"], ids=repr
)
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    """A file of another kind is refused at once, and left as it is."""
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
    """A folder, and a file in a folder that does not exist, are refused."""
    (tmp_path / "file").touch()
    with pytest.raises(RankError, match=f"file://{tmp_path / path} .*{reason}"):
        check_store_file(tmp_path / path)


def test_a_file_of_another_rank_or_program(tmp_path: Path) -> None:
    """The file may be empty, or in use by FileStore, whose keys do not collide with the trainer's."""
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
    """A long list of ranks is cut."""
    assert format_ranks(ranks) == expected
