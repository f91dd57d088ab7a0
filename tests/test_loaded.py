"""Libraries of the program are found also while another thread imports them."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from time import monotonic, sleep

import pytest

from syncheck.loaded import find_loaded

ROOT = Path(__file__).resolve().parents[1]
# Half imported until the file `go` exists.
_SLOW = """
from pathlib import Path
from time import sleep

while not Path(__file__).with_name("go").exists():
    sleep(0.005)
answer = 42
"""


@pytest.fixture
def half_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that ends the import of `slow_library`, which a thread has begun."""
    (tmp_path / "slow_library.py").write_text(_SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    thread = threading.Thread(target=__import__, args=("slow_library",), daemon=True)
    thread.start()
    end = monotonic() + 10
    while "slow_library" not in sys.modules and monotonic() < end:
        sleep(0.005)
    threading.Timer(0.05, (tmp_path / "go").touch).start()
    return tmp_path / "go"


def test_a_library_that_another_thread_imports_is_complete(half_imported: Path) -> None:
    """Its content is there when it is returned."""
    assert find_loaded("slow_library").answer == 42
    assert half_imported.exists()


def test_torch_and_numpy_are_read_through_it() -> None:
    """No other module asks for a module that may be incomplete, except with a default for each of its names."""
    readers = [path for path in (ROOT / "syncheck").rglob("*.py") if path.name != "loaded.py"]
    asking = [line for path in readers for line in path.read_text().splitlines() if "sys.modules.get(" in line]
    assert [line for line in asking if "getattr(" not in line] == []


def test_libraries_of_nobody_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a library that the program has not imported, nor one whose import it has forbidden."""
    assert find_loaded("this_library_is_not_there") is None
    monkeypatch.setitem(sys.modules, "forbidden_library", None)
    assert find_loaded("forbidden_library") is None
