"""Ranks of one machine agree, those of different machines do not.

Signature: in every tensor that differs, the ranks of one host hold the same bytes, and at least two hosts with two
ranks or more each hold different ones. The hosts are those that the metadata names, or folders such as node0. Running
statistics may differ between all ranks beside that, as they do under plain DDP.

One rank that went wrong looks the same where it is alone on its host: then this rule stays silent. So it does where
the ranks of a host have no tensor in common, as with HSDP over a host each: "equal within it" says nothing then.

Cause: gradients, or the initial model, are reduced or broadcast within each node only. A process group of the node
was given where that of all ranks belongs; the replicate dimension of an HSDP mesh was lost on the way; the link
between the nodes failed for a collective; a file or a path is another one on each node.

Fix: reduce over all ranks. DDP takes `process_group=None` for that; of a mesh, check that the dimension across the
nodes is in it: `init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("replicate", "shard"))`.

Incidents: NVIDIA-NeMo/Automodel#3135 (the replicate group was dropped), pytorch/pytorch#178569 (only buffers: they
stayed garbage on the nodes that are not the source), pytorch/pytorch#108331.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, counted, gap_text, ranks_by
from syncheck.diagnose.places import divided_by
from syncheck.evidence.suspects import sets_within, suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN230"
SLUG = "differs-by-node"
SEVERITY: Severity = "error"
CAUSE = "Gradients, or the initial model, are shared within each node only: ranks of one node agree, nodes do not."
FIX = (
    "Reduce over all ranks: DistributedDataParallel(model, process_group=None), or a mesh with the dimension across "
    'nodes: init_device_mesh("cuda", (nodes, per_node), mesh_dim_names=("replicate", "shard")).'
)
_MOST = 4  # hosts that are named


def apply(case: Case) -> Match | None:
    """Fit where hosts explain who agrees with whom in all that differs; cover also the statistics that follow."""
    hosts = {replica.rank: replica.host for replica in case.group.replicas}
    if None in hosts.values() or len(set(hosts.values())) < 2:
        return None
    apart = [diff for diff in case.tensors if diff.status == "different"]
    told = [diff for diff in apart if diff.kind not in BN_STATISTICS]
    statistics = [diff for diff in apart if diff.kind in BN_STATISTICS]
    if not told:
        told, statistics = statistics, []
    if not told or not all(divided_by(diff, hosts) for diff in told):
        return None
    if not any(_two_nodes(diff, hosts) for diff in told):
        return None
    return Match((*told, *statistics), suspects(told, case.group), _text(told, statistics, hosts))


def _two_nodes(diff: TensorDiff, hosts: Mapping[int, str | None]) -> bool:
    """Whether two different sets have a host with two ranks or more each: one rank alone cannot explain that."""
    for found in sets_within(diff):
        pairs = 0
        for ranks in found:
            on = [hosts[rank] for rank in ranks]
            pairs += any(on.count(host) > 1 for host in on)
        if pairs > 1:
            return True
    return False


def _text(told: Sequence[TensorDiff], statistics: Sequence[TensorDiff], hosts: Mapping[int, str | None]) -> str:
    members = ranks_by(dict(sorted(hosts.items())))
    parameters = sum(diff.kind == "parameter" for diff in told)
    places = [f"{host} ({ranks_text(ranks)})" for host, ranks in list(members.items())[:_MOST]]
    more = f" and {len(members) - _MOST} more nodes" if len(members) > _MOST else ""
    text = (
        f"{counted(len(told), 'tensor')} ({counted(parameters, 'parameter')}) equal within each node and not across "
        f"nodes, {gap_text(told)}; nodes: {', '.join(places)}{more}"
    )
    if statistics:
        text += f"; {counted(len(statistics), 'running statistic')} differ too, as they do where weights differ"
    return text
