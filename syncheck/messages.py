"""The sentences that several packages use: notes, refusals, details, and reasons of an undecided verdict."""

from __future__ import annotations

from syncheck.sentences import Message, Sentence

__all__ = [
    "SHARD_REFUSALS", "Compared", "Detail", "Fact", "Grouping", "Hint", "Message", "Note", "Refusal",
    "Sentence", "Undecided", "Usage", "note_if",
]  # fmt: skip


class Grouping(Sentence):
    """How checkpoints were grouped into replicas."""

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
    FOLDERS_ARE_RUNS = "each given folder has replicas of its own"
    PERHAPS_HOSTS = "the folders have equal local ranks, so that they may be hosts of one run, or runs"
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
    """Notes about a group of replicas: options, missing data and guesses."""

    # The values of the model, and what they mean for training.
    ONLY_SHARDS = "no tensor compared: every rank holds its own shards"
    NOT_FINITE = "the model is not finite: {count:count tensor} {count:verb holds|hold} NaN or infinity: {names:names}"
    NOT_FINITE_SINCE = "{fact}; finite at step {finite}, not finite since step {since}, first in {first:names}"
    NOT_FINITE_FROM_START = "{fact}; since the first step compared ({since}), first in {first:names}"
    RANK_0_UNAFFECTED = "training is not affected if the file of rank 0 is the one that is used"
    # Two models: copies within a side, the map of names, and adapters.
    SUBSET = "not in B, and accepted: {count:count tensor} of A: {names:names}"
    COPIES = "{side}: {files} {unit}; copies of {tensors:count tensor} were compared with each other first"
    FIRST_COPIES = "the first copy of each tensor of {side} was compared: the copies of {side} differ from each other"
    COPIES_AND_OTHER_MODEL = "{other} equals the copy of {equal:ranks}, not the copy of {ranks:ranks}: {names:names}"
    UNMARKED_SHARDS = (
        "{side}: the files look like {shards} tensor-parallel shards of one model, and no file states its position"
    )
    NO_COPIES = "{side}: {files} {unit}, each with its own part of the model"
    TIED = "{side} stores a tied weight under one name; compared under both names: {names:names}"
    ASSUMED_TIE = (
        "{side} lacks {names:names}, and no configuration beside its files states whether another name of {side} is "
        "the same weight; compared as one weight"
    )
    CONVERTED = (
        "compared after the accepted conversion to {dtype}, which does not explain {count:count tensor}: {names:names}"
    )
    FLUSHED = "the accepted conversion to {dtype} made elements zero: {tensors:names 6}"
    MAP = "names were mapped by {map}: {counts:list}"
    MAPPED = "{count:count tensor} of {side}"
    NONE_MAPPED = "no tensor"
    INFERRED = "the map was inferred from equal data, not from the meaning of names; {saved}:"
    PROPOSED = "equal data has other names, which are not mapped, because most names of A and B agree; {saved}:"
    SAVES_MAP = "{write_map:option FILE} saves the map"
    SAVED_MAP = "{file:name} has the map"
    RULE = "  {name:name} = {parts}"
    CONTRADICTING_RULE = (
        "  {name:name} = {parts}  <- the name states another order: {order:list}; equal data shows the order of B, "
        "which may be wrong"
    )
    REFUTED_RULE = "  {name:name} = {parts}  <- this rule contradicts its name; B may be wrong"
    DIVIDED_RULE = "  {name:name} = {parts}  <- this rule contradicts the rule of {sibling:name}; B may be wrong"
    COPY_RULE = "  {name:name} = {copied}, of which it is a copy in one model"
    MORE_RULES = "  {count:count more rule}"
    MORE_NOTES = "... and {count:count more line}; a report has all"
    GUESSED_RULES = "names, not data, show the pairs of {count:count rule} with equal tensors: {names:names}"
    INTERCHANGEABLE = (
        "names, not data, show which of {count:count equal constant tensor} is which, so an exchange of them has no "
        "trace: {names:names}"
    )
    ACCEPTED_MAP = "the inferred map was accepted ({accept_inferred:option}): the verdict rests on it"
    GUESSED_HEADS = (
        "{names:list} {names:verb was|were} chosen because {names:verb it fits|they fit} the data; no configuration "
        "beside the files states {names:verb it|them}"
    )
    PREFIX = (
        "{count:count name} of {longer} {count:verb is that|are those} of {shorter} with {prefix:quoted} in front: "
        "no program that expects the names of {shorter} finds {count:verb it|them}"
    )
    NO_MAP = "{file:name} was not written: no map was needed or found"
    AMBIGUOUS_MAP = (
        "the inferred map is ambiguous: {count:count tensor} of A {count:verb equals|equal} several tensors of B: "
        "{names:names}; pass a map with {map:option FILE}"
    )
    PADDED = "up to {rows} rows of padding, which one model lacks, were not compared: {names:names}"
    IGNORED = "not compared, because the map ignores them: {names:names}, in {side}"
    COMPUTED_FREQUENCIES = (
        "not compared, because they follow from rope_theta = {theta}, and the other model computes them: "
        "{names:names}, in {side}"
    )
    UNKNOWN_SETTINGS = (
        "{side}: {count:count tensor} {count:verb is|are} not mapped, because {names:list} {names:verb is|are} "
        "unknown; put config.json beside the files"
    )
    UNFIT = (
        "{side}: the map {map} does not fit {names:names}: their shapes are others, or a part has the name of another "
        "tensor"
    )
    # The metadata of files, which may contradict the files.
    RANKS_NOT_COMPARED = "no tensor of {ranks:ranks} was compared: no other rank holds the same shards"
    NO_FILES = "not compared, because there is no file: {absences:names 6}"
    RANKS_OF_GROUP = "{ranks:ranks} of {group:name}"
    RANKS_ABSENT = "no file from {ranks:ranks}, although the metadata lists {world_size} ranks"
    TOO_MANY_RANKS = (
        "{files:count file} in the group, but the metadata lists {world_size:count rank}: are all files of one run?"
    )
    RANKS_TWICE = (
        "in their metadata, several files claim to be of rank {ranks:list} of the same run and step: a file was "
        "copied, or a rank recorded a wrong number. The ranks in this report are positions"
    )
    CONTRADICTING_STEPS = (
        "contradicting steps: the path of {files:names 4} states {word} {named}, and the content {name:name} {stored}"
    )
    MORE_CONTRADICTING_STEPS = "{count:count more step} in paths {count:verb contradicts|contradict} the content"
    WORLD_SIZES = (
        "`world_size` in the metadata of the {files:count file} is {sizes:by_rank}: files of one launch have one "
        "`world_size`"
    )
    KINDS_GUESSED = (
        "parameters and buffers are distinguished by name; name buffers with {buffers:option GLOB}, or save "
        "syncheck.metadata(model=...) in the file"
    )
    UNKNOWN_CLASSES = "objects of unknown classes were not compared, but tensors in them were: {classes:list}"
    # Options of the comparison.
    QUICK = (
        "compared by the checksums stored in the files, without tolerances. No tensor was read: damage after saving "
        "goes unnoticed, and only a comparison without {quick:option} finds the elements that differ"
    )
    REFERENCE = "differences are measured against rank {rank}, the reference"
    UNUSED_TOLERANCES = "tolerances that match no tensor: {names:list}; kinds are {kinds:list}"
    # Python values beside the tensors.
    VALUES_ABSENT = "not compared, because missing {ranks:owner}: {names:names 5}"
    CODE_DIFFERS = (
        "the code of the TorchScript archives differs ({ranks:ranks}), and syncheck does not interpret it: compare "
        "torch.jit.load(FILE).code, or skip it with {exclude:option=*(code)}"
    )
    ADAPTER_SETTINGS_DIFFER = "settings differ ({ranks:ranks}): {names:names 5}; skip with {exclude:option GLOB}"
    MODEL_SETTINGS_DIFFER = (
        "the configurations beside the files differ, which may change what the model computes: {settings:statements}; "
        "skip with {exclude:option GLOB}"
    )
    MODEL_TYPES_DIFFER = "the configurations beside the files state the model type {a:name} in A and {b:name} in B"
    UNREADABLE_CONFIGURATIONS = "not read, because the content is no configuration in JSON: {files:names}"
    SAME_FILES = "A and B have files in common, whose data was compared with itself: {files:names 3}"
    MODEL_VALUES_ABSENT = (
        "{count:count value} of the model {count:verb is|are} not compared, because {ranks:ranks} "
        "{ranks:verb lacks|lack} {count:verb it|them}: {names:names 5}; skip with {exclude:option GLOB}"
    )
    MORE_VALUES_ABSENT = "not compared: {count} more values that some ranks lack"
    ATTRIBUTES = (
        "plain attributes of modules differ between ranks; they do not count, because they are neither parameters nor "
        "buffers: {facts:list}"
    )
    ATTRIBUTE = "{name:name} is {values:by_rank}"
    ATTRIBUTE_NAMES = (
        "{count:count plain attribute} of modules {count:verb differs|differ} between ranks and "
        "{count:verb does|do} not count: {names:names 5}"
    )
    MORE_ATTRIBUTES = "{count} more"
    EQUAL_RNG = (
        "the ranks have equal RNG states ({names:names}), so they draw equal random numbers, for example equal dropout "
        "masks. Under data parallelism, each rank should have its own: did all ranks load the state of one rank? Save "
        "and load the state of each rank, or seed each rank: `torch.manual_seed(seed + rank)`"
    )
    METRICS = "states of metrics differ between ranks by design, until compute() reduces them: {names:names 5}"
    # What the readers skip or cannot know.
    NOT_READ_IN_FULL = "not read in full, so tensors in them may be missing from the comparison: {objects}"
    FINGERPRINT = (
        "a fingerprint shows which tensors differ, but not which elements; tolerances do not apply, and -0.0 and 0.0 "
        "count as different"
    )
    STORED = "{text}"
    GROUPING = "{reasons:statements}"
    ONE_COPY = (
        "a torch.distributed.checkpoint folder stores each replicated tensor once, so it cannot show whether the ranks "
        "of its own run were in sync"
    )
    UNKNOWN_RECORDS = "not compared: {count} objects that torch.save did not write: {names:names 5}"
    UNLISTED_FILES = "not compared: {count} chunk files that .metadata does not list: {names:names 5}"
    PARTS_ABSENT = "not compared: {absent} of {total} {what}, which are not in the folder"
    RANKS_IN_FOLDER = (
        "the ranks in a DeepSpeed tag folder are not compared with each other; pass its `*_model_states.pt` as files "
        "to compare them"
    )
    WEIGHT_COPIES = (
        "not compared: {count:count copy|copies} of weights in DeepSpeed's model states; the optimizer's weights "
        "take precedence"
    )
    OTHER_WEIGHTS = "{file:name} is compared as a separate model, beside {others}"
    STRAY_SHARD = "{file:name} is not compared: loaders read its tensors from {others}"
    SECOND_WEIGHTS = "{file:name} is compared as a separate model: a second copy of the weights, beside {others}"
    # The gradient of a parallel program and its definition.
    PARITY = (
        "the gradient of {ranks:count rank} in {dtype:words}, compared with that of one process: {terms:count term} of "
        "the loss in {owners:count part} of the batch; errors below {threshold:number 3} of the whole gradient are "
        "rounding (measured: {floor:number 3})"
    )
    PARITY_TINY = (
        "not compared: {count:count gradient} smaller than rounding, and zero as far as {dtype:words} shows: "
        "{names:names}"
    )
    PARITY_COARSE = (
        "rounding in {name:words} changes weights by more than 1 %, so that no cause is proved; check with "
        "{dtype:option=float64}"
    )
    PARITY_COMPARED = "compared with one process: {parts:list}"
    PARITY_NO_STEP = "not compared: gradient norm, clipping and update, because gradients are wrong before them"
    PARITY_NO_FINISH = (
        "not compared: gradient norm, clipping and update, because the case defines no `finish(model, optimizer)`"
    )
    PARITY_NO_NORM = "not compared: the gradient norm, because `finish` returned None on {ranks:ranks}"
    PARITY_NO_CLIPPING = (
        "not compared: clipping, because no optimizer with hooks made a step with gradients on {ranks:ranks}"
    )
    PARITY_NO_UPDATE = "not compared: the update, because `optimizer(model)` of the case returned None"
    PARITY_NO_SETTINGS = (
        "not compared: settings of the optimizer that one step does not show, such as betas and momentum, because both "
        "optimizers have none of a common parameter in `param_groups`"
    )
    PARITY_SMALL_NORM = (
        "the gradient norm {norm:number 3} does not exceed max_norm {limit:number 3}, so clipping was not exercised: "
        "lower max_norm or scale the loss to test it"
    )
    PARITY_SMALL_ELEMENTS = (
        "the largest gradient element {largest:number 3} does not exceed clip_value {limit:number 3}, so clipping was "
        "not exercised: lower clip_value or scale the loss to test it"
    )
    PARITY_NOT_SEPARATED = (
        "not checked whether the terms of a sample depend on other samples: the batch has another number of samples "
        "than the loss terms"
    )
    UNUSED_WEIGHTS = (
        "not compared: {files:names}, a second copy of the weights in {folder:name}; pass the file itself to compare it"
    )


