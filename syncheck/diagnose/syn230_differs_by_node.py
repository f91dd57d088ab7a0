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

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import state_if
from syncheck.diagnose.features import agreeing_within
from syncheck.diagnose.history import suspects
from syncheck.diagnose.measures import is_at_least
from syncheck.diagnose.moments import mean_cosine
from syncheck.diagnose.selection import count_kinds, exclude_kinds, select_kinds, with_status
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


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "Gradients are reduced, or the initial model is broadcast, within each node only."
    FIX = (
        "Reduce over all ranks: `DistributedDataParallel(model, process_group=None)`, or a mesh with a dimension "
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
    hosts: dict[int, str | None] = {}
    for replica in case.group.replicas:
        hosts[replica.rank] = replica.host
    # Without the names of the hosts, blocks of neighbouring ranks may be the nodes.
    if None in hosts.values():
        return _match_blocks(case)

    differing = with_status(case.tensors, "different")
    statistics = select_kinds(differing, *BN_STATISTICS)
    explained = exclude_kinds(differing, *BN_STATISTICS)
    # Statistics differ between all ranks, unless nothing else differs.
    if not explained:
        explained, statistics = statistics, []
    if not _explain(hosts, explained):
        return None
    # Gradients with one direction were averaged over all nodes, and another rule names what changed them.
    cosine = mean_cosine(case.differing_moments().values())
    if is_at_least(cosine, ALIKE):
        return None

    facts = [
        _describe_nodes(hosts),
        _describe_tensors(explained),
        *state_if(statistics, Text.STATISTICS_TOO(count=len(statistics))),
    ]
    match = Match((*explained, *statistics), suspects(explained, case.group), facts)
    # All ranks of a node may have skipped a step, loaded other weights or changed their gradients alike.
    return match.as_consistent("SYN213", "SYN211", "SYN214")


def _explain(hosts: Mapping[int, str | None], explained: Sequence[TensorDiff]) -> bool:
    """Whether the ranks of each host agree in all tensors, and at least two whole hosts differ."""
    agree_on_hosts = len(agreeing_within(explained, hosts)) == len(explained)
    return agree_on_hosts and any(_two_nodes_differ(diff, hosts) for diff in explained)


def _match_blocks(case: Case) -> Match | None:
    """Match blocks of neighbouring ranks of one size that agree in every trained tensor, if the hosts are unknown."""
    explained = case.differing("parameter", "optimizer", "optimizer_step", "ema")
    clusters_of_tensors = {diff.clusters for diff in explained}
    is_one_division = len(clusters_of_tensors) == 1
    if not is_one_division or not case.differing("parameter"):
        return None
    (clusters,) = clusters_of_tensors
    if not _are_blocks(clusters):
        return None

    facts = [
        Text.BLOCKS_DIFFER(blocks=tuple(sorted(clusters))),
        _describe_tensors(explained),
        Text.HOSTS_UNKNOWN(),
    ]
    statistics = case.differing(*BN_STATISTICS)
    match = Match((*explained, *statistics), case.group.ranks, facts)
    return match.as_consistent("SYN211", "SYN213")


def _are_blocks(clusters: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks agree in several equally large blocks of neighbouring ranks."""
    # The ranks of a cluster are in order.
    size = len(clusters[0])
    blocks = [tuple(range(ranks[0], ranks[0] + size)) for ranks in clusters]
    return min(size, len(clusters)) > 1 and blocks == list(clusters)


def _two_nodes_differ(diff: TensorDiff, hosts: Mapping[int, str | None]) -> bool:
    """Whether two different sets include a host with at least two ranks, so a single faulty rank cannot explain it."""
    for clusters in sets_within(diff):
        whole_nodes = [ranks for ranks in clusters if _includes_node(ranks, hosts)]
        if len(whole_nodes) > 1:
            return True
    return False


def _includes_node(ranks: Sequence[int], hosts: Mapping[int, str | None]) -> bool:
    """Whether at least two of the ranks run on one host."""
    hosts_of_ranks = [hosts[rank] for rank in ranks]
    return len(set(hosts_of_ranks)) < len(hosts_of_ranks)


def _describe_nodes(hosts: Mapping[int, str | None]) -> Message:
    """State that the hosts differ, and the ranks of the first hosts."""
    nodes = []
    for host, ranks in group_ranks(dict(sorted(hosts.items()))).items():
        nodes.append(Text.NODE(host=host, ranks=tuple(ranks)))
    return Text.NODES_DIFFER(nodes=tuple(limit_facts(nodes, _MOST, Text.MORE_NODES)))


def _describe_tensors(explained: Sequence[TensorDiff]) -> Message:
    """State how many tensors and parameters differ, and by how much."""
    return Text.TENSORS(
        count=len(explained),
        parameters=count_kinds(explained, "parameter"),
        size=largest_difference(explained),
    )
