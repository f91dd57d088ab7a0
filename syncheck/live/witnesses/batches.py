"""The witness of batches: data-parallel ranks train on different samples, in a new order in each epoch.

Two things are observed: a digest of the tensors that enter a wrapper in training mode, and the indices that data
loaders draw. Indices count only if the datasets of the ranks are equal: a rank that holds its own part of the data
draws the same indices as its peers. Samples are chosen by a hash, so that all ranks watch the same ones, and memory is
bounded.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from base64 import b64encode
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from syncheck.live.digest import digest_all, hash_digests
from syncheck.live.watching.wrappers import wrap
from syncheck.live.witnesses.identity import identify_dataset
from syncheck.live.witnesses.inputs import list_inputs
from syncheck.live.witnesses.rules import DifferentBatches, OverlappingBatches, RepeatedOrder, SameBatch
from syncheck.live.witnesses.witness import Suspicion, Witness, find_minority
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.live.witnesses.witness import Ask

# Watched samples of one batch, about, and of one rank in one epoch.
_SAMPLES_PER_BATCH = 6
_SAMPLES_PER_EPOCH = 4096
# Inputs of fewer elements are equal by chance.
_LEAST_ELEMENTS = 8
# Elements that are looked at first.
_FIRST_ELEMENTS = 64
# Indices of an epoch that are compared with the epoch before.
_ORDER = 512
# Forward passes whose inputs are told with one step.
_MOST_PASSES = 4
_HASH_BYTES = 6
_HASHES = 1 << (8 * _HASH_BYTES)


class _Loader:
    """What is loader_state of one data loader of this rank.

    identity: of its dataset, equal for equal datasets.
    epoch: the number of its iterators so far.
    """

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.epoch = 0
        self.trains = False
        # Hashes of watched samples that were drawn and not yet told.
        self.samples: list[str] = []
        self.order: list[int] = []
        self.order_before: list[int] = []
        self._watched = 0

    def begin_epoch(self) -> None:
        """Begin to draw in a new order."""
        self.epoch += 1
        self.order_before, self.order = self.order, []
        self._watched = 0
        self.samples = []

    def draw(self, indices: Sequence[int]) -> None:
        """Note the indices of a batch."""
        self.order += indices[: _ORDER - len(self.order)]
        # Nested: a smaller share of the hashes is a part of a larger one, so ranks may differ in the size of batches.
        share = min(1.0, _SAMPLES_PER_BATCH / max(1, len(indices)))
        for index in indices:
            digest = hashlib.blake2b(self.identity + repr(index).encode(), digest_size=_HASH_BYTES).digest()
            if int.from_bytes(digest) < share * _HASHES and self._watched < _SAMPLES_PER_EPOCH:
                self._watched += 1
                self.samples.append(b64encode(digest).decode())

    def observe(self) -> dict[str, Any]:
        """Return the watched samples since the last step, and how many came in the order of the epoch before."""
        if not self.trains:
            return {}
        observation: dict[str, Any] = {"e": self.epoch, "s": "".join(self.samples)}
        self.samples = []
        count = min(len(self.order), len(self.order_before))
        order = self.order[:count]
        is_random = order != sorted(order)
        if count >= _LEAST_ELEMENTS and is_random and order == self.order_before[:count]:
            observation["o"] = count
        return observation


class _Passed(NamedTuple):
    """The inputs of a forward pass. digest: of all tensors. elements: their number."""

    digest: str
    elements: int


class BatchWitness(Witness):
    """The samples that this rank trains on."""

    name: ClassVar[str] = "batches"
    key: ClassVar[str] = "b"

    def __init__(self) -> None:
        super().__init__()
        self._loaders: weakref.WeakKeyDictionary[Any, _Loader] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, _Loader | None] = weakref.WeakKeyDictionary()
        # The loader that creates an iterator now: with workers, the iterator draws before anybody has it.
        self._beginning: _Loader | None = None
        # The loader that returned the last batch.
        self._current: _Loader | None = None
        self._passed: list[_Passed] = []
        # Samples by layout and replicas, on the rank that judges.
        self._epochs: dict[tuple[str, tuple[int, ...]], _Epochs] = defaultdict(_Epochs)

    def install(self, guard: Callable[..., None]) -> None:
        """Watch what data loaders draw."""
        loading: Any = sys.modules["torch.utils.data.dataloader"]
        iterate = loading.DataLoader.__iter__
        draw = loading._BaseDataLoaderIter._next_index  # noqa: SLF001 - there is no public place
        fetch = loading._BaseDataLoaderIter.__next__  # noqa: SLF001

        @wrap(iterate)
        def iterate_watched(loader: Any) -> Any:
            guard(self._begin_epoch, loader)
            iterator = iterate(loader)
            guard(self._bind, iterator)
            return iterator

        @wrap(draw)
        def draw_watched(iterator: Any) -> Any:
            indices = draw(iterator)
            guard(self._draw, iterator, indices)
            return indices

        @wrap(fetch)
        def fetch_watched(iterator: Any) -> Any:
            # After its last batch, the loader is not the one that a later forward pass trains with.
            guard(self._forget_loader)
            batch = fetch(iterator)
            guard(self._fetch, iterator)
            return batch

        loading.DataLoader.__iter__ = iterate_watched
        loading._BaseDataLoaderIter._next_index = draw_watched  # noqa: SLF001
        loading._BaseDataLoaderIter.__next__ = fetch_watched  # noqa: SLF001

    def _begin_epoch(self, loader: Any) -> None:
        if loader not in self._loaders:
            self._loaders[loader] = _Loader(identify_dataset(loader.dataset))
        self._beginning = self._loaders[loader]
        self._beginning.begin_epoch()

    def _bind(self, iterator: Any) -> None:
        self._iterators[iterator] = self._beginning
        self._beginning = None

    def _forget_loader(self) -> None:
        self._current = None

    def _draw(self, iterator: Any, indices: Any) -> None:
        loader = self._iterators.get(iterator, self._beginning)
        # A sampler of a user may return anything; an iterable dataset has no indices.
        if loader is not None and isinstance(indices, (list, tuple)):
            loader.draw(list(indices))

    def _fetch(self, iterator: Any) -> None:
        self._current = self._iterators.get(iterator)

    def see_forward(self, _module: Any, inputs: Sequence[Any]) -> None:
        """Note the digest of the inputs of a forward pass; the loader that returned them trains."""
        if self._current is not None:
            self._current.trains = True
        tensors = list_inputs(inputs)
        if len(self._passed) < _MOST_PASSES and _are_distinctive(tensors):
            digest = hash_digests(digest_all(tensors, threads=1))[:_HASH_BYTES]
            elements = sum(tensor.numel() for tensor in tensors)
            self._passed.append(_Passed(b64encode(digest).decode(), elements))

    def observe(self, _key: str, _layout: Any) -> dict[str, Any] | None:
        """Return the observations since the last step."""
        passed, self._passed = self._passed, []
        observation: dict[str, Any] = {}
        if passed:
            observation["d"] = [inputs.digest for inputs in passed]
            observation["n"] = passed[0].elements
        if self._current is not None:
            observation |= self._current.observe()
        return observation or None

    def judge(self, layout: Any, observations: Mapping[int, Any], _ask: Ask) -> list[Suspicion]:
        """Return SYN401 to SYN403, or SYN406 of tensor-parallel ranks.

        Only data-parallel ranks, which a wrapper states, must see different samples.
        """
        observed = dict(sorted(observations.items()))
        if not layout.clock.reduces:
            return _compare_replicated(observed)
        suspicions = _compare_inputs(observed)
        # Equal batches are common samples too.
        if not suspicions:
            replicas = layout.find_replicas(min(observed))
            suspicions = self._epochs[layout.key, replicas].compare(observed, len(observations))
        return [*suspicions, *_compare_orders(observed)]


def _are_distinctive(tensors: Sequence[Any]) -> bool:
    """Whether inputs are equal on two ranks only if their samples are: no constants, and more than a few elements."""
    # Sparse tensors have no digest.
    if any(tensor.is_sparse for tensor in tensors):
        return False
    return any(map(_varies, tensors))


def _varies(tensor: Any) -> bool:
    """Whether a tensor has unequal elements. A GPU would have to be waited for, so its tensors are taken to vary."""
    if tensor.numel() < _LEAST_ELEMENTS:
        return False
    if tensor.is_cuda:
        return True
    flat = tensor.flatten()
    # Most tensors vary at their start, and the rest of a large one takes time.
    parts = (flat[:_FIRST_ELEMENTS], flat[_FIRST_ELEMENTS:])
    return any(bool((part != flat[0]).any()) for part in parts)


def _compare_inputs(observed: Mapping[int, Mapping[str, Any]]) -> list[Suspicion]:
    """Return SYN401 if ranks trained on equal inputs in this step."""
    suspicions = []
    digests = {rank: tuple(observation["d"]) for rank, observation in observed.items() if "d" in observation}
    for ranks in group_ranks(digests).values():
        if len(ranks) > 1:
            facts = [SameBatch.FACT(ranks=tuple(ranks), elements=observed[ranks[0]]["n"])]
            # Without loaders, or without a watched sample in this step, it is unknown whether targets are equal, too.
            drawn = {observed[rank].get("s", "") for rank in ranks}
            are_drawn = len(drawn) == 1 and "" not in drawn
            if are_drawn:
                facts.append(SameBatch.DRAWN())
            suspicions.append(Suspicion("SYN401", tuple(ranks), tuple(facts), variant="_INPUTS" * (not are_drawn)))
    return suspicions


def observe_replicated(digest: bytes, elements: int, fact: str = "FACT") -> dict[str, Any]:
    """Return the observation of inputs that must be equal on several ranks. fact: the name of its sentence."""
    return {"t": b64encode(digest[:_HASH_BYTES]).decode(), "n": elements, "f": fact}


def _compare_replicated(observed: Mapping[int, Mapping[str, Any]]) -> list[Suspicion]:
    """Return SYN406 if ranks whose inputs must be equal trained on different ones."""
    digests = {rank: observation["t"] for rank, observation in observed.items() if "t" in observation}
    if len(set(digests.values())) < 2:
        return []
    elements = {rank: observed[rank]["n"] for rank in digests}
    sentence = getattr(DifferentBatches, observed[min(digests)]["f"])
    fact = sentence(ranks=tuple(digests), sets=len(set(digests.values())), elements=max(elements.values()))
    return [Suspicion("SYN406", find_minority(digests), (fact,))]


def _compare_orders(observed: Mapping[int, Mapping[str, Any]]) -> list[Suspicion]:
    """Return SYN403 if ranks draw in the order of the epoch before."""
    ranks = tuple(rank for rank, observation in observed.items() if "o" in observation)
    if not ranks:
        return []
    first = observed[ranks[0]]
    fact = RepeatedOrder.FACT(epoch=first["e"], before=first["e"] - 1, count=first["o"])
    return [Suspicion("SYN403", ranks, (fact,))]


class _Epochs:
    """The watched samples of all ranks in the last epochs, on the rank that judges."""

    def __init__(self) -> None:
        # The ranks that drew a sample, by epoch and hash.
        self._drawn: dict[int, dict[str, set[int]]] = {}
        # The ranks that drew a sample twice, and so draw with replacement.
        self._replacing: set[int] = set()

    def compare(self, observed: Mapping[int, Mapping[str, Any]], ranks: int) -> list[Suspicion]:
        """Return SYN402 if ranks drew more common samples than the padding of a sampler explains.

        ranks: the number of data-parallel ranks. A DistributedSampler repeats fewer samples than that.
        """
        epochs: set[int] = set()
        drawing: dict[tuple[int, str], int] = {}
        # Ranks that always draw together share each sample by design, as in context parallelism.
        for rank, observation in observed.items():
            if observation.get("e"):
                drawing.setdefault((observation["e"], observation["s"]), rank)
        for (epoch, samples), rank in drawing.items():
            epochs.add(epoch)
            self._add(rank, epoch, samples)
        suspicions = []
        for epoch in sorted(epochs):
            counts = self._count_common(self._drawn[epoch])
            most = max(counts.values(), default=0)
            if most > max(ranks, 2):
                common = tuple(sorted(counts))
                fact = OverlappingBatches.FACT(ranks=common, count=most, epoch=epoch)
                suspicions.append(Suspicion("SYN402", common, (fact,)))
        # Ranks are at most one epoch apart.
        for epoch in sorted(self._drawn)[:-2]:
            del self._drawn[epoch]
        return suspicions

    def _add(self, rank: int, epoch: int, samples: str) -> None:
        drawn = self._drawn.setdefault(epoch, {})
        width = len(b64encode(bytes(_HASH_BYTES)))
        for position in range(0, len(samples), width):
            sample = samples[position : position + width]
            ranks = drawn.setdefault(sample, set())
            if rank in ranks:
                self._replacing.add(rank)
            ranks.add(rank)

    def _count_common(self, drawn: Mapping[str, set[int]]) -> dict[int, int]:
        """Return how many watched samples each rank shares with another rank."""
        counts: dict[int, int] = defaultdict(int)
        for ranks in drawn.values():
            sharing = ranks - self._replacing
            if len(sharing) > 1:
                for rank in sharing:
                    counts[rank] += 1
        return dict(counts)
