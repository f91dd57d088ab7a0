"""A report with names that have a special meaning in an output format."""

from __future__ import annotations

from dataclasses import replace

from support.groups import make_finding, make_group, text
from syncheck.records import (
    Closure,
    Counts,
    DriftPoint,
    Reason,
    Replica,
    Report,
    TensorDiff,
    Unreadable,
)

# Unescaped, each name has an effect in Markdown, HTML, XML, a terminal, a log, or on GitHub.
HOSTILE = [
    "@team", "cc:@octo-org/all", "#1", "org/repo#12", "GH-12", "https://evil.example/x", "www.evil.example",
    "a@b.example", "[x](https://e.example)", "![x](//e.example/p.png)", "<script>alert(1)</script>", "</details>",
    "<img src=x>", "&#64;team", "a|b", "`@team`", "``", "```", "\\|", "\\", "a\\", "a`b", "*b*", "_i_", "~~s~~", "$x$",
    ":tada:", "<!--", "a\n\n# b", "a\r- b", "a\x1b[31m", "\u202ecba", "| a |", "<https://e.example>",
    "[x]: //e.example", "---", "===",
    "4f0c3e9b7d", "", " ", "`", "(@team)", "'@team',", "x" * 5000, "`" * 5000, "@a " * 5000, "(" * 5000 + "@a",
    "1." * 500, "mailto:a@b.example", "name, with @team and `tick` | bar", "1. @team", "- [ ] task", "\u00e4\u4e2d",
    "::error::x", "\n::add-mask::secret", "x\r\n::stop-commands::t", "##[add-mask]x", "50%0Aof", "%", "%%25%3A",
    "a,file=/etc/passwd,line=1::y", "]]>", "<![CDATA[", "</testcase>", '"', "'>", "&amp;", "\x00", "\ud800",
    "\x08\x0b\ufffe\uffff", "\U0001f600", "\x85\u2028\u2029",
]  # fmt: skip


def hostile(name: str) -> Report:
    """Return a report in which each text from a file is this name."""
    diff = TensorDiff(
        name, "bn_mean", "float32", (2,), "different", clusters=((0,), (1,)), mismatched=2, numel=2, max_abs=1.5
    )
    missing = TensorDiff(name, "bn_mean", "float32", (2,), "not_compared", reason=Reason.MISSING, detail=text(name))
    finding = make_finding(
        "SYN201", "bn-local-stats", "warning", (0, 1), (name,), name, name, f"fix {name}.", new=(name,)
    )
    replicas = (Replica(name, 0, "torch-zip", 1, 8), Replica(name, 1, "torch-zip", 1, 8))
    bad = make_group(
        name, 3, "out_of_sync", replicas, Counts(2, different=1, not_compared=1), (diff, missing), findings=(finding,),
        notes=(text(name),), kinds={"bn_mean": Counts(2, different=1, not_compared=1)},
    )  # fmt: skip
    point = DriftPoint(name, 3, 0.5, name)
    return Report(
        "out_of_sync",
        (
            bad,
            replace(bad, step=1),
            replace(bad, verdict="in_sync", findings=()),
            replace(bad, verdict="alone", findings=()),
        ),
        (Unreadable(name, name),),
        closures=(Closure(point, point, text(f"The gap {name} closed ({name}).")),),
    )
