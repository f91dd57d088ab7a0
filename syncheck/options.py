"""The options of a comparison and of a run, each declared once.

The default of each field below is a call of `option`, which declares the kind of value, the help text and the section
of the help. The rest is generated from these declarations:

- the arguments of `syncheck compare` and `syncheck report`: `cli.parser`
- the keys of `[tool.syncheck]`: `config`
- the pytest options `--syncheck-*`: `pytest_plugin.options`
- the checks of types and ranges: `Declaration.check`
- the tables of options in docs/reference: `docs/reference/from_options.py`

An option of a comparison is a field of `Options`, an option of two models a field of `DiffOptions`, and any other
option of a run a field of `RunOptions`. Texts for Python name an option by its field. On the command line and in
pytest, dashes replace the underscores (`text.to_flag`), also in texts (`text.options_as_typed`).

The command line and pytest import this module on every start, so it imports only `errors`, `option_kinds` and `text`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from syncheck.errors import OptionError
from syncheck.frozen import record
from syncheck.option_kinds import (
    CHOICE,
    FLAG,
    INTEGER,
    NUMBER,
    PATH,
    PATH_OR_RANK,
    PATHS,
    PATTERNS,
    REGEX,
    STRINGS,
    TABLE,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.comparison.selection import Selection

# Sections of `--help`, in this order.
SELECTION = "what to compare"
TOLERANCES = "tolerances (default: replicas are bitwise equal)"
ACCEPTANCE = "accepted findings and exit code"
OUTPUT = "output"
SECTIONS = (SELECTION, TOLERANCES, ACCEPTANCE, OUTPUT)

# The formats of stdout, and the formats of files by extension. GitHub reads annotations from stdout only, and an HTML
# page is of no use there.
FORMATS = ("text", "json", "junit", "github", "markdown")
EXTENSIONS = {".html": "html", ".json": "json", ".md": "markdown", ".txt": "text", ".xml": "junit"}
COLORS = ("auto", "always", "never")


class Surface(Enum):
    """The ways to set an option."""

    PYTHON = "Python"
    COMMAND_LINE = "command line"
    TOML = "pyproject.toml"
    PYTEST = "pytest"


PYTHON, COMMAND_LINE, TOML, PYTEST = Surface
_ALL = frozenset(Surface)
_TYPED = frozenset({COMMAND_LINE, TOML})
# The key of a declaration in the metadata of its field.
_KEY = "option"


@dataclass(eq=False, repr=False)
class Declaration:
    """The declaration of an option.

    section: of the help, empty for a general option. metavar: the placeholder of the value. short: a one-letter name on
    the command line. choices: the accepted values, or the accepted items of a list. minimum: of a number. default: the
    field's. surfaces: the ways to set the option. switch_help: the help of each switch, on a surface that has one
    switch for each choice. in_summary: whether pytest prints the option with the results, because it can hide a
    difference.
    """

    kind: Kind
    help: str
    section: str = ""
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    default: object = None
    surfaces: frozenset[Surface] = _ALL
    switch_help: Mapping[str, str] = field(default_factory=dict)
    in_summary: bool = True

    @property
    def is_choice(self) -> bool:
        """Whether the value itself is one of the choices, not each item of a list."""
        return bool(self.choices) and not self.kind.is_list

    @property
    def expected(self) -> str:
        """The accepted values in words."""
        if self.is_choice:
            return f"one of {', '.join(self.choices)}"
        if self.minimum is None:
            return self.kind.description
        return f"{self.kind.description}, at least {self.minimum}"

    @property
    def full_help(self) -> str:
        """The help text with the default, if there is one to mention."""
        # An empty default has no text.
        if self.default in (None, False, (), {}):
            return self.help
        return f"{self.help} (default: {self.default})"

    def check(self, name: str, value: object) -> None:
        """Raise OptionError for a value of the wrong type or out of range. None is the default of most options."""
        # Most options are None unless they are set.
        if value is None and self.default is None:
            return
        if not self.kind.matches(value):
            raise OptionError(f"must be {self.expected}", **{name: value})
        items: Any = value if self.kind.is_list else (value,)
        for item in items:
            self._check_item(name, item)

    def _check_item(self, name: str, item: Any) -> None:
        """Raise OptionError for a value, or an item of a list, out of range."""
        if self.choices and item not in self.choices:
            from syncheck.suggestions import suggest  # only messages need it

            suggestion = suggest(str(item), self.choices)
            raise OptionError(f"must be one of {', '.join(self.choices)}{suggestion}", **{name: item})
        if self.minimum is not None and item < self.minimum:
            raise OptionError(f"must be at least {self.minimum}", **{name: item})
        if self.kind is REGEX:
            try:
                re.compile(item)
            except re.error as error:
                raise OptionError(f"not a regular expression: {error}", **{name: item}) from None

    def parse(self, text: str) -> object:
        """Read a value from the command line. Raises ArgumentTypeError, whose text argparse prints."""
        try:
            return self.kind.parse(text)
        except ValueError:
            # argparse has called this method.
            from argparse import ArgumentTypeError

            raise ArgumentTypeError(f"must be {self.kind.description}, not {text[:60]!r}") from None

    def argparse_settings(self) -> dict[str, Any]:
        """Return keyword arguments for `add_argument`. An option that is not given is None, and a list is empty."""
        if self.kind is FLAG:
            return {"action": "store_true", "default": None, "help": self.full_help}
        settings: dict[str, Any] = {"type": self.parse, "help": self.full_help}
        if self.kind.is_list:
            settings |= {"action": "append", "default": [], "help": f"{self.full_help}; repeatable"}
        if self.is_choice:
            return settings | {"choices": self.choices}
        return settings | {"metavar": self.metavar}


def option(default: object, kind: Kind, text: str, section: str = "", **declared: Any) -> Any:
    """Return a dataclass field with its declaration. text: the help. declared: other fields of `Declaration`."""
    declaration = Declaration(kind, text, section, default=default, **declared)
    if isinstance(default, dict):
        return field(default_factory=dict, hash=False, metadata={_KEY: declaration})
    return field(default=default, metadata={_KEY: declaration})


# Options of `compare` that have no meaning for two models.
NOT_IN_DIFF = frozenset({"group_by", "reference", "quick"})


@record
class Options:
    """How to compare replicas; bitwise by default.

    Raises OptionError (a UsageError) if a value has the wrong type or is out of range, or if tolerances contradict each
    other.
    """

    only: tuple[str, ...] = option(
        (),
        STRINGS,
        "compare only these kinds of tensors: params, buffers, optimizer, rng (default: all except rng)",
        SELECTION,
        metavar="KIND",
        choices=("params", "buffers", "optimizer", "rng"),
        switch_help={
            "params": "compare only parameters; combine with the options below to add kinds",
            "buffers": "compare only buffers, including BatchNorm statistics",
            "optimizer": "compare only optimizer state",
            "rng": "compare only RNG states, which differ between ranks by design",
        },
    )
    include: tuple[str, ...] = option(
        (), STRINGS, "compare only tensors whose full name matches", SELECTION, metavar="GLOB"
    )
    exclude: tuple[str, ...] = option((), STRINGS, "skip tensors whose full name matches", SELECTION, metavar="GLOB")
    buffers: tuple[str, ...] = option(
        (),
        STRINGS,
        "names of buffers, for checkpoints without a record of their buffers",
        SELECTION,
        metavar="GLOB",
        in_summary=False,
    )
    rtol: float | None = option(
        None,
        NUMBER,
        "relative tolerance: |a-b| <= atol + rtol * max(|a|, |b|) is close; requires atol",
        TOLERANCES,
        metavar="R",
    )
    atol: float | None = option(None, NUMBER, "absolute tolerance; requires rtol", TOLERANCES, metavar="A")
    ulp: int | None = option(
        None, INTEGER, "floats at most N representable values of their dtype apart are close", TOLERANCES, metavar="N"
    )
    close: bool = option(
        False, FLAG, "use the tolerance of torch.testing.assert_close for each floating-point dtype", TOLERANCES
    )
    tolerance: Mapping[str, object] = option(
        {},
        TABLE,
        'tolerances by kind of tensor or glob of names: "close", "bitwise", or a table of rtol and atol, or ulp. Names '
        "take precedence over kinds, the first glob that matches applies, and the other tolerances apply to the rest",
        TOLERANCES,
        surfaces=frozenset({PYTHON, TOML}),
    )
    allow: tuple[str, ...] = option(
        (), STRINGS, "report findings with this code without failing", ACCEPTANCE, metavar="CODE"
    )
    baseline: str | None = option(
        None, PATH, "report the findings listed in this file without failing; new findings fail", ACCEPTANCE,
        metavar="FILE",
    )  # fmt: skip
    group_by: str | None = option(
        None,
        REGEX,
        "group files by path: files are replicas if the captured groups are equal (default: automatic)",
        SELECTION,
        metavar="REGEX",
        in_summary=False,
    )
    reference: str | int | None = option(
        None,
        PATH_OR_RANK,
        "describe differences against this replica (default: the majority)",
        SELECTION,
        metavar="PATH|RANK",
        in_summary=False,
    )
    jobs: int | None = option(
        None,
        INTEGER,
        "threads for large tensors (default: one per processor, at most 4)",
        SELECTION,
        metavar="N",
        minimum=1,
        in_summary=False,
    )
    quick: bool = option(
        False, FLAG, "compare the checksums stored by torch.save instead of reading the data", SELECTION
    )
    rng: bool = option(False, FLAG, "also compare RNG states, which differ between ranks by design", SELECTION)

    def __post_init__(self) -> None:
        check_fields(self)
        check_codes(self.allow, {})
        # Tolerances that contradict each other.
        from syncheck.tensors.tolerance import tolerances

        tolerances(rtol=self.rtol, atol=self.atol, ulp=self.ulp, close=self.close, table=self.tolerance)


@record
class DiffOptions(Options):
    """How to compare two models, A and B; bitwise by default.

    Raises OptionError (a UsageError) if a value has the wrong type or is out of range.
    """

    subset: bool = option(
        False,
        FLAG,
        "B may lack tensors of A that do not belong to the model, such as the optimizer state",
        ACCEPTANCE,
    )
    cast: str | None = option(
        None,
        CHOICE,
        "accept differences of exactly one conversion to this dtype",
        TOLERANCES,
        choices=("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    )
    map: str | None = option(
        None,
        PATH,
        "map the names of tensors by this table: the name of a built-in map, or a TOML file (default: automatic)",
        SELECTION,
        metavar="NAME|FILE",
    )
    write_map: str | None = option(
        None,
        PATH,
        "write the map of the names to this TOML file, in particular a map that was inferred from the data",
        OUTPUT,
        metavar="FILE",
        surfaces=frozenset({COMMAND_LINE, PYTHON, PYTEST}),
        in_summary=False,
    )
    accept_inferred: bool = option(
        False,
        FLAG,
        "count two models as in sync if they are equal under a map that was inferred from the data",
        ACCEPTANCE,
    )
    base: str | None = option(
        None,
        PATH,
        "the model before the update or merge, to find tensors of B that were never updated (default: an earlier step "
        "of A in its folder)",
        SELECTION,
        metavar="PATH",
    )


@record
class RunOptions:
    """The options of a run that do not affect the comparison: input, exit code and output.

    Raises OptionError (a UsageError) if a value has the wrong type or is out of range.
    """

    checkpoints: tuple[str, ...] = option(
        (), PATTERNS, "checkpoints for `syncheck report` without a path", surfaces=frozenset({TOML})
    )
    no_config: bool = option(
        False, FLAG, "ignore the table tool.syncheck of pyproject.toml", surfaces=frozenset({COMMAND_LINE})
    )
    update_baseline: bool = option(
        False,
        FLAG,
        "update the baseline file: add new findings, remove resolved ones",
        ACCEPTANCE,
        surfaces=frozenset({COMMAND_LINE, PYTEST}),
    )
    exit_zero: bool = option(False, FLAG, "exit with 0 instead of 1", ACCEPTANCE, surfaces=_TYPED)
    format: str = option("text", CHOICE, "format of the report on stdout", OUTPUT, choices=FORMATS, surfaces=_TYPED)
    output: tuple[str, ...] = option(
        (),
        PATHS,
        f"also write the report to this file; the extension selects the format: {', '.join(EXTENSIONS)}",
        OUTPUT,
        metavar="FILE",
        short="-o",
        surfaces=frozenset({COMMAND_LINE, TOML, PYTEST}),
    )
    limit: int = option(
        10,
        INTEGER,
        "number of tensors to print for each group, 0 for all",
        OUTPUT,
        metavar="ROWS",
        short="-n",
        minimum=0,
        surfaces=_TYPED,
    )
    quiet: bool = option(
        False, FLAG, "print only errors; the exit code is the verdict", OUTPUT, short="-q", surfaces=_TYPED
    )
    verbose: bool = option(
        False,
        FLAG,
        "print the details of all groups, all columns and all findings",
        OUTPUT,
        short="-v",
        surfaces=_TYPED,
    )
    color: str = option(
        "auto",
        CHOICE,
        "color the output; auto respects NO_COLOR and FORCE_COLOR",
        OUTPUT,
        choices=COLORS,
        surfaces=_TYPED,
    )

    def __post_init__(self) -> None:
        check_fields(self)


def list_options(surface: Surface, *classes: type) -> dict[str, Declaration]:
    """Return the options of a surface by field name. classes: `Options`, `RunOptions` or both, by default both."""
    declarations = {}
    for cls in classes or (Options, RunOptions):
        for name, declaration in _declarations(cls).items():
            if surface in declaration.surfaces:
                declarations[name] = declaration
    return declarations


def list_fields(cls: type) -> frozenset[str]:
    """Return the field names of a class of options. `DiffOptions` inherits options without a meaning for two models."""
    names = frozenset(_declarations(cls))
    return names - NOT_IN_DIFF if issubclass(cls, DiffOptions) else names


def list_tolerances() -> set[str]:
    """Return the field names of the tolerances. Precedence treats them as one option."""
    return {name for name, declaration in _declarations(Options).items() if declaration.section == TOLERANCES}


def _declarations(cls: type) -> dict[str, Declaration]:
    return {declared.name: declared.metadata[_KEY] for declared in dataclasses.fields(cls)}


def check_fields(options: Options | RunOptions) -> None:
    """Raise OptionError if a field has a value of the wrong type or out of range."""
    for name, declaration in _declarations(type(options)).items():
        declaration.check(name, getattr(options, name))


def replace_fields(options: Options, **changes: Any) -> Options:
    """Return options with other values; None resets a field to its default.

    A tolerance among the changes replaces all tolerances of the options.
    """
    default = type(options)()
    tolerances = list_tolerances()
    # A relative tolerance of one source must not meet the absolute tolerance of another.
    if any(changes.get(name) is not None for name in tolerances):
        changes = dict.fromkeys(tolerances) | changes
    for name, value in changes.items():
        if value is None:
            changes[name] = getattr(default, name)
    return dataclasses.replace(options, **changes)


def check_codes(codes: tuple[str, ...], further_codes: dict[str, str]) -> None:
    """Raise OptionError for a code that no finding has. further_codes: of findings of a running job, by slug."""
    if not codes:
        return
    # The rules are many modules.
    from syncheck.diagnose.rules import name_rules
    from syncheck.suggestions import suggest

    code_of_slug = {slug: code for code, slug in name_rules().items()} | further_codes
    for code in codes:
        if code.upper() in code_of_slug.values():
            continue
        hint = "syncheck explain lists all codes" + suggest(code.upper(), code_of_slug.values())
        if code.lower() in code_of_slug:
            hint = f"its code is {code_of_slug[code.lower()]}"
        raise OptionError(f"no such code; {hint}", allow=code)


def build_selection(options: Options, rank: int | None = None) -> Selection:
    """Return the options that apply to the comparison of one group. rank: of the reference in that group."""
    # A command line with a mistake, or --help, needs neither kinds nor tolerances.
    from syncheck.comparison.selection import ONLY, Selection
    from syncheck.tensors import kinds
    from syncheck.tensors.tolerance import tolerances

    return Selection(
        only=frozenset().union(*(ONLY[name] for name in options.only)),
        include=options.include,
        exclude=options.exclude,
        buffers=options.buffers,
        tolerance=tolerances(
            rtol=options.rtol,
            atol=options.atol,
            ulp=options.ulp,
            close=options.close,
            table=options.tolerance,
            kinds=kinds.KINDS,
        ),
        reference=rank,
        jobs=options.jobs,
        quick=options.quick,
        rng=options.rng,
    )
