"""Sentences of the pytest plugin."""

from __future__ import annotations

from syncheck.messages import Sentence


class PytestText(Sentence):
    """Texts of the pytest plugin that mention options."""

    NOT_COMPARED = "syncheck: {path}: its checkpoints are not compared; pass --syncheck {path} to compare them"
    CHECKPOINTS_UNUSED = "syncheck_checkpoints: ignored, because {reason}"
    UPDATE_NEEDS_CHECKPOINTS = "--syncheck-update-baseline: no checkpoints to compare; pass --syncheck GLOB"
    OUTPUT_NEEDS_CHECKPOINTS = "--syncheck-output {path}: no checkpoints to report on; pass --syncheck GLOB"
    NO_SUCH_TEST = "{nodeid}: no such test; available are {tests} (--collect-only -q lists all)"
    TIME_LIMIT = (
        "time limit of {seconds:g} s exceeded; change it with @pytest.mark.syncheck(timeout=...) or --syncheck-timeout"
    )
    NO_DEBUGGER = (
        "{option}: not supported in tests on several ranks, such as {test}, because ranks have no terminal; deselect "
        "these tests with -m 'not syncheck'"
    )
    TIMEOUT = "{option} {value}: must be a number of seconds above 0"
