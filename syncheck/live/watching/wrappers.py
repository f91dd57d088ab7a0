"""Wrappers of a script's and torch's functions, which no warning counts as the caller of a function.

`warnings.warn(..., stacklevel=2)` names the line that called a function, and would name the wrapper. Python does not
count frames of its import system, which it recognizes by the name of their file, and `logging` does the same. A
wrapper's frame has such a name, so warnings name the line of the script, as often as without watching.
"""

from __future__ import annotations

import functools
import os
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Both words make warnings skip a frame. Tracebacks show the name.
_SKIPPED = "<syncheck, skipped by warnings as importlib._bootstrap>"


# The folder of syncheck.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def hide_frames(error: BaseException) -> BaseException:
    """Return an error whose traceback has no frame of syncheck: an interrupted script is in a hook by chance.

    Frames of wrappers are removed. Calls from other code of syncheck are removed with all frames below.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        if trace.tb_frame.f_code.co_filename != _SKIPPED:
            frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(kept)


def skip_frame(function: Any) -> Any:
    """Return a function of Python, whose frame warnings skip from now on."""
    function.__code__ = function.__code__.replace(co_filename=_SKIPPED)
    return function


def wrap(function: Any) -> Callable[[Any], Any]:
    """Return a decorator of a function that takes the place of another one, with its name and signature.

    function: that the decorated function calls.
    """

    def decorate(wrapper: Any) -> Any:
        return functools.update_wrapper(skip_frame(wrapper), function)

    return decorate


def call_at_first_mesh(guard: Callable[..., None], work: Callable[[], None]) -> None:
    """Call a function once, before the next mesh is created: without a mesh, no script needs DTensor or FSDP2.

    guard: calls a function, and keeps errors from the script.
    """
    mesh_class: Any = sys.modules["torch.distributed.device_mesh"].DeviceMesh
    create = mesh_class.__init__
    waiting = [work]

    @wrap(create)
    def create_watched(mesh: Any, *arguments: Any, **named: Any) -> None:
        while waiting:
            guard(waiting.pop())
        create(mesh, *arguments, **named)

    mesh_class.__init__ = create_watched
