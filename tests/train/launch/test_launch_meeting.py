"""How ranks meet, in threads that share a store, and what the file of a store may hold."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, HashStore, TCPStore

from train.errors import RankError, UserError
from train.launch.file_store import open_file_store, path_of, read_keys
from train.launch.meeting import Meeting, Rank, announce, has_ended, in_words

MEND = "remove it or name another with --init-method"


def ended() -> Rank:
    """Describe a process of this machine that has ended, as its announcement would."""
    code = (
        "import sys, json, dataclasses; sys.path.insert(0, sys.argv[1]); from train.launch.meeting import announce;"
        "print(json.dumps(dataclasses.asdict(announce(0, 2))))"
    )
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    return Rank(**json.loads(done.stdout))


@pytest.fixture(scope="module")
def dead() -> Rank:
    """A rank 0 of 2 that has ended."""
    return ended()


def meet(store: Any, me: Rank, timeout: float = 10.0) -> str:
    """Take part; returns how it ended."""
    try:
        Meeting(store, me, "the file f", MEND).meet(timeout)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return "met"


def together(*ranks: Rank, timeout: float = 10.0) -> list[str]:
    """Let ranks meet at the same time, in a store that threads share."""
    store = HashStore()
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda me: meet(store, me, timeout), ranks))


def test_all_come() -> None:
    """Ranks that start in any order meet."""
    for number in range(5):
        ranks = [announce(rank, 4) for rank in range(4)]
        assert together(*ranks[number:], *ranks[:number]) == ["met"] * 4


def test_a_late_rank_is_waited_for() -> None:
    """A rank that comes long after the others meets them."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(meet, store, announce(0, 2))
        time.sleep(1.0)
        assert meet(store, announce(1, 2)) == "met"
        assert first.result() == "met"


@pytest.mark.slow
def test_missing_ranks_are_named() -> None:
    """After the timeout rank 0 says which ranks did not come, and those that wait with it hear the same."""
    start = time.monotonic()
    zero, three = together(announce(0, 5), announce(3, 5), timeout=1.0)
    message = (
        "rank 0 of 5 waited 1 s at the file f: ranks 1, 2 and 4 did not come; start them, or see their own messages"
    )
    assert (zero, three) == (f"UserError: {message}", f"UserError: {message}")
    assert 1.0 < time.monotonic() - start < 5.0


def test_missing_rank_zero_is_named() -> None:
    """Without rank 0 each of the others says so."""
    found = meet(HashStore(), announce(1, 2), timeout=0.5)
    message = "rank 1 of 2 waited 0.5 s at the file f: rank 0 did not come; start it, or see its own message"
    assert found == f"RankError: {message}"


def test_different_numbers_of_ranks() -> None:
    """Ranks that were told different world sizes end at once, and both of them say who was told what."""
    start = time.monotonic()
    zero, one = together(announce(0, 2), announce(1, 3))
    assert time.monotonic() - start < 5.0
    assert zero.partition(": ")[2] == one.partition(": ")[2]
    assert "was started as one of" in zero
    assert {f"of {n}" for n in (2, 3)} == {text.rstrip(",:") for text in re.findall(r"of [23]", zero)}


def test_different_backends() -> None:
    """A rank that sees GPUs and one that sees none end at once, for torch would let them wait for each other."""
    zero, one = together(announce(0, 2, "nccl"), announce(1, 2, "gloo"))
    assert zero.partition(": ")[2] == one.partition(": ")[2]
    assert {"nccl", "gloo"} <= set(re.findall(r"nccl|gloo", zero))
    assert "give all --gpus none" in zero


