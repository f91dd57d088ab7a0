"""Sentences as data: which sentence, with which ranks, names and numbers. Each surface renders its text.

Records hold a `Message`; code that decides something compares its `code`. Text exists only after `str(message)`. The
only difference between surfaces is how they write an option (`syncheck.errors.Words`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from string import Formatter
from typing import TYPE_CHECKING, Any

from syncheck.errors import current_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Sentence(Enum):
    """Base of the sentences about one topic. A member's value is its template, in the syntax of `str.format`.

    Besides the usual format specifications a field may have these:

    - `{ranks:ranks}`: "rank 1", "ranks 0, 2"
    - `{names:names}` or `{names:names 5}`: the first 3 or 5 names, and how many more there are
    - `{quick:option}`, `{buffers:option GLOB}`, `{allow:option=SYN201}`: the option of that field of `Options`; these
      need no parameter
    """

    def __call__(self, **parameters: object) -> Message:
        """Return the sentence with these parameters."""
        return Message(self, parameters)


@dataclass(frozen=True, slots=True)
class Message:
    """One sentence. code: which one. parameters: by name; tuples of ranks or names, numbers, texts, messages."""

    code: Sentence
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Render the sentence, with options in the current surface's words."""
        return _render(self.code.value, self.parameters)

    def __hash__(self) -> int:
        return hash((self.code, *self.parameters))


def _render(template: str, parameters: Mapping[str, Any]) -> str:
    """Fill in a template. Raises KeyError for a parameter that the message lacks."""
    parts = []
    for literal, name, spec, conversion in Formatter().parse(template):
        parts.append(literal)
        if name is not None and (spec or "").startswith("option"):
            parts.append(_render_option(name, (spec or "").removeprefix("option")))
        elif name is not None:
            value = parameters[name]
            parts.append(_render_value(repr(value) if conversion == "r" else value, spec or ""))
    return "".join(parts)


def _render_option(field: str, detail: str) -> str:
    words = current_words()
    if detail.startswith("="):
        value = detail[1:]
        return words.pair(field, int(value) if value.isdecimal() else value)
    return words.placeholder(field, detail.strip()) if detail else words.name(field)


def _render_value(value: Any, spec: str) -> str:
    kind, _, most = spec.partition(" ")
    if kind == "ranks":
        return ranks_text(value)
    if kind == "names":
        return names_text(value, int(most or 3))
    return format(str(value) if isinstance(value, (Message, tuple)) else value, spec)


def ranks_text(ranks: Sequence[int]) -> str:
    """'rank 1', 'ranks 0, 2, 3', or the first four and the number if there are more than eight."""
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:4]))}, ...)"
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def names_text(names: Sequence[str], most: int = 3, count: int | None = None) -> str:
    """Return the first few names, and how many more there are. count: of all names, if only the first are given."""
    count = len(names) if count is None else count
    more = f" and {count - most} more" if count > most else ""
    return ", ".join(names[:most]) + more


class Grouping(Sentence):
    """How checkpoints were put into groups of replicas."""

    METADATA = "grouped by the metadata in the files"
    EXPRESSION = "grouped by the expression {pattern!r}"
    SAME_NAME = "grouped by file name: the same name in several folders"
    FOLDER_COPIES = "grouped by path: the folders hold the same files"
    NO_RANKS = "no ranks in the names: all files given form one group"
    NO_RANKS_ONE_STEP = "no ranks in the names: all files of the same step and part form one group"
    RANKS_IN_NAMES = "ranks taken from the file names"
    ONLY_NUMBER = "ranks taken from the only number that varies in the file names"
    OTHER_NUMBER_IS_NODE = "the other number that varies is the node"
    COUNTED_OVER_MESH = "counted over all mesh coordinates"
    COUNTED_OVER_NODES = "counted over all nodes"
    NUMBERED_BY_ORDER = "numbered in order, because several files have the same rank in their names"
    FOLDERS_ARE_HOSTS = "folders with different ranks are hosts of one run"
    SOME_BY_NAME = "{ranks:ranks} by file name, without metadata"
    SHARDS_ALONE = "no replica: files differ in their model-parallel or ZeRO rank and hold different shards"
    PARTS_ALONE = "no replica: files hold different parts of one checkpoint"
    STEPS_ALONE = "no replica: files are different steps of one rank"
    NAME_ALONE = "no replica: no other file has a similar name"
    MEMORY = "compared in memory; ranks are the positions of the objects given"
    LIVE = "compared in memory: digests first, then the bytes of tensors that differ"
    LIVE_FILES = "each rank read its own file: digests first, then the bytes of tensors that differ"
    SLOW_DIGESTS = "digests without the fused kernel on {ranks:ranks}: {reason}"
    OVER_BUDGET = "{tensors} tensors compared by digest alone, beyond the budget of {budget} bytes"