class Compared(Sentence):
    """The parts of a step that a check of parity has compared."""

    GRADIENTS = "gradients"
    NORM = "gradient norm"
    UNCLIPPED = "gradients at the step (no clipping)"
    MAX_NORM = "clipping by max_norm {limit:number 3}"
    CLIP_VALUE = "clipping by clip_value {limit:number 3}"
    UPDATE = "update by {optimizer:name}"
    SETTINGS = "optimizer settings ({names:list})"


class Refusal(Sentence):
    """Why the bytes of a tensor cannot be compared. Fingerprints store the text."""

    # Kinds of tensors whose bytes are not in the file, or have no known form.
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
    SUBCLASS = "a tensor subclass that syncheck does not read: {name:name}"
    AS_NUMPY = "a tensor stored as a numpy array"
    UNKNOWN_CLASS = "a tensor of an unknown class"
    IN_UNREAD_OBJECT = "in an object of class {name:name}, which syncheck does not read"
    UNKNOWN_DTYPE = "its dtype is unknown"
    DTYPE = "dtype {name:name} is not supported"
    STORAGE_WITHOUT_DTYPE = "its storage has no dtype"
    UNKNOWN_STORAGE = "a storage of an unknown class"
    STORAGE_IN_OBJECT = "a storage in an object"
    NUMPY_DTYPE = "a numpy array of dtype {name:name}"
    EMPTY_NUMPY = "a numpy array without content"
    UNKNOWN_RECORD = "an object that torch.save did not write"
    SET_MEMBER = "a member of a set, which has no order"
    HUGE_VIEW = "a view that shows {stored} stored bytes as {shown:.3g}"
    FLAT_PARAMETER = "sharded by FSDP: a flat parameter holds only this rank's shard"
    # Two models.
    AMBIGUOUS_NAME = "several tensors of the other model have the same data"
    ADAPTER_PART = "a part of an adapter that was not merged: {problem}"
    UNPLACED_PARTS = "the files do not show which part of the tensor each rank holds ({layout})"
    STORED = "{text}"
    IN_PARTS = "{refusal}; its parts are compared"


