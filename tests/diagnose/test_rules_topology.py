"""Differences by host (SYN230) and along the tensor-parallel dimension (SYN231)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from checkpoints import save_pth
from dtensors import dtensor, mesh_of_2_6
from groups import facts_of
from test_rules import MEAN, diff, found, group

import syncheck
from syncheck.diagnose import syn230_differs_by_node as syn230
from syncheck.diagnose import syn231_tensor_parallel_replicated as syn231
from syncheck.diagnose.case import Common
from syncheck.records import TensorDiff
from syncheck.tensor_parallel import find_replicated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from syncheck.records import Group

HALVES = ((0, 1), (2, 3))
WEIGHT = diff("fc.weight", "parameter", HALVES)
MOMENT = diff("optimizer.fc.weight.exp_avg", "optimizer", HALVES, max_abs=0.25)
DIGEST = {"mismatched": None, "max_abs": None, "index": None, "extent": None, "reason": "digest"}


def on_hosts(hosts: Sequence[str | None], *tensors: TensorDiff, **fields: Any) -> Group:
    """Return a group whose ranks are on these hosts."""
    made = group(*tensors, ranks=len(hosts), **fields)
    return replace(made, replicas=tuple(replace(r, host=h) for r, h in zip(made.replicas, hosts, strict=True)))


def in_mesh(meshes: Sequence[Mapping[str, int]], *tensors: TensorDiff) -> Group:
    """Return a group whose ranks have these mesh coordinates."""
    made = group(*tensors, ranks=len(meshes))
    return replace(made, replicas=tuple(replace(r, mesh=m) for r, m in zip(made.replicas, meshes, strict=True)))


def test_230() -> None:
    """Parameters and moments that are equal within each host and differ between hosts are SYN230."""
    fitted = found(on_hosts("aabb", WEIGHT, MOMENT))
    assert set(fitted) == {"SYN230"}
    assert fitted["SYN230"].ranks == (0, 1, 2, 3)
    node, size = syn230.Text.NODE, Common.LARGEST(difference=0.5, element="fc.weight[1]")
    assert fitted["SYN230"].facts == (
        syn230.Text.NODES_DIFFER(nodes=(node(host="a", ranks=(0, 1)), node(host="b", ranks=(2, 3)))),
        syn230.Text.TENSORS(count=2, parameters=1, size=size),
    )


def test_230_suspects_the_node_outside_the_majority() -> None:
    """Of three nodes, the node that differs from the other two is the suspect."""
    odd = diff("fc.weight", "parameter", ((0, 1, 4, 5), (2, 3)))
    assert found(on_hosts("aabbcc", odd))["SYN230"].ranks == (2, 3)


def test_230_covers_running_statistics() -> None:
    """Running statistics that differ between all ranks do not exclude SYN230, and are covered by it."""
    local = diff("bn.running_mean", "bn_mean", ((0,), (1,), (2,), (3,)))
    fitted = found(on_hosts("aabb", WEIGHT, local))
    assert set(fitted) == {"SYN230"}
    assert set(fitted["SYN230"].tensors) == {"fc.weight", "bn.running_mean"}
    assert facts_of(fitted["SYN230"])[syn230.Text.STATISTICS_TOO] == {"count": 1}


def test_230_compares_no_tensor_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics and weights are separated by kind, because comparing thousands of tensors in pairs took a minute."""
    local = diff("bn.running_mean", "bn_mean", ((0,), (1,), (2,), (3,)))
    monkeypatch.setattr(TensorDiff, "__eq__", lambda *_: pytest.fail("a tensor was compared with another one"))
    assert set(found(on_hosts("aabb", WEIGHT, MOMENT, local))["SYN230"].tensors) >= {"fc.weight", "bn.running_mean"}


def test_230_of_digests() -> None:
    """Digests suffice to identify the node, and the evidence claims no size."""
    fitted = found(on_hosts("aabb", diff("fc.weight", "parameter", HALVES, **DIGEST)))
    assert set(fitted) == {"SYN230"}
    assert facts_of(fitted["SYN230"])[syn230.Text.TENSORS]["size"] == Common.SIZE_UNKNOWN()


@pytest.mark.parametrize(
    ("hosts", "clusters"),
    [
        ("aaaa", HALVES),  # one machine
        ("abab", HALVES),  # the sets are across the hosts
        ("aabb", ((0, 1, 2), (3,))),  # one rank of a host
        ("aab", ((0, 1), (2,))),  # the only rank of its host: one rank explains it as well
        ("ab", ((0,), (1,))),
        ((None, None, "b", "b"), HALVES),  # not all are known
    ],
)
def test_not_230(hosts: Any, clusters: Any) -> None:
    """SYN230 needs two hosts with two ranks each that explain every set of ranks."""
    assert "SYN230" not in found(on_hosts(hosts, diff("fc.weight", "parameter", clusters)))


