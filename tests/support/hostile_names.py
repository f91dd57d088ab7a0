"""Hostile names of tensors and files: any script, control characters, markup and shell syntax."""

from __future__ import annotations

SCRIPTS = [
    "\u0648\u0632\u0646", "\u05de\u05e9\u05e7\u05dc.weight", "\u6743\u91cd", "\uac00\uc911\uce58", "\u1112\u1161\u11ab",
    "\u092d\u093e\u0930", "\u0e19\u0e49\u0e33\u0e2b\u0e19\u0e31\u0e01", "e\u0301\u0302" + "\u0301" * 40,
    "\u0301leading",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\uff57\uff45\uff49", "w\u200bx", "w\u200d",
    "\ufeffw", "w\u00a0x", "w\u3000x", "\u3164", "w\u00adx", "\u0130\u0131\u1e9e", "\U000e0041\U000e0042", "\ue000",
]  # fmt: skip
CONTROLS = [
    "\x00", "\x07\x08\x0b\x0c", "a\tb", "a\rb", "a\nb", "\x7f", "\x9b31m", "\x85", "\u2028a\u2029", "\x1b[2J\x1b[H",
    "\x1b]8;;http://e.example\x1b\\x\x1b]8;;\x1b\\", "\x1b]0;title\x07", "\x1bP1$r\x1b\\", "\x90q\x9c",
    "\x1b[31mIN SYNC",
    "\u202eevil", "\u2066a\u2069", "if\u202e \u2066// x\u2069 \u2066", "\ud800", "\udcff", "\udfff\ud800",
    "\ufffe\uffff",
    "\x0e\x0f", "\u061c\u200e\u200f",
]  # fmt: skip
MARKUP = [
    "::error::x", "\n::set-output name=a::b", "##[error]x", "##vso[task.complete]", "##teamcity[x]", "<script>alert(1)",
    "</script><script>alert(1)</script>", "]]>", "<![CDATA[", "&#x0;", "&lt;", "<!--", "-->",
    "'\"><img src=x onerror=a>",
    "a|b", "||", "`x`", "```", "[x](javascript:alert(1))", "![x](http://e.example/x)", "<http://e.example>", "{{7*7}}",
    "${x}", "$(touch bad)", "`touch bad`", "%0A::error::x", "%s%n", "\\", "\\n", "\\x1b[31m", "@team", "#1",
    "*", "__x__",
    "[bold]x[/bold]", "[/]", "[link=http://e.example]x", ":smile:", "- x", "# x", "1. x", "~~~", "$x$", "<br>", "\\|",
    "--help", "-o", "~", "[a-z]", "a b", " a ", "'", '"', "javascript:alert(1)", "file:///etc/passwd", "x" * 3000,
    "\u6743" * 3000, "\x1b" * 1000, "{x}", "{rank}",
]  # fmt: skip
NAMES = [*SCRIPTS, *CONTROLS, *MARKUP]


def shorten(name: object) -> str:
    """Return the start of a name, for the name of a test."""
    return ascii(str(name)[:20])


def _can_be_a_file(name: str) -> bool:
    try:
        encoded = name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return len(encoded) < 200 and "/" not in name and "\0" not in name and "{" not in name


FILES = [name for name in [*NAMES, "\udcff\udcfe", "a'b\"c d$e`f", "trailing ", "-rf", "\n"] if _can_be_a_file(name)]
