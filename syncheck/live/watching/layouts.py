"""What steps together: the parameters of one clock that one optimizer trains."""

from __future__ import annotations

import gc
import hashlib
import sys
import weakref
from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from syncheck.live.watching.changes import ParameterChanges
from syncheck.live.watching.clock import has_compiled, list_wrappers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.live.watching.clock import Clock


# The numbers of repeated steps between two reductions: with gradients of their own, and with those of the step before.
REPEATED = "e"
AGAIN = "a"
# The unit of a step that no reduction preceded.
_FURTHER = {"reduction": "further step after reduction"}
_STEP = "step"
_END = "the end, after {}"
_ZERO = "ZeroRedundancyOptimizer"


class Layout:
    """The parameters of one clock that one optimizer trains.

    name: of the optimizer, equal on all ranks.
    is_reduced: whether the wrapper of the clock reduces the gradients.
    prefix: of the names for the user, if several models are wrapped.
    key: equal on all ranks.
    copied: the indices of the parameters without shards.
    sharded: the indices of those of which each rank holds a shard.
    signature: of the names and shapes: ranks with another one hold other parts of the model.
    has_ended: this rank has told of its parameters at the end.
    posted: the number of the last step that this rank told the other ranks about.
    number: of the optimizer, among the optimizers of the wrapper; 0 without a wrapper.
    optimizers: the number of optimizers of the wrapper; 1 without a wrapper.
    repeated: steps since the last reduction, without the first one; before any reduction, all steps.
    most_repeated: the largest number of such steps so far, up to the last reduction.
    scaler: the GradScaler that takes the step; None without one.
    is_beside: the optimizer also trains parameters that the wrapper, or a later wrapper of the module, reduces, which
        have a layout of their own.
    is_moved: the optimizer is within its step, and has moved the parameters.
    sees_steps: the steps are seen, and not only the reductions before them.
    """

    def __init__(
        self,
        clock: Clock,
        name: str,
        optimizer: Any,
        parameters: list[Any],
        names: list[str],
        *,
        is_reduced: bool,
        prefix: str = "",
    ) -> None:
        self.clock = clock
        self.is_reduced = is_reduced
        self.key = f"{clock.name}/{name}"
        self.parameters = parameters
        self.names = [prefix + name for name in names]
        self.identities = list(map(id, parameters))
        self.copied: list[int] = []
        self.sharded: list[int] = []
        for index, parameter in enumerate(parameters):
            part = self.sharded if _is_sharded(parameter) else self.copied
            part.append(index)
        self.signature = _sign(parameters, names)
        self.number = 0
        self.optimizers = 1
        self.posted = 0
        self.repeated = 0
        self.most_repeated = 0
        self.scaler: Any = None
        self.is_beside = self.is_moved = False
        self.sees_steps = optimizer is not None
        # The repeated steps since the last reduction.
        self._repetitions: Counter[str] = Counter()
        # The gradients of the last step, and the versions of each.
        self._gradients: list[weakref.ref[Any]] = []
        self._versions: list[tuple[int, int]] = []
        self.changes = ParameterChanges(parameters)
        self.has_ended = False
        # The optimizers, with the numbers of their last steps. One that replaces another one comes later.
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        if optimizer is not None:
            self.note_optimizer(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, which steps now; None if it is not known."""
        return next(reversed(list(self._optimizers)), None)

    def note_optimizer(self, optimizer: Any) -> None:
        """Note the optimizer that is about to step, maybe in the place of another one."""
        self._optimizers.pop(optimizer, None)
        self._optimizers[optimizer] = self.clock.ticks
        self.has_ended = False

    def is_replaced(self, optimizer: Any) -> bool:
        """Whether another optimizer of these parameters has stepped later than an optimizer."""
        return self._optimizers.get(optimizer, -1) < max(self._optimizers.values(), default=-1)

    def note_changes(self) -> None:
        """Note how the script changed the parameters since the last step, before the next one, or at a reduction."""
        # Within its step, the optimizer changes the parameters.
        if not self.is_moved:
            self.changes.note_before_step()

    def describe_change(self) -> int:
        """Return how parameters were changed after the last step: 0 for not at all, a negative number for a new way.

        A change within the step of an optimizer that is not torch's is no change after it.
        """
        change = self.changes.find_last()
        if self.changes.has_new():
            return -change
        return change if self.sees_steps else 0

    def has_reduced_by(self, optimizer: Any, ranks: tuple[int, ...]) -> bool:
        """Whether a wrapper of some ranks reduces the gradients, and the optimizer is not replaced."""
        is_of_ranks = (self.clock.reduces, self.clock.ranks) == (True, ranks)
        return is_of_ranks and not self.is_replaced(optimizer)

    def note_gradients(self, repeated: int) -> None:
        """Count a repeated step by its gradients, before it. A step without any gradient changes nothing."""
        gradients = []
        versions = []
        for parameter in self.parameters:
            if parameter.grad is not None:
                # The same object as before, unless the gradient is another one.
                reference = weakref.ref(parameter.grad)
                gradients.append(reference)
                versions.append((id(reference), parameter.grad._version))  # noqa: SLF001 - there is no public name
        kind = AGAIN if versions == self._versions else REPEATED
        self._repetitions[kind] += bool(repeated and versions)
        self._gradients, self._versions = gradients, versions

    def list_repeated(self) -> dict[str, int]:
        """Return the numbers of repeated steps since the last reduction, as a record has them."""
        return dict(+self._repetitions)

    def note_posted(self, step: Step) -> None:
        """Note a posted step, and count repeated steps from 0 after a reduction."""
        if not step.repeated:
            self.most_repeated = max(self.most_repeated, self.repeated)
            self._repetitions.clear()
        self.posted, self.repeated = step.number, step.repeated

    @property
    def counts_reductions(self) -> bool:
        """Whether reductions number the steps: a compiled program shows no reduction."""
        return self.clock.reduces and self.clock.ticks > 0

    @property
    def hides_reductions(self) -> bool:
        """Whether reductions may be hidden in a compiled program, or in forward passes."""
        conditions = (
            self.clock.reduces,
            not self.clock.ticks,
            has_compiled() or self.clock.hides_passes,
        )
        return all(conditions)

    @property
    def numbers_steps(self) -> bool:
        """Whether reductions number the steps, so that the ranks are at the same step."""
        return self.clock.reduces and not self.hides_reductions

    def find_place(self) -> int:
        """Return the number of the next step for the user: of its reduction, or of the step if none is counted."""
        return self.clock.ticks if self.clock.ticks else self.repeated + 1

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that hold copies: of parameters outside of the wrapper, all ranks do."""
        return self.clock.replicas if self.is_reduced else (self.clock.ranks,)

    def find_replicas(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part of the model as a rank."""
        return next(ranks for ranks in self.replicas if rank in ranks)

    def list_sharded(self) -> list[str]:
        """Return the names of the parameters of which each rank holds a shard."""
        return [self.names[index] for index in self.sharded]

    def list_outside(self) -> dict[str, Any]:
        """Return the parameters that the module of the wrapper does not contain, by name."""
        by_identity = dict(zip(self.identities, zip(self.names, self.parameters, strict=True), strict=True))
        for parameter in getattr(self.clock.wrapper, "parameters", list)():
            by_identity.pop(id(parameter), None)
        return dict(by_identity.values())

    def list_modules(self) -> list[tuple[str, Any]]:
        """Return the modules of the wrapper with their names; none without a wrapper, and for parameters outside."""
        module = self.clock.module if self.is_reduced else None
        return [] if module is None else list(module.named_modules())


def _is_sharded(parameter: Any) -> bool:
    """Whether a parameter is a DTensor with a shard on each rank."""
    return any(not placement.is_replicate() for placement in getattr(parameter, "placements", ()))


def _sign(parameters: Sequence[Any], names: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=4)
    for parameter, name in zip(parameters, names, strict=True):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
    return digest.hexdigest()


class Step:
    """A step of a layout, or a skipped one.

    number: of the clock at the step.
    repeated: how many steps of this number came before it; from 1 on, its gradients were not reduced for it.
    is_end: it is no step, but the end of training.
    key: of its records on the board, equal on all ranks.
    unit: the word before the number.
    place: the number for the user: of the step, if no reduction is counted; at the end, of the last one.
    """

    def __init__(self, layout: Layout, *, is_end: bool = False) -> None:
        self.layout = layout
        self.is_end = is_end
        self.number = layout.clock.ticks
        self.repeated = layout.repeated + 1 if layout.posted == self.number else 0
        self.key = f"{layout.key}/{self.number}+{self.repeated}"
        self.unit = layout.clock.unit
        self.place = layout.find_place()
        if not layout.counts_reductions:
            self.unit = self.unit.replace("reduction", _STEP)
        elif self.repeated:
            # The reduction was correct.
            self.unit = _FURTHER.get(self.unit, self.unit)
        if is_end:
            # The comparison comes after the last step.
            self.unit = _END.format(layout.clock.unit if layout.counts_reductions else _STEP)
            self.place = layout.clock.ticks or layout.repeated
            # An optimizer that ends before another one replaces it may do so on one rank alone.
            self.key = f"{layout.key}/end/{self.number if layout.clock.reduces else ''}"


def make_layout_of_reductions(clock: Clock, clocks: Sequence[Clock]) -> Layout:
    """Return the parameters that a wrapper reduces, for a script whose optimizer is not torch's.

    clocks: of all wrappers.
    """
    names = []
    parameters = []
    for name, parameter in clock.list_parameters():
        if parameter.requires_grad:
            names.append(name)
            parameters.append(parameter)
    return Layout(
        clock,
        "reductions",
        None,
        parameters,
        names,
        is_reduced=True,
        prefix=name_model(clocks, clock),
    )


def name_model(clocks: Sequence[Clock], clock: Clock) -> str:
    """Return the prefix of a model as a comparison of all replicas has it, such as "model.1."; empty for one model."""
    wrappers = list_wrappers(clocks, clock.ranks)
    # The last wrapper of a model stands for earlier ones.
    if len(wrappers) < 2 or clock.wrapper not in wrappers:
        return ""
    return f"model.{wrappers.index(clock.wrapper)}."


def list_trained(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


class Optimizers:
    """The optimizers of this rank, in the order of their creation.

    Ranks create the optimizers of a wrapper in the same order. A rank may have additional optimizers, for example for a
    local head, so the numbers count only optimizers of the same wrapper. An optimizer that replaces another one trains
    the same parameters, and continues its number.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # The parameters of each optimizer, also after the end of the optimizer.
        self._trained: list[list[weakref.ref[Any]]] = []
        # By key; a layout ends with its last optimizer.
        self._layouts: weakref.WeakValueDictionary[str, Layout] = weakref.WeakValueDictionary()

    def add(self, optimizer: Any) -> None:
        """Add an optimizer that was created, or has another set of parameters since then."""
        references = list(map(weakref.ref, list_trained(optimizer)))
        if optimizer in self._numbers:
            self._trained[self._numbers[optimizer]] = references
        else:
            self._numbers[optimizer] = len(self._trained)
            self._trained.append(references)

    def is_part(self, optimizer: Any) -> bool:
        """Whether an optimizer is inside a ZeroRedundancyOptimizer, which steps with all parameters itself."""
        for outer in list(self._numbers):
            classes = list(map(attrgetter("__name__"), type(outer).__mro__))
            if getattr(outer, "optim", None) is optimizer and _ZERO in classes:
                return True
        return False

    def number(self, optimizer: Any) -> int:
        """Return the number of an optimizer of this rank."""
        self.add(optimizer)
        return self._numbers[optimizer]

    def count_earlier(self, optimizer: Any, parameters: Iterable[Any]) -> int:
        """Return how many sets with any of some parameters had an optimizer before the set of an optimizer."""
        own = self._identify(self.number(optimizer))
        sets = self._list_sets(parameters)
        return [*sets, own].index(own)

    def count(self, parameters: Iterable[Any]) -> int:
        """Return how many sets of parameters with any of some parameters have an optimizer."""
        return len(self._list_sets(parameters))

    def is_trained(self, layout: Layout) -> bool:
        """Whether any optimizer trains all parameters of a layout."""
        identities = set(layout.identities)
        return any(identities.issubset(map(id, list_trained(optimizer))) for optimizer in list(self._numbers))

    def continue_layout(self, layout: Layout) -> Layout:
        """Return the layout of an earlier optimizer that an optimizer replaces; otherwise, the new layout.

        Without a wrapper, the steps of an optimizer that trains other parameters from now on keep their numbers.
        """
        earlier = self._layouts.setdefault(layout.key, layout)
        if earlier.identities != layout.identities:
            layout.clock.ticks = max(layout.clock.ticks, earlier.clock.ticks)
            earlier = self._layouts[layout.key] = layout
        earlier.optimizers = layout.optimizers
        return earlier

    def _identify(self, number: int) -> frozenset[int]:
        """Return what optimizers of the same parameters have in common."""
        identities = set()
        for reference in self._trained[number]:
            identities.add(id(reference()))
        return frozenset(identities)

    def _list_sets(self, parameters: Iterable[Any]) -> list[frozenset[int]]:
        """Return the sets that contain any of some parameters, in the order of their first optimizers."""
        identities = set(map(id, parameters))
        # Each rank has its own part, if any.
        numbers_of_parts = set()
        for optimizer, number in list(self._numbers.items()):
            if self.is_part(optimizer):
                numbers_of_parts.add(number)
        sets: dict[frozenset[int], None] = {}
        for number in range(len(self._trained)):
            trained = self._identify(number)
            if number not in numbers_of_parts and not identities.isdisjoint(trained):
                sets[trained] = None
        return list(sets)


def make_layouts(clocks: Sequence[Clock], optimizers: Optimizers, optimizer: Any) -> list[Layout]:
    """Return the parameters that an optimizer trains by the wrapper that contains them, and the rest.

    optimizers: all of this rank. Returns nothing if no wrapper contains a parameter, or its module does now.
    """
    all_trained = list_trained(optimizer)
    trained = dict(zip(map(id, all_trained), all_trained, strict=True))
    layouts: list[Layout] = []
    modules: list[Any] = []
    holders: list[tuple[Clock, int]] = []
    # A script may wrap a module again: the last wrapper reduces.
    for clock in reversed(clocks):
        # The script may have deleted the model.
        if clock.wrapper is None:
            continue
        for parameter in clock.list_local():
            trained.pop(id(parameter), None)
        names = []
        parameters = []
        # After wrapping, a module may have got other parameters, as `load_state_dict(assign=True)` does.
        contained = list(clock.wrapper.parameters())
        if not trained.keys().isdisjoint(map(id, contained)):
            holders.append((clock, optimizers.count_earlier(optimizer, contained)))
        wrapped = dict(clock.list_parameters())
        for name, parameter in wrapped.items():
            if trained.pop(id(parameter), None) is not None:
                names.append(name)
                parameters.append(parameter)
        if parameters:
            number = optimizers.count_earlier(optimizer, wrapped.values())
            layout = Layout(
                clock,
                str(number),
                optimizer,
                parameters,
                names,
                is_reduced=True,
                prefix=name_model(clocks, clock),
            )
            layout.number, layout.optimizers = number, optimizers.count(wrapped.values())
            # A later wrapper of the module does not reduce these parameters, for example because they are frozen.
            layout.is_beside = clock.module in modules
            modules.append(clock.module)
            layouts.append(layout)
    # A DTensor has its own placements, which reduce its gradient.
    outside = [parameter for parameter in trained.values() if not hasattr(parameter, "placements")]
    reducing = [(layout.clock, layout.number) for layout in layouts] or holders
    if reducing and outside:
        clock, number = reducing[-1]
        names = find_names(outside)
        layout = Layout(clock, f"{number}+", optimizer, outside, names, is_reduced=False)
        layout.is_beside = bool(layouts)
        layouts.append(layout)
    return layouts


def find_names(parameters: Sequence[Any]) -> list[str]:
    """Return the names of parameters in the modules that hold them, without prefixes of wrappers.

    Searches the objects of the program, which takes some 0.1 s: once for an optimizer that no wrapper belongs to.
    """
    torch: Any = sys.modules["torch"]
    parents: dict[int, tuple[Any, str]] = {}
    holders: dict[int, tuple[Any, str]] = {}
    for item in gc.get_objects():
        # isinstance() would ask the object for its class, which lazy objects answer by loading what they stand for.
        is_module = issubclass(type(item), torch.nn.Module)
        if not is_module or "require_backward_grad_sync" in item.__dict__:
            continue
        for name, child in item.__dict__.get("_modules", {}).items():
            parents.setdefault(id(child), (item, name))
        for name, parameter in item.__dict__.get("_parameters", {}).items():
            holders.setdefault(id(parameter), (item, name))
    names = []
    # The number of each outermost module, by its identity.
    roots: dict[int, int] = {}
    root_of_names = []
    for number, parameter in enumerate(parameters):
        module, name = holders.get(id(parameter), (None, f"parameter {number}"))
        while module is not None and id(module) in parents:
            module, part = parents[id(module)]
            name = f"{part}.{name}"
        names.append(name)
        root_of_names.append(roots.setdefault(id(module), len(roots)))
    # Several models have parameters with equal names.
    if len(set(names)) == len(names):
        return names
    names_with_models = []
    for root, name in zip(root_of_names, names, strict=True):
        names_with_models.append(f"model.{root}.{name}")
    return names_with_models