class Note(Sentence):
    """What readers of a result should know about a group of replicas: its options, gaps and guesses."""

    ONLY_SHARDS = "no tensor compared: every rank holds its own shards"
    RANKS_NOT_COMPARED = "no tensor of {ranks:ranks} was compared: no other rank holds the same shards"
    RANKS_ABSENT = "no file of {ranks:ranks}, although the metadata lists {world_size} ranks"
    KINDS_GUESSED = (
        "parameters and buffers are distinguished by name; name buffers with {buffers:option GLOB}, or save "
        "syncheck.metadata(model=...) in the file"
    )
    UNKNOWN_CLASSES = "objects of unknown classes were not compared, but tensors in them were: {classes}"
    QUICK = (
        "compared by the checksums stored in the files, without tolerances. No tensor was read: damage after saving "
        "goes unnoticed, and only a comparison without {quick:option} finds the elements that differ"
    )
    REFERENCE = "differences are measured against rank {rank}, the reference"
    UNUSED_TOLERANCES = "tolerances that match no tensor: {names}; kinds are {kinds}"
    VALUES_ABSENT = "not compared, because missing on {ranks:ranks}: {names:names 5}"
    MORE_VALUES_ABSENT = "not compared: {count} more values that some ranks lack"
    NOT_READ_IN_FULL = "not read in full, so tensors in them may be missing from the comparison: {objects}"
    FINGERPRINT = (
        "a fingerprint shows which tensors differ, but not which elements; tolerances do not apply, and -0.0 and 0.0 "
        "count as different"
    )
    STORED = "{text}"
    ONE_COPY = (
        "a torch.distributed.checkpoint folder stores each replicated tensor once, so it cannot show whether the ranks "
        "of its own run were in sync"
    )
    UNKNOWN_RECORDS = "not compared: {count} objects that torch.save did not write: {names:names 5}"
    UNLISTED_FILES = "not compared: {count} chunk files that .metadata does not list: {names:names 5}"
    PARTS_ABSENT = "not compared: {absent} of {total} {what}, which are not in the folder"
    RANKS_IN_FOLDER = (
        "the ranks in a DeepSpeed tag folder are not compared with each other; pass its *_model_states.pt as files to "
        "compare them"
    )
    OTHER_WEIGHTS = "{file} is compared as a separate model, beside {others}"


class Refusal(Sentence):
    """Why the bytes of a tensor cannot be compared. Fingerprints store the text."""

    SHARDED_TENSOR = "a ShardedTensor holds only this rank's shards"
    SHARDED_DTENSOR = "a DTensor without a readable mesh holds only this rank's shard"
    SPARSE = "a sparse tensor"
    QUANTIZED = "a quantized tensor"
    META = "a meta tensor: it has no values"
    NESTED = "a nested tensor"
    LAZY = "a parameter of a lazy module before its first forward pass: it has no values"
    FREED = "a tensor whose storage was freed"
    WRAPPER = "a wrapper tensor that syncheck does not read"
    LAYOUT = "a tensor of layout {layout}"
    SUBCLASS = "a tensor subclass that syncheck does not read: {name}"
    AS_NUMPY = "a tensor stored as a numpy array"
    UNKNOWN_CLASS = "a tensor of an unknown class"
    IN_UNREAD_OBJECT = "in an object of class {name}, which syncheck does not read"
    UNKNOWN_DTYPE = "its dtype is unknown"
    DTYPE = "dtype {name} is not supported"
    STORAGE_WITHOUT_DTYPE = "its storage has no dtype"
    UNKNOWN_STORAGE = "a storage of an unknown class"
    STORAGE_IN_OBJECT = "a storage in an object"
    NUMPY_DTYPE = "a numpy array of dtype {name}"
    EMPTY_NUMPY = "a numpy array without content"
    UNKNOWN_RECORD = "an object that torch.save did not write"
    SET_MEMBER = "a member of a set, which has no order"
    HUGE_VIEW = "a view that shows {stored} stored bytes as {shown:.3g}"
    FLAT_PARAMETER = "sharded by FSDP: a flat parameter holds only this rank's shard"
    STORED = "{text}"


# Refusals of shards that nothing can be compared with: a fact about the layout, not a fault of the file.
SHARD_REFUSALS = (Refusal.SHARDED_TENSOR, Refusal.SHARDED_DTENSOR, Refusal.FLAT_PARAMETER)


