"""Differences by host (SYN230) and along the tensor-parallel dimension (SYN231)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.cases import DIGEST, diagnose_case, diff, group
from support.checkpoints import save_pth
from support.dtensors import dtensor, mesh_of_2_6
from support.groups import facts_of
from support.listings import get_failing, list_codes, list_fields, list_names

import syncheck
from syncheck.diagnose import syn230_differs_by_node as syn230
from syncheck.diagnose import syn231_tensor_parallel_replicated as syn231
from syncheck.diagnose.statements import Common
from syncheck.layout.replicated_names import find_replicated
from syncheck.records import TensorDiff

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from syncheck.records import Group

HALVES = ((0, 1), (2, 3))
ONE = ((0, 1, 2), (3,))
WEIGHT = diff("fc.weight", "parameter", HALVES)
MOMENT = diff("optimizer.fc.weight.exp_avg", "optimizer", HALVES, max_abs=0.25)
LOCAL = diff("bn.running_mean", "bn_mean", ((0,), (1,), (2,), (3,)))


def group_with_field(field: str, values: Sequence[Any], *tensors: TensorDiff) -> Group:
    """Return a group with one replica per value. field: host or mesh."""
    created = group(*tensors, ranks=len(values))
    replicas = zip(created.replicas, values, strict=True)
    return replace(created, replicas=tuple(replace(replica, **{field: value}) for replica, value in replicas))


def group_on_hosts(hosts: Sequence[str | None], *tensors: TensorDiff) -> Group:
    """Return a group with one replica per host name."""
    return group_with_field("host", hosts, *tensors)


def test_230() -> None:
    """Parameters and moments that are equal within each host and differ between hosts are SYN230."""
    fitted = diagnose_case(group_on_hosts("aabb", WEIGHT, MOMENT))
    assert set(fitted) == {"SYN230"}
    assert fitted["SYN230"].ranks == (0, 1, 2, 3)
    node, size = syn230.Text.NODE, Common.LARGEST(difference=0.5, element="fc.weight[1]")
    assert fitted["SYN230"].facts == (
        syn230.Text.NODES_DIFFER(nodes=(node(host="a", ranks=(0, 1)), node(host="b", ranks=(2, 3)))),
        syn230.Text.TENSORS(count=2, parameters=1, size=size),
    )
    digests = diagnose_case(group_on_hosts("aabb", diff("fc.weight", "parameter", HALVES, **DIGEST)))
    assert facts_of(digests["SYN230"])[syn230.Text.TENSORS]["size"] == Common.SIZE_UNKNOWN()
    outlier = diff("fc.weight", "parameter", ((0, 1, 4, 5), (2, 3)))
    assert diagnose_case(group_on_hosts("aabbcc", outlier))["SYN230"].ranks == (2, 3)  # the node outside the majority


def test_230_covers_running_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """SYN230 covers running statistics with differences between all ranks, and compares no tensors in pairs."""
    monkeypatch.setattr(TensorDiff, "__eq__", lambda *_: pytest.fail("a tensor was compared with another one"))
    fitted = diagnose_case(group_on_hosts("aabb", WEIGHT, LOCAL))
    assert set(fitted) == {"SYN230"}
    assert set(fitted["SYN230"].tensors) == {WEIGHT.name, LOCAL.name}
    assert facts_of(fitted["SYN230"])[syn230.Text.STATISTICS_TOO] == {"count": 1}


def test_230_without_hosts() -> None:
    """Blocks of neighbouring ranks are consistent with nodes, if the hosts are unknown."""
    unknown = (None, None, "b", "b")
    fitted = diagnose_case(group_on_hosts(unknown, WEIGHT))
    assert (fitted["SYN230"].certainty, fitted["SYN230"].alternatives) == ("consistent", ("SYN211", "SYN213"))
    mixed = diff("fc.weight", "parameter", ((0, 2), (1, 3)))
    for tensors in ([mixed], [diff("fc.weight", "parameter", ONE)], [WEIGHT, diff("fc.bias", "parameter", ONE)]):
        assert "SYN230" not in diagnose_case(group_on_hosts(unknown, *tensors))


SHARDED = diff("fc.weight", "parameter", ((0,), (2,), (1,), (3,)), replica_groups=((0, 2), (1, 3)))


@pytest.mark.parametrize(
    ("hosts", "tensors"),
    [
        ("aaaa", [WEIGHT]),
        ("abab", [WEIGHT]),  # the sets of ranks are not the hosts
        ("aabb", [diff("fc.weight", "parameter", ONE)]),  # one rank of a host
        ("aab", [diff("fc.weight", "parameter", ((0, 1), (2,)))]),  # the only rank of its host
        ("ab", [diff("fc.weight", "parameter")]),
        ("aabb", [WEIGHT, diff("fc.bias", "parameter", ONE)]),  # a second parameter differs within a host
        ("aabb", [SHARDED]),  # HSDP with one replica per host: no two ranks of a host hold the same shard
    ],
)
def test_not_230(hosts: Any, tensors: list[TensorDiff]) -> None:
    """SYN230 requires two hosts with two equal ranks each, and no differences within a host."""
    assert "SYN230" not in diagnose_case(group_on_hosts(hosts, *tensors))


def test_folders_are_hosts_without_metadata(tmp_path: Path) -> None:
    """Without metadata, files in node0 and node1 belong to two hosts, and a difference between the hosts is SYN230."""
    for rank in range(4):
        folder = tmp_path / f"node{rank // 2}"
        folder.mkdir(exist_ok=True)
        save_pth(folder / f"rank{rank}.pth", {"w": np.arange(8, dtype=np.float32) * (1 + rank // 2)})
    (compared,) = syncheck.compare(tmp_path).groups
    assert list_fields(compared.replicas, "host") == ["node0", "node0", "node1", "node1"]
    assert list_codes(compared.findings) == ["SYN230"]


TWO_BY_TWO = [{"dp": rank // 2, "tp": rank % 2} for rank in range(4)]
ALONG_TP = ((0, 2), (1, 3))
NORM = diff("layers.0.input_layernorm.weight", "parameter", ALONG_TP)


def test_evidence_lists_few_of_many_replica_groups() -> None:
    """If 512 shards of a weight differ between two ranks each, the text of the evidence stays short."""
    pairs = tuple((rank, rank + 512) for rank in range(512))
    weight = replace(diff("fc.weight", "parameter", tuple((rank,) for rank in range(1024))), replica_groups=pairs)
    (fitted,) = diagnose_case(group(weight, ranks=1024)).values()
    assert facts_of(fitted)[Common.WITHIN_GROUPS] == {"groups": pairs, "ranks": tuple(range(1024))}
    assert len(fitted.evidence) < 500


NORM_MOMENT = diff("optimizer.layers.0.input_layernorm.weight.exp_avg", "optimizer", ALONG_TP, max_abs=0.1)


def test_231() -> None:
    """A norm and its optimizer state, equal along dp and different along tp, are SYN231."""
    fitted = diagnose_case(group_with_field("mesh", TWO_BY_TWO, NORM, NORM_MOMENT))
    assert set(fitted) == {"SYN231"}
    assert fitted["SYN231"].ranks == (0, 1, 2, 3)
    facts = facts_of(fitted["SYN231"])
    assert facts[syn231.Text.RANKS_DIFFER]["count"] == 2
    assert facts[syn231.Text.COORDINATES_AGREE] == {"groups": ((0, 2), (1, 3))}
    # With one rank per coordinate the odd rank is the suspect; digests suffice.
    outlier = diff("ln_f.weight", "parameter", ((0, 1, 3), (2,)), **DIGEST)
    assert diagnose_case(group_with_field("mesh", [{"tp": rank} for rank in range(4)], outlier))["SYN231"].ranks == (2,)


@pytest.mark.parametrize(
    ("meshes", "tensors"),
    [
        (TWO_BY_TWO, [diff("ln_f.weight", "parameter", HALVES), diff("ln_f.bias", "parameter", ONE)]),
        ([{}, *TWO_BY_TWO[1:]], [NORM]),
        ([{"pp": rank % 2} for rank in range(4)], [NORM]),
    ],
    ids=["along dp and one rank", "no coordinates", "pipeline stages"],
)
def test_not_231(meshes: Any, tensors: list[TensorDiff]) -> None:
    """A difference along other dimensions, of a single rank, or of ranks without coordinates is not SYN231."""
    assert "SYN231" not in diagnose_case(group_with_field("mesh", meshes, *tensors))


def test_231_covers_only_replicated_tensors() -> None:
    """SYN231 covers neither a weight with a difference on one rank nor running statistics."""
    remaining = diff("fc.weight", "parameter", ONE), diff("bn.running_mean", "bn_mean", ALONG_TP)
    fitted = diagnose_case(group_with_field("mesh", TWO_BY_TWO, NORM, *remaining))
    assert fitted["SYN231"].tensors == (NORM.name,)
    assert set(list_names(remaining)) <= set(fitted["SYN299"].tensors)


REPLICATED = """
layers.0.input_layernorm.weight layers.0.post_attention_layernorm.bias model.norm.weight transformer.ln_f.weight
h.3.ln_1.weight layers.1.attention_norm.weight layers.1.ffn_norm.weight encoder.final_layernorm.weight
decoder.layers.0.self_attention.linear_qkv.layer_norm_weight decoder.layers.0.mlp.linear_fc1.layer_norm_bias
decoder.layers.0.mlp.router.weight decoder.layers.0.mlp.router.expert_bias layers.0.moe.router.gate.weight
layers.0.block_sparse_moe.gate.weight layers.0.self_attention.dense.bias layers.0.mlp.dense_4h_to_h.bias
layers.0.self_attn.o_proj.bias decoder.layers.0.self_attention.linear_proj.bias decoder.layers.0.mlp.linear_fc2.bias
optimizer.layers.0.input_layernorm.weight.exp_avg word_embeddings.norm.weight layers.0.pre_mlp_layernorm.weight
layers.1.mlp.shared_expert_gate.weight layers.1.feed_forward_moe.gate.weight transformer.wpe.weight
model.layers.0.self_attn.kv_a_layernorm.weight layers.0.self_attn.q_a_layernorm.weight
transformer.h.0.attn.c_proj.bias transformer.h.0.mlp.c_proj.bias
encoder.layer.0.output.dense.bias encoder.layer.0.attention.output.dense.bias decoder.layers.0.fc2.bias
decoder.embed_positions.weight embeddings.position_embeddings.weight encoder.layers.1.self_attn.out_proj.bias
""".split()
PERHAPS_SHARDED = """
layers.0.self_attn.q_norm.weight layers.0.self_attention.k_layernorm.weight layers.0.mixer.norm.weight
layers.0.self_attn.q_proj.bias layers.0.mlp.up_proj.bias layers.0.mlp.gate_proj.weight layers.0.mlp.gate.weight
layers.0.self_attn.norm.weight layers.0.mlp.norm.weight layers.0.linear_attn.norm.weight bn1.weight
layers.9.mlp.experts.0.linear_fc2.bias layers.0.intermediate.dense.bias layers.0.self_attention.query_key_value.bias
layers.0.mlp.dense_h_to_4h.bias layers.0.self_attn.o_proj.weight layers.0.batch_norm.weight layers.0.group_norm.weight
layers.0.attn.c_attn.bias layers.0.fc1.bias layers.0.attn.c_proj.weight embeddings.word_embeddings.weight
layers.0.block_sparse_moe.experts.0.gate.weight layers.0.mlp.shared_expert.gate.weight layers.0.expert.c_proj.bias
layers.0.block_sparse_moe.experts.0.w1.weight layers.0.self_attn.o_proj.lora_A.weight norm lm_head.weight
""".split()


def test_names_of_replicated_tensors() -> None:
    """Norms, routers and biases of row-parallel layers are replicated by name; possibly sharded tensors are not."""
    assert find_replicated([*REPLICATED, *PERHAPS_SHARDED]) == set(REPLICATED)


def compare(folder: Path, tensors: Sequence[Mapping[str, Any]], meshes: Sequence[Mapping[str, int]]) -> Group:
    """Write and compare one file per rank, with mesh coordinates in the metadata."""
    folder.mkdir()
    for rank, content in enumerate(tensors):
        block = syncheck.metadata(run="tp", run_id="1", rank=rank, world_size=len(tensors), mesh=dict(meshes[rank]))
        save_pth(folder / f"m_rank{rank}.pth", {"model": dict(content), "syncheck": block})
    (compared,) = syncheck.compare(folder).groups
    return compared


def parts(norms: Sequence[float] = (1, 1, 1, 1), sizes: Sequence[int] = (3, 3, 3, 3)) -> list[dict[str, Any]]:
    """Return the norm of each rank, and its shard of a column-parallel layer."""
    return [
        {
            "l.0.input_layernorm.weight": np.full(size, norm, np.float32),
            "l.0.mlp.up_proj.bias": np.full(4, rank % 2, np.float32),
        }
        for rank, (norm, size) in enumerate(zip(norms, sizes, strict=True))
    ]


STAGES = [{"pp": rank // 2, "tp": rank % 2} for rank in range(4)]


@pytest.mark.parametrize(
    ("meshes", "good", "bad", "ranks"),
    [
        # Column-parallel shards differ by design; the norm must be equal.
        (TWO_BY_TWO, parts(), parts((1, 2, 1, 2)), (0, 1, 2, 3)),
        # Norms with the same name in two pipeline stages are different tensors.
        (STAGES, parts((0, 0, 1, 1)), parts((0, 0, 1, 5)), (2, 3)),
        # A norm with different shapes is sharded, whatever its name.
        (TWO_BY_TWO, parts(sizes=(3, 4, 3, 4)), None, None),
    ],
)
def test_files_are_compared_across_tensor_parallel_ranks(
    tmp_path: Path, meshes: Any, good: Any, bad: Any, ranks: Any
) -> None:
    """Files with different shards are in sync, and a norm with differences along tp is SYN231."""
    group = compare(tmp_path / "good", good, meshes)
    assert (group.verdict, set(list_codes(group.findings))) == ("in_sync", {"SYN104"})
    if bad:
        finding = get_failing(compare(tmp_path / "bad", bad, meshes))
        assert (finding.code, finding.ranks, finding.tensors) == ("SYN231", ranks, ("l.0.input_layernorm.weight",))


def test_replicated_dtensors(tmp_path: Path) -> None:
    """A DTensor replicated over a mesh named tp is SYN231 without a known name or metadata."""
    for rank in range(2):
        mesh = mesh_of_2_6([0, 1], [rank], ("tp",))
        complete, shard = np.full((8, 3), rank, np.float32), np.full((4, 3), rank, np.float32)
        save_pth(
            tmp_path / f"m_rank{rank}.pth", {"odd": dtensor(complete, ["R"], mesh), "w": dtensor(shard, ["S(0)"], mesh)}
        )
    (compared,) = syncheck.compare(tmp_path).groups
    assert list_fields(compared.replicas, "mesh") == [{"tp": 0}, {"tp": 1}]
    finding = get_failing(compared)
    assert (finding.code, finding.tensors) == ("SYN231", ("odd",))