def test_two_processes_of_one_rank() -> None:
    """A rank that comes twice is refused, and those who wait are told."""
    found = together(announce(0, 3), announce(1, 3), announce(1, 3))
    assert sum("two processes are rank 1 at the file f: " in text for text in found) == 3
    assert f"process {os.getpid()} on " in found[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("had_met", [False, True])
def test_what_a_killed_run_has_left(dead: Rank, rank: int, world_size: int, had_met: bool) -> None:
    """What a killed run has left is known at once, by any rank, with the same number of ranks or another."""
    store = HashStore()
    store.add("came/0", 1)
    store.set("rank/0", json.dumps(asdict(dead)))
    if had_met:
        store.set("list", f"{dead.token} 123")
    start = time.monotonic()
    found = meet(store, announce(rank, world_size))
    assert time.monotonic() - start < 3.0
    assert found.endswith(f"the file f was left by an earlier run: {MEND}")


def test_what_a_run_elsewhere_has_left(dead: Rank) -> None:
    """Where the other's machine is not this one, nobody can tell whether it runs, and the message says both."""
    store = HashStore()
    store.set("rank/0", json.dumps(asdict(replace(dead, machine="other", host="there"))))
    store.set("list", "123")
    message = f"in use by another run, or was left by it (process {dead.pid} on there is rank 0): {MEND}"
    assert meet(store, announce(1, 2)) == f"RankError: the file f is {message}"


class Blind:
    """A store that shows no refusal: each rank gives up as if at the very moment at which the other does."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        """Tell whether keys are there, but for that one."""
        return keys != ["refused"] and self.store.check(keys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "file"])
def test_two_give_up_at_once(tmp_path: Path, kind: str) -> None:
    """Of two ranks that give up at the same moment for different reasons both say the first one's."""
    shared = HashStore()
    stores = [shared if kind == "threads" else open_file_store(tmp_path / "f", 5.0) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(meet, Blind(stores[0]), announce(0, 3), 1.5)
        one = pool.submit(meet, Blind(stores[1]), announce(1, 3), 0.5)  # rank 0 is given a second more
        found = {zero.result().removeprefix("UserError: "), one.result().removeprefix("RankError: ")}
    own = {f"rank {rank} of 3 waited {seconds} s at the file f: " for rank, seconds in ((0, "1.5"), (1, "0.5"))}
    (reason,) = found
    assert reason.startswith(tuple(own))
    assert reason.endswith("rank 2 did not come; start it, or see its own message")


def test_one_who_comes_after_a_refusal() -> None:
    """Who comes when the others have given up hears why they did."""
    store = HashStore()
    store.set("refused", "ranks disagree")
    found = meet(store, announce(1, 2))
    assert found == f"RankError: rank 1 of 2 comes too late at the file f: ranks disagree; to start again, {MEND}"


def test_a_file_that_a_peer_has_just_made(tmp_path: Path) -> None:
    """A file that is empty, or in which a store has counted itself only, is no earlier run's."""
    path = tmp_path / "f"
    path.touch()
    open_file_store(path, 5.0)
    first = FileStore(str(path))
    assert meet(open_file_store(path, 5.0), announce(0, 1)) == "met"
    del first
    open_file_store(path, 5.0)


def test_who_has_ended(dead: Rank) -> None:
    """A process that runs has not ended; one of another machine is not judged; a new process of an old id is."""
    me = announce(0, 1)
    assert [has_ended(me), has_ended(dead), has_ended(replace(dead, machine=""))] == [False, True, False]
    assert has_ended(replace(me, started="1"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"learning rate 0.1\n" * 9, "it is no file of a rendezvous"),
        (b"\x09\0\0\0refcount/\x01\0\0\0", "or a damaged one"),
        (b"\x09\0\0\0refcou", "or a damaged one"),
        (b"\x01\0\0\0a\x01\0\0\0b", "it is no file of a rendezvous"),
        (b"\x80\x02\x8a\x0a" * 100, "it is no file of a rendezvous"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """A file of another kind is named at once, and left as it is."""
    path = tmp_path / "f"
    path.write_bytes(content)
    with pytest.raises(RankError, match=f"cannot meet in the file {path}: .*{message}.*name another"):
        open_file_store(path, 5.0)
    assert path.read_bytes() == content


def test_a_file_of_torch_alone_is_refused(tmp_path: Path) -> None:
    """A file in which another program's ranks have met is known by its keys."""
    path = tmp_path / "f"
    FileStore(str(path)).set("default_pg/0//cpu//0", "address")
    with pytest.raises(RankError, match="was left by an earlier run of another program: remove it or name another"):
        open_file_store(path, 5.0)


@pytest.mark.parametrize(
    ("place", "message"),
    [("", "Is a directory"), ("none/f", "No such file or directory"), ("file/f", "Not a directory")],
)
def test_places_without_a_file(tmp_path: Path, place: str, message: str) -> None:
    """A folder, and a folder that is not there, are named."""
    (tmp_path / "file").touch()
    with pytest.raises(RankError, match=f"cannot meet in the file {tmp_path / place}: {message}; name another"):
        open_file_store(tmp_path / place, 5.0)


def test_a_folder_without_permission(tmp_path: Path) -> None:
    """A folder that one may not write to is named."""
    if os.geteuid() == 0:
        place = Path("/proc/f")
    else:
        place = tmp_path / "closed" / "f"
        place.parent.mkdir(mode=0o500)
    with pytest.raises(RankError, match=f"cannot meet in the file {place}: .*; name another"):
        open_file_store(place, 5.0)


def test_keys_are_read_as_torch_writes_them(tmp_path: Path) -> None:
    """The reader finds what FileStore of this torch has written, large values too, and makes a missing file."""
    path = tmp_path / "f"
    assert read_keys(path) == set()
    store = open_file_store(path, 5.0)
    store.set("a", "x" * 100_000)
    store.add("b", 3)
    assert read_keys(path) == {b"refcount/", b"/train/a", b"/train/b"}
    with path.open("ab") as file:
        file.write(struct.pack("=I", 20_000) + b"k" * 20_000 + struct.pack("=I", 0))
    with pytest.raises(ValueError, match="no file of a rendezvous"):
        read_keys(path)


def test_path_of_a_url() -> None:
    """Spaces and the like are written with percent signs in a URL."""
    assert path_of("file:///shared/my%20run/f") == Path("/shared/my run/f")


def test_meets_over_tcp(free_port: int) -> None:
    """The same protocol works in rank 0's TCP store."""

    def take_part(rank: int) -> None:
        store: Any = TCPStore("127.0.0.1", free_port, None, rank == 0, timedelta(seconds=10), wait_for_workers=False)
        Meeting(store, announce(rank, 3), "here", MEND).meet(10.0)
        stores.append(store)  # rank 0's serves the others

    stores: list[Any] = []
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(take_part, range(3)))
    assert len(stores) == 3


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([3], "3"),
        ([1, 2], "1 and 2"),
        ([0, 1, 2], "0, 1 and 2"),
        (list(range(12)), "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"),
    ],
)
def test_ranks_in_words(ranks: list[int], expected: str) -> None:
    """A list of ranks reads as one says it, and does not fill the screen."""
    assert in_words(ranks) == expected
