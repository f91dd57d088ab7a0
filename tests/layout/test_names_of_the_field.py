"""Checkpoint names of trainers, launchers and users, and the resulting groups of replicas."""

from __future__ import annotations

import itertools

import pytest
from checkpoints import snapshot

from syncheck.layout.grouping import group_replicas

# A pattern with its numbers, and the sizes of the groups that its files make.
REPLICAS = {
    # verl, FSDP examples of torch, Composer, fairseq, ray, nanotron, NeMo, picotron
    "global_step_20/actor/model_world_size_4_rank_{0-3}.pt": [4],
    "global_step_20/actor/{model,optim,extra_state}_world_size_2_rank_{0-1}.pt": [2, 2, 2],
    "fsdp-model-rank-{0-3}.pt": [4],
    "ep1-ba{100,200}-rank{0-1}.pt": [2, 2],
    "checkpoint_1_500-rank-{0-1}.pt": [2],
    "TorchTrainer_a1b2_00000/checkpoint_00000{1,2}/rank={0-3}.pt": [4, 4],
    "model_weight_pp-rank-{0-1}-of-2_tp-rank-{0-1}-of-2.safetensors": [4],
    "tp_rank_0{0-1}_pp_rank_00{0-1}/model_weights.ckpt": [4],
    "zero/dp-{0-1}-of-2_pp-0-of-1_tp-{0-1}-of-2.pt": [4],
    # DeepSpeed, Megatron, Hugging Face, Accelerate: parts and random states
    "global_step5/zero_pp_rank_{0-3}_mp_rank_00_model_states.pt": [4],
    "global_step5/bf16_zero_pp_rank_{0-3}_mp_rank_00_optim_states.pt": [1, 1, 1, 1],
    "iter_0000500/mp_rank_0{0-1}/model_optim_rng.pt": [1, 1],
    "model-0000{1-3}-of-00003.safetensors": [1, 1, 1],
    "checkpoint-{500,1000}/rng_state_{0-1}.pth": [2, 2],
    "checkpoint-500/random_states_{0-3}.pkl": [4],
    # launchers: SLURM, torchrun, Kubernetes, MPI, hosts by name and by address
    "job-12345/node-{0-1}/task_{0-3}.pt": [8],
    "run/cn00{1-2}/rank_{0-1}.pt": [4],
    "run/{cn001/rank_{0-1},cn002/rank_{2-3}}.pt": [4],
    "out/attempt_0/{0-3}.pt": [4],
    "ckpt-worker-{0-3}.pt": [4],
    "train-job-{master-0/rank_0,worker-0/rank_1,worker-1/rank_2}/model.pt": [3],
    "mpi_rank{0-3}_of_4.pt": [4],
    "192.168.1.{10,11}/local_rank_{0-1}/model.pt": [4],
    "node1.cluster.example/gpu{0-7}.pt": [8],
    "dgx-{a/rank{0-1},b/rank{2-3}}.pt": [4],
    "node{0-1}/step_{10,20}/gpu_{0-1}.pt": [4, 4],
    "step_{10,20}/node{0-1}/gpu_{0-1}.pt": [4, 4],
    "host{0-1}.gpu{0-1}.ckpt": [4],
    "server_{0-1}_device_{0-3}.pth": [8],
    "instance-{0-1}/process_{0-1}.pth": [4],
    "rack1/blade{1-2}/rank{0-1}.pt": [4],
    "rack{1/blade1/rank{0-1},1/blade2/rank{2-3},2/blade1/rank{4-5}}.pt": [6],
    # users
    "model_{0-3}.pth": [4],
    "model_gpu{0-3}.pth": [4],
    "debug.rank{0-3}": [4],
    "model.pth.{0-3}": [4],
    "model.pth.rank{0-3}": [4],
    "r{0-3}/model.pt": [4],
    "weights-r{0-3}-final.pt": [4],
    "resnet50_rank{0-1}_epoch{1,2}.pth": [2, 2],
    "rank{0-1}_epoch={1,2}.ckpt": [2, 2],
    "{before,after}_allreduce_rank{0-1}.pt": [2, 2],
    "{ema,model}_rank{0-1}.pt": [2, 2],
    "seed{1,2}/rank{0-1}.pt": [2, 2],
    "fold_{0-2}/rank{0-1}.pt": [2, 2, 2],
    "exp{1,2}/step_{5,9}/rank{0-1}.pt": [2, 2, 2, 2],
    "lora_r{8,16}_rank{0-1}.safetensors": [2, 2],
    "adapter_rank{0-1}/adapter_model.safetensors": [2],
    "dp{0-1}.pt": [2],
    "dp{0-1}_pp{0-1}_tp{0-1}.pt": [8],
    "rank{0-3}_dp0.pt": [4],
    "step-000{100,200}.pt": [1, 1],
    "epoch=1-step={100,200}.ckpt": [1, 1],
    "{best,last}.pt": [2],
    "{best,last,rank0,rank1}.pt": [1, 1, 2],
}


def expanded(pattern: str) -> list[str]:
    """Expand braces like a shell: {0-3} is a range, {a,b} are words, which may contain braces."""
    start = pattern.find("{")
    if start < 0:
        return [pattern]
    depth, end = 1, start + 1
    while depth:
        depth += {"{": 1, "}": -1}.get(pattern[end], 0)
        end += 1
    inside, words, level = pattern[start + 1 : end - 1], [""], 0
    for c in inside:
        level += {"{": 1, "}": -1}.get(c, 0)
        if c == "," and not level:
            words.append("")
        else:
            words[-1] += c
    if len(words) == 1 and "-" in inside and "{" not in inside:
        first, last = map(int, inside.split("-"))
        words = [str(number) for number in range(first, last + 1)]
    heads = itertools.chain.from_iterable(expanded(word) for word in words)
    return [pattern[:start] + head + tail for head in heads for tail in expanded(pattern[end:])]


@pytest.mark.parametrize("pattern", REPLICAS)
@pytest.mark.parametrize("folder", ["", "/scratch/2026-11-22/run7/"])
def test_groups(pattern: str, folder: str) -> None:
    """Every file is in one group, and the groups have these sizes, in any folder."""
    paths = [folder + path for path in expanded(pattern)]
    found = group_replicas([snapshot(path) for path in paths])
    assert sorted(s.path for group in found for _, s in group.ranks) == sorted(paths)
    assert sorted(len(group.ranks) for group in found) == REPLICAS[pattern]
