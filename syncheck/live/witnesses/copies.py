"""What the witnesses of gradients and of parameters share: some ranks hold copies of a tensor, which must be equal.

A digest of the copies is posted, and one of the shards. With a wrapper that reduces gradients, copies must agree.
Without a wrapper, nothing states which ranks hold copies, so ranks are held to what they showed: ranks that were equal
several times belong together.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.live.digest import digest_all, hash_digests
from syncheck.live.witnesses.learned_sets import LearnedSets, Messages
from syncheck.live.witnesses.samples import Samples
from syncheck.live.witnesses.witness import Suspicion, Witness, find_minority
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask
    from syncheck.sentences import Message

# The kind of the tensors.
_KIND = "parameter"
COPIES = "copies"
_KINDS = (COPIES, "shards")


class Details(NamedTuple):
    """The tensors of one step, to tell other ranks about."""

    digests: list[str]
    """The digest of each tensor, as text; empty for a parameter without one."""
    elements: dict[int, list[float]]
    """A few elements of each tensor, by its index."""
    not_finite: Sequence[int] = ()
    """The indices of tensors that hold NaN or infinity, as far as this is known."""
    is_reduced: bool = False
    """Whether no tensor was changed after the reduction, which leaves equal tensors on all ranks; False if unknown."""
    is_unreduced: bool = False
    """Whether no reduction came before the step."""
    local_passes: int = 0
    """The backward passes in `no_sync()` between the reduction and the step."""


class CopiesWitness(Witness):
    """Compares one tensor of each parameter: its gradient, or its value.

    code: of the finding.
    """

    code: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.comparisons = 0
        """How many sets of copies were compared so far."""
        self.is_selected: Callable[[str, str], bool] = lambda *_: True
        """Whether the user selects a tensor, by its name and kind."""
        self.learned: dict[str, LearnedSets] = {}
        """What ranks without a wrapper have shown, by layout and by copies or shards."""
        self.messages = Messages()
        self.leader: CopiesWitness = self
        """The witness that knows first: ranks that step with equal gradients must have equal parameters, too."""
        self.follower: Any = None
        """The witness of the parameters before the first step; None without one."""
        # The findings so far, by layout and suspects.
        self._explained: dict[tuple[str, tuple[int, ...]], Suspicion] = {}

    def read(self, parameter: Any) -> Any:
        """Return the tensor that is compared; None if the parameter has none."""
        raise NotImplementedError

    def holds_reduced(self, _layout: Any) -> bool:
        """Whether the tensors are those that the last reduction left; False if unknown."""
        return False

    def is_unreduced(self, _layout: Any) -> bool:
        """Whether a step comes without a reduction, between two of them."""
        return False

    def sample(self, _tensors: Mapping[int, Any]) -> Samples:
        """Return a few elements of the tensors, if a finding needs them; none otherwise."""
        return Samples({}, [])

    def describe(self, layout: Any, details: Mapping[int, Details], indices: Sequence[int]) -> Suspicion:
        """Return the finding of ranks that disagree. indices: of the parameters that must be equal."""
        raise NotImplementedError

    def describe_digests(self) -> Message:
        """Return the fact of ranks that disagree, if they tell no details."""
        raise NotImplementedError

    def observe(self, key: str, layout: Any) -> Any:
        """Return the digests of copies and of shards, and keep the details.

        The parameters of the layout are in an order that is equal on all ranks. Without tensors, the digest is empty.
        """
        self.messages.observe()
        parameters = layout.parameters
        tensors: list[Any] = []
        indices: list[int] = []
        for index, parameter in enumerate(parameters):
            content = self.read(parameter)
            if content is not None and self.is_selected(layout.names[index], _KIND):
                parts = _list_tensors(content)
                tensors += parts
                indices += [index] * len(parts)
        # One thread: the others belong to the training.
        hashed = digest_all(tensors, threads=1)
        digests = [""] * len(parameters)
        for index, (_, digest) in zip(indices, hashed, strict=True):
            digests[index] += digest[:8].hex()
        # The values of a sparse tensor come last.
        samples = self.sample(dict(zip(indices, tensors, strict=True)))
        states = self.holds_reduced(layout), self.is_unreduced(layout), layout.clock.local_passes
        self._keep(key, Details(digests, *samples, *states))
        return [_hash_texts(digests, layout.copied), _hash_texts(digests, layout.sharded)]

    def tell(self, key: str) -> list[Any] | None:
        """Return the details of a step, or None for an old step."""
        details = super().tell(key)
        return None if details is None else list(details)

    def judge(self, layout: Any, observations: Mapping[int, Any], ask: Ask) -> list[Suspicion]:
        """Return a finding if ranks that hold copies have different tensors."""
        differing, positions = self._find_differing(layout, observations, ask)
        if not differing:
            return []
        # Shards of other ranks are other parts, also if the copies beside them must be equal.
        columns: dict[int, tuple[Any, ...]] = {}
        for rank in differing:
            columns[rank] = tuple(map(observations[rank].__getitem__, positions))
        suspects = find_minority(columns)
        key = (layout.key, suspects)
        # A fault that lasts is explained once, so that the judge keeps up with the run.
        if key not in self._explained:
            answers = ask()
            details = read_answers({rank: answers[rank] for rank in differing if rank in answers})
            if len(details) < len(differing):
                unknown = Suspicion(
                    self.code,
                    suspects,
                    facts=(self.describe_digests(),),
                    affected=(),
                )
                return [unknown]
            parts = layout.copied, layout.sharded
            indices = sorted(chain(*map(parts.__getitem__, positions)))
            if _have_equal_elements(layout, details, indices):
                return []
            self._explained[key] = self.describe(layout, details, indices)
        clusters = tuple(map(tuple, group_ranks(columns).values()))
        # The sets of this step, also if the fault was explained before.
        return [self._explained[key]._replace(clusters=clusters)]

    def _find_differing(
        self, layout: Any, observations: Mapping[int, Any], ask: Ask
    ) -> tuple[tuple[int, ...], list[int]]:
        """Return the first set of ranks whose tensors must be equal and are not, and the positions of the digests.

        The set is empty without a difference. Position 0 is of copies, position 1 of shards.
        """
        differing: dict[tuple[int, ...], list[int]] = {}
        for position, kind in enumerate(_KINDS):
            digests = {rank: observation[position] for rank, observation in observations.items()}
            for ranks in self._list_sets(layout, kind, digests, ask):
                # A rank that has skipped steps ends before the others.
                stepping = tuple(filter(digests.__contains__, ranks))
                distinct = set(map(digests.__getitem__, stepping))
                # An empty digest is of no tensor.
                self.comparisons += len(stepping) > 1 and distinct != {""}
                if len(distinct) > 1:
                    differing.setdefault(stepping, []).append(position)
        return next(iter(differing.items()), ((), []))

    def _list_sets(self, layout: Any, kind: str, digests: Mapping[int, str], ask: Ask) -> list[tuple[int, ...]]:
        """Return the sets of ranks whose tensors must be equal."""
        if layout.clock.keeps_gradients_local():
            return []
        # Beside a wrapper, parameters outside of it are copies too, unless the ranks keep them apart.
        if layout.clock.reduces:
            return [tuple(digests)]
        # Equal ranks without any exchange, as in a sweep, train separately.
        if not self.messages.were_sent:
            return []
        key = f"{layout.key}/{kind}"
        led = self.leader.learned.get(key)
        if self.leader is not self and led is not None and led.are_known:
            return led.sets
        learned = self.learned.setdefault(key, LearnedSets())
        # The step that completes what is known is equal.
        sets = learned.sets
        learned.learn(digests)
        if kind == COPIES and self.leader is self:
            learned.learn_parts(
                tuple(sorted(digests)),
                lambda: read_answers(ask()),
                lambda earlier, details: self.show_copies(layout, earlier, details),
            )
        return learned.sets if learned.are_partial else sets

    def show_copies(self, _layout: Any, _earlier: Mapping[int, Details], _details: Mapping[int, Details]) -> bool:
        """Whether the details of two steps in a row show copies, although a tensor always differs."""
        return False


def select_digests(details: Mapping[int, Details], indices: Sequence[int]) -> dict[int, tuple[str, ...]]:
    """Return the digests of some tensors by rank."""
    columns = {}
    for rank in sorted(details):
        columns[rank] = tuple(map(details[rank].digests.__getitem__, indices))
    return columns


def list_differing(columns: Mapping[int, Sequence[str]], indices: Sequence[int]) -> list[int]:
    """Return the indices of the tensors whose digests differ. columns: the digests of each rank, for the indices."""
    differing = []
    for index, digests in zip(indices, zip(*columns.values(), strict=True), strict=True):
        if len(set(digests)) > 1:
            differing.append(index)
    return differing


def _have_equal_elements(layout: Any, details: Mapping[int, Details], indices: Sequence[int]) -> bool:
    """Whether tensors with other bytes have equal elements: 0.0 equals -0.0. False if not all elements are known."""
    are_equal = True
    for index in list_differing(select_digests(details, indices), indices):
        first, *others = (details[rank].elements.get(index, []) for rank in details)
        are_known = len(first) == layout.parameters[index].numel()
        are_equal &= are_known and others == [first] * len(others)
    return are_equal


def read_answers(answers: Mapping[int, Sequence[Any]]) -> dict[int, Details]:
    """Return details as the ranks told them: JSON has texts as keys."""
    details = {}
    for rank, (digests, elements, *further) in answers.items():
        elements_of_index = dict(zip(map(int, elements), elements.values(), strict=True))
        details[rank] = Details(digests, elements_of_index, *further)
    return details


def _hash_texts(digests: Sequence[str], indices: Sequence[int]) -> str:
    """Return the digest of some tensors; empty if no parameter has a digest."""
    parts = []
    for index in indices:
        # Another parameter without gradient is another set of gradients, whatever their bytes are.
        if digests[index]:
            parts.append((f"{index}", bytes.fromhex(digests[index])))
    return hash_digests(parts)[:12].hex() if parts else ""


def _list_tensors(content: Any) -> list[Any]:
    """Return the tensors whose bytes count: of a sparse one, also the indices; of a DTensor, the shard."""
    if content.is_sparse:
        content = content.coalesce()
        return [content.indices(), content.values()]
    return [getattr(content, "_local_tensor", content)]


def let_gradients_lead(witnesses: Mapping[str, Any]) -> None:
    """Let the sets shown by gradients count for parameters, and the first parameters for gradients.

    witnesses: by name.
    """
    for witness in witnesses.values():
        witness.leader = witnesses.get("gradients", witness)
        witness.follower = witnesses.get("parameters")