# Refusals of shards without replicas: a property of the layout, not a problem of the file.
SHARD_REFUSALS = (
    Refusal.SHARDED_TENSOR,
    Refusal.SHARDED_DTENSOR,
    Refusal.FLAT_PARAMETER,
    Refusal.UNPLACED_PARTS,
)


class Detail(Sentence):
    """Why a tensor was not fully compared, or how replicas differ."""

    MISSING = "not {ranks:owner}"
    OWN_PART_MISSING = "not on rank {rank}, which owns it"
    PARTITIONED = "on {ranks:ranks} only: each rank holds its own part"
    SHARDED = "{layout}: no two of these ranks hold the same shard"
    PARTS_OF_SUM = "{layout}: no two of these ranks hold the same part, and the whole tensor was not compared"
    WITHIN_GROUPS = "{layout}: compared within {sets}"
    REFUSED = "{refusal}"
    REFUSED_ON_SOME = "{refusal} ({ranks:owner} only)"
    UNEQUAL = "{values:on_ranks}"
    RNG_STATE = "RNG states differ by design"
    POWERSGD_ERROR = "PowerSGD errors differ by design"
    AMBIGUOUS_LAYOUT = "{layout}"
    UNCLEAR_PARTITIONING = "the files do not show whether each rank holds its own part of the optimizer state"
    INCOMPLETE_PARTITIONING = "some parts of the optimizer state are missing"
    # Fingerprints, stored checksums and live digests.
    OTHER_ALGORITHMS = "digests of different algorithms ({algorithms}); recreate the fingerprints with one version"
    DIGESTS_ONLY = "the digests differ; nothing else is known"
    MOMENTS_AGREE = "the digests differ, but min, max, mean and std do not"
    MOMENTS = "{differing}"
    MOMENTS_APART = "`max_abs` is at least {least:.3g}; {differing}"
    CHECKSUMS = "the stored checksums differ"
    STORED_DIFFERENTLY = "the files store the tensor with different strides, byte order or pending operations"
    VIEW = "the tensor is a view of a storage that differs; only its bytes show whether the view differs"
    NO_CHECKSUM = "some files store no checksum of the tensor"
    # Two models.
    ADAPTER_PARTS = "{names:names} of the adapter may change it, and {names:verb was|were} not merged: {problem}"
    UNTIED = "the adapter replaces another name of this tied weight, and may have replaced this name or not"
    FLUSHED = "{flushed:count element} of {name:name} (the first at {index})"
    UNPAIRED = "no tensor of the other model has this name, and its data may be in the parts in {files:names}"
    UNMAPPED_STACK = (
        "the matrices and the stack {stack:name} have equal rows under other names: pair them in a map, "
        "{map:option FILE}, which states their order in the stack"
    )
    SINGLE_SHARD = (
        "{files:names} in {side} looks like one of {shards} tensor-parallel shards: pass the files of all {shards} "
        "ranks as {side}, with their positions (DTensors, a torch.distributed.checkpoint) or joined"
    )
    UNHELD = (
        "the tensors of {side} without a partner have {least:count element} or more, and those of {other} have "
        "{most:count element} or fewer, with all parts in {files:names}"
    )
    HIDDEN_ADAPTER = "the rounding of the adapter's product is as large as the product"