def test_not_230_if_one_tensor_differs_within_a_host() -> None:
    """A parameter that differs within a host is another fault."""
    within = diff("fc.bias", "parameter", ((0, 1, 2), (3,)))
    assert "SYN230" not in found(on_hosts("aabb", WEIGHT, within))


def test_not_230_if_each_host_is_a_replica() -> None:
    """With HSDP and one replica per host, no two ranks of a host hold the same shard, so nothing shows agreement."""
    sharded = diff("fc.weight", "parameter", ((0,), (2,), (1,), (3,)), replica_groups=((0, 2), (1, 3)))
    assert "SYN230" not in found(on_hosts("aabb", sharded))


def test_folders_are_hosts_without_metadata(tmp_path: Path) -> None:
    """Files in node0 and node1 belong to two hosts, and a difference between them is SYN230."""
    for rank in range(4):
        folder = tmp_path / f"node{rank // 2}"
        folder.mkdir(exist_ok=True)
        save_pth(folder / f"rank{rank}.pth", {"w": np.arange(8, dtype=np.float32) * (1 + rank // 2)})
    (found_group,) = syncheck.compare(tmp_path).groups
    assert [replica.host for replica in found_group.replicas] == ["node0", "node0", "node1", "node1"]
    assert [finding.code for finding in found_group.findings] == ["SYN230"]


TWO_BY_TWO = [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)]
ALONG_TP = ((0, 2), (1, 3))
NORM = diff("layers.0.input_layernorm.weight", "parameter", ALONG_TP)


def test_evidence_lists_few_of_many_replica_groups() -> None:
    """If 512 shards of a weight differ between two ranks each, the text of the evidence stays short."""
    pairs = tuple((rank, rank + 512) for rank in range(512))
    weight = replace(diff("fc.weight", "parameter", tuple((rank,) for rank in range(1024))), replica_groups=pairs)
    (fitted,) = found(group(weight, ranks=1024)).values()
    assert facts_of(fitted)[Common.WITHIN_GROUPS] == {"groups": pairs, "ranks": tuple(range(1024))}
    assert len(fitted.evidence) < 500


def test_231() -> None:
    """A norm that is equal along dp and differs along tp is SYN231, and so is its optimizer state."""
    moment = diff("optimizer.layers.0.input_layernorm.weight.exp_avg", "optimizer", ALONG_TP, max_abs=0.1)
    fitted = found(in_mesh(TWO_BY_TWO, NORM, moment))
    assert set(fitted) == {"SYN231"}
    assert fitted["SYN231"].ranks == (0, 1, 2, 3)
    facts = facts_of(fitted["SYN231"])
    assert facts[syn231.Text.RANKS_DIFFER]["count"] == 2
    assert facts[syn231.Text.COORDINATES_AGREE] == {"groups": ((0, 2), (1, 3))}


def test_231_with_one_rank_per_coordinate() -> None:
    """With one rank per coordinate the odd rank is the suspect; digests suffice."""
    odd = diff("ln_f.weight", "parameter", ((0, 1, 3), (2,)), **DIGEST)
    assert found(in_mesh([{"tp": rank} for rank in range(4)], odd))["SYN231"].ranks == (2,)


def test_not_231_along_other_dimensions() -> None:
    """A difference along dp, of a single rank, or of ranks without coordinates is another fault."""
    along_dp = diff("ln_f.weight", "parameter", ((0, 1), (2, 3)))
    one = diff("ln_f.bias", "parameter", ((0, 1, 2), (3,)))
    assert "SYN231" not in found(in_mesh(TWO_BY_TWO, along_dp, one))
    assert "SYN231" not in found(in_mesh([{}, *TWO_BY_TWO[1:]], NORM))
    assert "SYN231" not in found(in_mesh([{"pp": rank % 2} for rank in range(4)], NORM))


def test_231_covers_only_replicated_tensors() -> None:
    """A weight that differs on one rank, and running statistics, are left to other rules."""
    other = diff("fc.weight", "parameter", ((0, 1, 2), (3,)))
    fitted = found(in_mesh(TWO_BY_TWO, NORM, other, replace(MEAN, clusters=ALONG_TP)))
    assert fitted["SYN231"].tensors == ("layers.0.input_layernorm.weight",)
    assert {"fc.weight", "bn.running_mean"} <= set(fitted["SYN299"].tensors)


REPLICATED = """
layers.0.input_layernorm.weight layers.0.post_attention_layernorm.bias model.norm.weight transformer.ln_f.weight
h.3.ln_1.weight layers.1.attention_norm.weight layers.1.ffn_norm.weight encoder.final_layernorm.weight
decoder.layers.0.self_attention.linear_qkv.layer_norm_weight decoder.layers.0.mlp.linear_fc1.layer_norm_bias
decoder.layers.0.mlp.router.weight decoder.layers.0.mlp.router.expert_bias layers.0.moe.router.gate.weight
layers.0.block_sparse_moe.gate.weight layers.0.self_attention.dense.bias layers.0.mlp.dense_4h_to_h.bias
layers.0.self_attn.o_proj.bias decoder.layers.0.self_attention.linear_proj.bias decoder.layers.0.mlp.linear_fc2.bias
optimizer.layers.0.input_layernorm.weight.exp_avg word_embeddings.norm.weight layers.0.pre_mlp_layernorm.weight
""".split()
PERHAPS_SHARDED = """
layers.0.self_attn.q_norm.weight layers.0.self_attention.k_layernorm.weight layers.0.mixer.norm.weight
layers.0.self_attn.q_proj.bias layers.0.mlp.up_proj.bias layers.0.mlp.gate_proj.weight layers.0.mlp.gate.weight
layers.0.self_attn.norm.weight layers.0.mlp.norm.weight layers.0.linear_attn.norm.weight bn1.weight
layers.9.mlp.experts.0.linear_fc2.bias layers.0.intermediate.dense.bias layers.0.self_attention.query_key_value.bias
layers.0.mlp.dense_h_to_4h.bias layers.0.self_attn.o_proj.weight layers.0.batch_norm.weight layers.0.group_norm.weight
layers.0.block_sparse_moe.experts.0.w1.weight layers.0.self_attn.o_proj.lora_A.weight norm lm_head.weight
""".split()


def test_names_of_replicated_tensors() -> None:
    """Norms, routers and biases of row-parallel layers are replicated by name; tensors that may be sharded are not."""
    assert find_replicated([*REPLICATED, *PERHAPS_SHARDED]) == set(REPLICATED)


def saved(folder: Path, tensors: Mapping[int, Mapping[str, Any]], meshes: Sequence[Mapping[str, int]]) -> Group:
    """Compare files of ranks with these mesh coordinates."""
    for rank, content in tensors.items():
        block = syncheck.metadata(run="tp", run_id="1", rank=rank, world_size=len(tensors), mesh=dict(meshes[rank]))
        save_pth(folder / f"m_rank{rank}.pth", {"model": dict(content), "syncheck": block})
    (found_group,) = syncheck.compare(folder).groups
    return found_group


def parts(rank: int, norm: float = 1.0, size: int = 3) -> dict[str, Any]:
    """Return a rank's norm, and its shard of a column-parallel layer."""
    column = np.full(4, rank % 2, np.float32)
    return {"l.0.input_layernorm.weight": np.full(size, norm, np.float32), "l.0.mlp.up_proj.bias": column}


def test_files_are_compared_across_tensor_parallel_ranks(tmp_path: Path) -> None:
    """Shards that differ by design are in sync, and a norm that differs along tp is SYN231."""
    good = saved(tmp_path, {rank: parts(rank) for rank in range(4)}, TWO_BY_TWO)
    assert (good.verdict, [finding.code for finding in good.findings]) == ("in_sync", ["SYN104"])
    bad = saved(tmp_path, {rank: parts(rank, 1 + rank % 2) for rank in range(4)}, TWO_BY_TWO)
    (finding,) = (finding for finding in bad.findings if finding.fails)
    assert (finding.code, finding.tensors) == ("SYN231", ("l.0.input_layernorm.weight",))


def test_different_shapes_are_shards(tmp_path: Path) -> None:
    """A norm with different shapes on tensor-parallel ranks is sharded, whatever its name, and no mismatch."""
    found_group = saved(tmp_path, {rank: parts(rank, size=3 + rank % 2) for rank in range(4)}, TWO_BY_TWO)
    assert found_group.verdict == "in_sync"


def test_pipeline_stages_are_compared_separately(tmp_path: Path) -> None:
    """Norms with the same name in two stages are different tensors, each compared within its stage."""
    meshes = [{"pp": rank // 2, "tp": rank % 2} for rank in range(4)]
    good = saved(tmp_path, {rank: parts(rank, rank // 2) for rank in range(4)}, meshes)
    assert good.verdict == "in_sync"
    bad = saved(tmp_path, {rank: parts(rank, 5 if rank == 3 else rank // 2) for rank in range(4)}, meshes)
    (finding,) = (finding for finding in bad.findings if finding.fails)
    assert (finding.code, finding.ranks) == ("SYN231", (2, 3))


def test_replicated_dtensors(tmp_path: Path) -> None:
    """A DTensor that is replicated over a mesh named tp needs no known name, and its mesh gives the coordinates."""
    for rank in range(2):
        mesh = mesh_of_2_6([0, 1], [rank], ("tp",))
        whole, shard = np.full((8, 3), rank, np.float32), np.full((4, 3), rank, np.float32)
        save_pth(
            tmp_path / f"m_rank{rank}.pth", {"odd": dtensor(whole, ["R"], mesh), "w": dtensor(shard, ["S(0)"], mesh)}
        )
    (found_group,) = syncheck.compare(tmp_path).groups
    assert [replica.mesh for replica in found_group.replicas] == [{"tp": 0}, {"tp": 1}]
    (finding,) = (finding for finding in found_group.findings if finding.fails)
    assert (finding.code, finding.tensors) == ("SYN231", ("odd",))