class Detail(Sentence):
    """Why a tensor was not compared in full, or what is known of a difference."""

    MISSING = "not on {ranks:ranks}"
    OWN_PART_MISSING = "not on rank {rank}, which owns it"
    PARTITIONED = "on {ranks:ranks} only: each rank holds its own part"
    SHARDED = "{layout}: no two of these ranks hold the same shard"
    WITHIN_GROUPS = "{layout}: compared within {sets}"
    REFUSED = "{refusal}"
    REFUSED_ON_SOME = "{refusal} (on {ranks:ranks} only)"
    UNEQUAL = "{sets}"
    BY_DESIGN = "{what} differ by design"
    AMBIGUOUS = "{why}"
    OTHER_ALGORITHMS = "digests of different algorithms ({algorithms}); recreate the fingerprints with one version"
    DIGESTS_ONLY = "the digests differ; nothing else is known"
    MOMENTS_AGREE = "the digests differ, but min, max, mean and std do not"
    MOMENTS = "{differing}"
    MOMENTS_APART = "at least {least:.3g} apart; {differing}"
    CHECKSUMS = "the stored checksums differ"
    STORED_DIFFERENTLY = "the files store it with different strides, byte order or pending operations"
    VIEW = "a view of a storage that differs: only reading it shows whether the view differs"
    NO_CHECKSUM = "not every file stores a checksum of it"


class Fact(Sentence):
    """A statement of evidence that any finding may have."""

    TEXT = "{text}"
    NOT_IN_BASELINE = "not in the baseline: {names:names}"


class Undecided(Sentence):
    """Why a comparison has no verdict."""

    UNREADABLE = "{count} of the files given could not be read"
    ALL_LINKS = "all files given are links to one file; compare copies"
    ONE_FILE = (
        "one file has no replica to compare with; save the model on every rank and pass all files (syncheck show lists "
        "the contents of one file)"
    )
    NO_REPLICAS = (
        "no two of the files are replicas of each other; pass the files of at least two ranks of one run, or group "
        "them with {group_by:option REGEX} ({group_by:option=} puts all files into one group)"
    )
    SOME_ALONE = (
        "{count} of the checkpoints given had no replica to compare with: {paths}; remove them, add their replicas, or "
        "group files with {group_by:option REGEX}"
    )
    AMBIGUOUS = "{name}: {detail}"
    MORE_AMBIGUOUS = "{name} and {more} more tensors: {detail}"
    NO_CHECKSUMS = (
        "{unknown} of {tensors} tensors have no usable stored checksum (torch.save stores one for each storage, other "
        "formats store none); without {quick:option} every byte is read"
    )
    RANKS_NOT_COMPARED = "no tensor of {ranks:ranks} was compared: no other rank holds the same shards"
    ONLY_SHARDS = "every rank holds its own shards, so no tensor was compared"
    REFUSED = "{count} of the tensors could not be compared: {tensors}; skip them with {exclude:option GLOB}"
    ALL_EXCLUDED = "no tensor was compared; the options exclude {count} tensors"
    NOTHING = "no tensor was compared"


class Hint(Sentence):
    """What to do next with an option."""

    ALL_ROWS = "{limit:option=0} shows all"
    ALL_ROWS_IN_JSON = "the .json report has all"
    GROUP_FILES = (
        "Pass the files of at least two ranks of one run, remove this file, or group files with "
        "{group_by:option REGEX}."
    )
    UPDATE_BASELINE = "remove it from the baseline with {update_baseline:option}"


class Problem(Sentence):
    """Errors that mention options."""

    UPDATE_NEEDS_BASELINE = "{update_baseline:option}: requires {baseline:option FILE}, or baseline in [tool.syncheck]"
    UPDATE_NEEDS_ALL_TESTS = "{update_baseline:option}: requires the tests of all checkpoints; remove {test}"
    NO_BASELINE = "{path}: no such baseline; {update_baseline:option} creates it"
    NEEDS_ALL_FILES = (
        "{quick:option} and {group_by:option}: require one process that sees all files; run without torchrun, or "
        "without these options"
    )


class PytestText(Sentence):
    """Texts of the pytest plugin that mention options."""

    NOT_COMPARED = "syncheck: {path}: its checkpoints are not compared; pass --syncheck {path} to compare them"
    CHECKPOINTS_UNUSED = "syncheck_checkpoints: ignored, because {reason}"
    UPDATE_NEEDS_CHECKPOINTS = "--syncheck-update-baseline: no checkpoints to compare; pass --syncheck GLOB"
    OUTPUT_NEEDS_CHECKPOINTS = "--syncheck-output {path}: no checkpoints to report on; pass --syncheck GLOB"
    NO_SUCH_TEST = "{nodeid}: no such test; available are {tests} (--collect-only -q lists all)"
    MORE_TENSORS = "... and {count} more; --syncheck-output FILE.html lists all"
    TIME_LIMIT = (
        "time limit of {seconds:g} s exceeded; change it with @pytest.mark.syncheck(timeout=...) or --syncheck-timeout"
    )
    NO_DEBUGGER = (
        "{option}: not supported in tests on several ranks, such as {test}, because ranks have no terminal; deselect "
        "these tests with -m 'not syncheck'"
    )
    TIMEOUT = "{option} {value}: must be a number of seconds above 0"