class Fact(Sentence):
    """Evidence that every kind of finding may have."""

    # Evidence of an event file, which has only the text.
    TEXT = "{text}"
    NOT_IN_BASELINE = "not in the baseline: {names:names}"
    NAMED = "the event file has the names of {count} of these {total:count tensor}"


class Undecided(Sentence):
    """Why a comparison has no verdict."""

    UNREADABLE = "{count} of the files given could not be read"
    INFERRED_MAP = (
        "equal under an inferred map: review it, write it with {write_map:option FILE}, then pass {map:option FILE}"
    )
    CONTRADICTED_MAP = (
        "equal under an inferred map that names contradict in {count:count rule}: {names:names}. If B is right, pass "
        "the map with {map:option FILE}, which {write_map:option FILE} writes"
    )
    DIVIDED_GROUPS = (
        "equal under a map whose rules have the parts of one module in different groups: {names:names}. Row i of a "
        "weight and element i of its bias are one output, so one of both models computes another function"
    )
    WRITTEN_MAP = "equal under an inferred map: review {file:name}, then pass {file:typed map}"
    GUESSED_HEADS = (
        "equal if {names:list} {names:verb is|are} as the data suggests: put config.json beside the files, or pass "
        "{accept_inferred:option}"
    )
    ALL_LINKS = "all files given are links to one file; compare copies"
    ONE_FILE = (
        "one file has no replica to compare with; save the model on every rank and pass all files (syncheck show lists "
        "the contents of one file)"
    )
    NO_REPLICAS = (
        "no two of the files are replicas of each other; pass the files of at least two ranks of one run, or group "
        "them with {group_by:option REGEX} ({group_by:option=} puts all files into one group); compare two models of "
        "different runs with `syncheck diff A B`"
    )
    SOME_ALONE = (
        "{count} of the checkpoints given had no replica to compare with: {paths:names}; remove them, add their "
        "replicas, or group files with {group_by:option REGEX}; compare two models of different runs with "
        "`syncheck diff A B`"
    )
    AMBIGUOUS = "{name:name}: {detail}"
    MORE_AMBIGUOUS = "{name:name} and {more} more tensors: {detail}"
    OF_OTHER_RUNS = "{reason}; the files are of different runs: compare two models with `syncheck diff A B`"
    NO_CHECKSUMS = (
        "{unknown} of {tensors} tensors have no usable stored checksum (torch.save stores one for each storage, other "
        "formats store none); without {quick:option} every byte is read"
    )
    RANKS_TWICE = (
        "several files claim to be of rank {ranks:list} of the same run and step, so the file of another rank may be "
        "absent; save each rank's file with its own rank, or group the files with {group_by:option REGEX}"
    )
    RANKS_NOT_COMPARED = "no tensor of {ranks:ranks} was compared: no other rank holds the same shards"
    ONLY_SHARDS = "every rank holds its own shards, so no tensor was compared"
    ABSENT_SHARDS = (
        "{count} of the {shards} shards of {name:name}, at mesh coordinate {absent:list}, {count:verb is|are} in no "
        "file, so {tensors:count tensor} {tensors:verb was|were} compared in part; pass the files of all ranks, or "
        "save them again"
    )
    COPIED_SHARDS = "{copies:statements}, and {absence}"
    SHARD_OF_RANK = "{file:name} holds the shard of rank {rank}"
    UNMARKED_SHARDS = (
        "the files look like {shards} tensor-parallel shards of one model, not like replicas, without a statement in "
        "any file; to compare replicas, pass {group_by:option=}"
    )
    REFUSED = "{count} of the tensors could not be compared: {tensors}; skip them with {exclude:option GLOB}"
    NOT_COMPARED = "{count:count tensor} could not be compared: {name:name}: {detail}"
    UNPAIRED = (
        "{count:count tensor} could not be compared: {name:name}: {detail}, whose positions in the whole tensors the "
        "files do not show; compare one file with all parts joined, or save DTensors or a torch.distributed.checkpoint"
    )
    VALUES = (
        "{count:count value} of the model could not be compared: {name:name}; see the notes, or skip with "
        "{exclude:option GLOB}"
    )
    ALL_EXCLUDED = "no tensor was compared; the options exclude {count} tensors"
    PARITY_ROUNDING = (
        "{dtype:words} cannot tell a right gradient from a gradient with an error of 1 %: errors below "
        "{threshold:number 3} of the whole gradient are rounding, which hides faults in {names:names}; check with "
        "{check}"
    )
    PARITY_STEP = (
        "{dtype:words} cannot tell a right update from an update with an error of 1 %: errors below "
        "{threshold:number 3} of the whole update are rounding; check with {check}"
    )
    NOTHING = "no tensor was compared"


