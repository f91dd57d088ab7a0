"""Ranks on the same node agree, and ranks on different nodes do not.

Signature: in every differing tensor, the ranks of one host hold the same bytes, and at least two hosts with two or more
ranks each hold different bytes. Hosts come from the metadata or from folder names (node0). Running statistics may also
differ between all ranks, as they do under plain DDP.

Without hosts, blocks of neighbouring ranks of equal size, which agree in every trained tensor, are consistent with it.
The finding is never more than "consistent": all ranks of a node may have clipped, skipped a step or loaded other
weights. It does not match if the first moments of the nodes have one direction.

If a faulty rank is alone on its host, it looks the same, and this rule does not match. The same holds if the ranks of a
host have no tensor in common, as with HSDP and one replica per host.

Cause: gradients are reduced, or the initial model is broadcast, within each node only. A process group of the node was
used instead of the group of all ranks; the replicate dimension of an HSDP mesh was dropped; the link between the nodes
failed during a collective; or each node read another file.

Fix: reduce over all ranks. DDP does so with `process_group=None`. Check that a mesh includes the dimension across the
nodes: `init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("replicate", "shard"))`.

Incidents: NVIDIA-NeMo/Automodel#3135 (the replicate group was dropped), pytorch/pytorch#178569 (only buffers: they
remained uninitialized on all nodes except the source), pytorch/pytorch#108331.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.history import suspects
from syncheck.diagnose.measures import agrees_within
from syncheck.diagnose.moments import mean_cosine
from syncheck.diagnose.statements import largest_difference, limit_facts
from syncheck.messages import Message, Sentence
from syncheck.records import sets_within
from syncheck.tensors.kinds import BN_STATISTICS
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import TensorDiff

CODE = "SYN230"
SLUG = "differs-by-node"
SEVERITY = "error"
CERTAINTY = "consistent"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "Gradients are reduced, or the initial model is broadcast, within each node only."
    FIX = (
        "Reduce over all ranks: DistributedDataParallel(model, `process_group=None`), or a mesh with a dimension "
        'across the nodes: `init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("replicate", "shard"))`. Then '
        "restart from a checkpoint in which the ranks agree."
    )
    FIX_SHARDED = (
        'Give `fully_shard` a mesh with a dimension across the nodes, `init_device_mesh("cuda", (nodes, per_node), '
        'mesh_dim_names=("replicate", "shard"))`, and not only its dimension of shards. Keep '
        "`model.set_requires_all_reduce(True)` for the last micro-batch of each step."
    )
    NODES_DIFFER = "Ranks on the same node agree, but the nodes differ: {nodes:list}"
    BLOCKS_DIFFER = "The ranks agree within the blocks {blocks:sets}, and the blocks differ"
    HOSTS_UNKNOWN = "the hosts of the ranks are unknown"
    NODE = "{host:name} ({ranks:ranks})"
    MORE_NODES = "{count} more"
    TENSORS = (
        "{count:count tensor} {count:verb differs|differ} between nodes, {parameters:count parameter} among them, "
        "{size}"
    )
    STATISTICS_TOO = "{count:count running statistic} {count:verb differs|differ} too, because the weights differ"


# Cosine of first moments of ranks whose gradients were averaged, and scaled or clipped afterwards.
ALIKE = 0.97
_MOST = 4  # listed hosts


def apply(case: Case) -> Match | None:
    """Match if hosts explain which ranks agree in all differing tensors. Running statistics may differ otherwise."""
    hosts = {replica.rank: replica.host for replica in case.group.replicas}
    if None in hosts.values():
        return _match_blocks(case)
    if len(set(hosts.values())) < 2:
        return None
    differing = [diff for diff in case.tensors if diff.status == "different"]
    explained = [diff for diff in differing if diff.kind not in BN_STATISTICS]
    statistics = [diff for diff in differing if diff.kind in BN_STATISTICS]
    if not explained:
        explained, statistics = statistics, []
    if not explained or not all(agrees_within(diff, hosts) for diff in explained):
        return None
    if not any(_two_nodes_differ(diff, hosts) for diff in explained):
        return None
    # Gradients with one direction were averaged over all nodes, and another rule names what changed them.
    cosine = mean_cosine(case.differing_moments().values())
    if cosine is not None and cosine >= ALIKE:
        return None
    ranks = suspects(explained, case.group)
    match = Match((*explained, *statistics), ranks, _facts(explained, statistics, hosts))
    # All ranks of a node may have skipped a step, loaded other weights or changed their gradients alike.
    return replace(match, certainty="consistent", alternatives=("SYN213", "SYN211", "SYN214"))


def _match_blocks(case: Case) -> Match | None:
    """Match blocks of neighbouring ranks of one size that agree in every trained tensor, if the hosts are unknown."""
    explained = case.differing("parameter", "optimizer", "optimizer_step", "ema")
    blocks = {diff.clusters for diff in explained}
    if len(blocks) != 1 or not case.differing("parameter"):
        return None
    (sets,) = blocks
    size = len(sets[0])
    ordered = sorted(sets)
    is_even = size > 1 and len(sets) > 1 and all(len(ranks) == size for ranks in sets)
    if not is_even or any(ranks[-1] - ranks[0] != size - 1 for ranks in ordered):
        return None
    statistics = case.differing(*BN_STATISTICS)
    parameters = sum(diff.kind == "parameter" for diff in explained)
    facts = [
        Text.BLOCKS_DIFFER(blocks=tuple(ordered)),
        Text.TENSORS(count=len(explained), parameters=parameters, size=largest_difference(explained)),
        Text.HOSTS_UNKNOWN(),
    ]
    match = Match((*explained, *statistics), case.group.ranks, facts)
    return replace(match, certainty="consistent", alternatives=("SYN211", "SYN213"))


def _two_nodes_differ(diff: TensorDiff, hosts: Mapping[int, str | None]) -> bool:
    """Whether two different sets include a host with at least two ranks, so a single faulty rank cannot explain it."""
    for sets in sets_within(diff):
        nodes = 0
        for ranks in sets:
            of_ranks = [hosts[rank] for rank in ranks]
            nodes += any(of_ranks.count(host) > 1 for host in of_ranks)
        if nodes > 1:
            return True
    return False


def _facts(
    explained: Sequence[TensorDiff], statistics: Sequence[TensorDiff], hosts: Mapping[int, str | None]
) -> tuple[Message, ...]:
    members = group_ranks(dict(sorted(hosts.items()))).items()
    nodes = limit_facts([Text.NODE(host=h, ranks=tuple(ranks)) for h, ranks in members], _MOST, Text.MORE_NODES)
    parameters = sum(diff.kind == "parameter" for diff in explained)
    facts = [
        Text.NODES_DIFFER(nodes=tuple(nodes)),
        Text.TENSORS(count=len(explained), parameters=parameters, size=largest_difference(explained)),
    ]
    if statistics:
        facts.append(Text.STATISTICS_TOO(count=len(statistics)))
    return tuple(facts)
