"""What a rank says of the one it has lost, when the store has gone with it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed import HashStore

from train.launch.meeting import Meeting, Rank, announce
from train.launch.roll_call import who_is_missing

CODE = (
    "import sys, json, dataclasses; sys.path.insert(0, sys.argv[1]); from train.launch.meeting import announce;"
    "print(json.dumps(dataclasses.asdict(announce(0, 2))), flush=True); sys.stdin.read()"
)
ROOT = str(Path(__file__).resolve().parents[3])


class Gone:
    """A store whose server does not answer any more."""

    def __getattr__(self, name: str) -> Any:
        def fails(*_: Any) -> NoReturn:
            raise RuntimeError("Connection reset by peer")

        return fails


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_is_still_ending(ends: bool) -> None:
    """Its connections close before its process is gone: it is named all the same, and one that runs on is not."""
    command = [sys.executable, "-c", CODE, ROOT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        meeting = Meeting(HashStore(), announce(1, 2), "the file f", "")
        meeting.zero = Rank(**json.loads(process.stdout.readline()))
        meeting.store = Gone()  # type: ignore[assignment]
        timer = threading.Timer(0.3, process.kill)
        if ends:
            timer.start()
        said = who_is_missing(meeting)
        expected = f"rank 0 ({meeting.zero}), which has ended: see its own message, if it has left one"
        assert said == (expected if ends else "")
        process.kill()