class Hint(Sentence):
    """Suggestions that mention options."""

    ALL_ROWS = "{limit:option=0} shows all"
    ALL_ROWS_OF_COMMAND = "-n 0 shows all"
    ALL_ROWS_IN_JSON = "the .json report has all"
    ALL_ROWS_IN_HTML = "{output:option FILE.html} lists all"
    GROUP_FILES = (
        "Pass the files of at least two ranks of one run, remove this file, or group files with "
        "{group_by:option REGEX}. Compare two models of different runs with `syncheck diff A B`."
    )
    UPDATE_BASELINE = "remove it from the baseline with {update_baseline:option}"
    IN_FLOAT64 = "{dtype:option=float64}"
    IN_FLOAT64_OR_32 = "{dtype:option=float64} or float32"
    WITHOUT_LOW_PRECISION = "a model without parts in a lower precision"


class Usage(Sentence):
    """Errors that mention options: the text of an error is rendered when it is printed."""

    TOLERANCE_PAIR = "{rtol:option} and {atol:option} belong together: give both (0 is a value)"
    CLOSE_WITH_OTHERS = "cannot be combined, because {close:option} sets the tolerance of each dtype"
    NO_COMMON_NAMES = (
        "A and B have no tensor in common: {examples:statements}; pass two copies of one model, or {map:option FILE}"
    )
    IGNORED_DIFFERS = (
        "{map:name}: the map ignores {name:name}, which differs between A and B; name its parts, or leave it out on "
        "purpose with {exclude:option GLOB}"
    )
    MIXED_PRECISION = (
        "{module:name}: mixed precision ({policy:words}) computes another gradient than one process; for the check, "
        "remove the policy, and pass {dtype:option NAME} for a check in low precision"
    )
    NO_BASELINE = "{path:name}: no such baseline; create it with {update_baseline:option}{suggestion}"
    UPDATE_NEEDS_BASELINE = "requires {baseline:option FILE}, or baseline in the table tool.syncheck"
    ONE_PROCESS = "{quick:option} and {group_by:option} require a single process that reads all files; remove them"


def note_if(applies: object, note: Message) -> list[Message]:
    """Return a list of the note, or an empty list.

    applies: a condition, or the ranks or names that the note lists.
    """
    return [note] if applies else []
