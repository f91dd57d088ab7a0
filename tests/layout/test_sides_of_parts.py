"""A side of several files: every copy of a tensor counts, and the files are of one step and one layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save_pth, save_safetensors
from support.states import add_prefix, replace_in_names

import syncheck
from syncheck.errors import CheckpointError, SyncheckError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

RANDOM = np.random.default_rng(0)
EMBED, FIRST, LAST = (RANDOM.standard_normal((8, 4)).astype(np.float32) for _ in range(3))
GARBAGE = EMBED + 1
TIED = {"head.weight": "embed.weight"}
MODEL = {"embed.weight": EMBED, "layers.0.weight": FIRST, "layers.1.weight": LAST}


def save_stages(folder: Path, *stages: dict[str, Any], tied: Any = TIED, copies: int = 1, more: Any = ({},)) -> Path:
    """Save the files of pipeline stages. copies: ranks per stage. more: other content of each stage's file."""
    for stage, model in enumerate(stages):
        for copy in range(copies):
            rank = stage * copies + copy
            listing = tied[stage] if isinstance(tied, list) else tied
            mesh = {"pp": stage, "dp": copy}
            world = len(stages) * copies
            block = syncheck.metadata(run="r", rank=rank, world_size=world, step=3, mesh=mesh, tied=listing)
            content = {"model": model, "syncheck": block, **more[stage % len(more)]}
            save_pth(folder / f"rank{rank}.pth", content)
    return folder


def first_stage() -> dict[str, Any]:
    """Return the stage with the embedding."""
    return {"embed.weight": EMBED, "layers.0.weight": FIRST}


def last_stage(head: Any = EMBED, name: str = "head.weight") -> dict[str, Any]:
    """Return the stage with the copy of the embedding."""
    return {"layers.1.weight": LAST, name: head}


def exit_codes(a: Path, b: Path) -> set[int]:
    """Return the exit codes of both orders."""
    return {syncheck.diff(a, b).exit_code, syncheck.diff(b, a).exit_code}


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("tied", [TIED, [{}, TIED], [TIED, {}], {}], ids=["all", "last", "first", "none"])
@pytest.mark.parametrize("both_names", [True, False])
def test_the_copy_of_the_last_stage_counts(tmp_path: Path, copies: int, tied: Any, both_names: bool) -> None:
    """A garbage copy of a tied embedding is out of sync, whether the other model stores one name or both."""
    complete = save_pth(tmp_path / "full.pth", {"model": MODEL | ({"head.weight": EMBED} if both_names else {})})
    good = save_stages(tmp_path / "good", first_stage(), last_stage(), tied=tied, copies=copies)
    bad = save_stages(tmp_path / "bad", first_stage(), last_stage(GARBAGE), tied=tied, copies=copies)
    assert exit_codes(bad, complete) == {1}
    # Without a list of copies, the head is a tensor that only one model has.
    assert exit_codes(good, complete) == ({0} if both_names or tied else {1})
    if tied:
        assert syncheck.compare(bad).exit_code == 1


def test_one_of_the_copies_is_wrong(tmp_path: Path) -> None:
    """Of two ranks of the last stage, the second has a garbage copy: the first is not enough."""
    complete = save_pth(tmp_path / "full.pth", {"model": MODEL | {"head.weight": EMBED}})
    folder = save_stages(tmp_path / "ranks", first_stage(), last_stage(), copies=2)
    second = save_stages(tmp_path / "other", first_stage(), last_stage(GARBAGE), copies=2)
    (second / "rank3.pth").replace(folder / "rank3.pth")
    assert exit_codes(folder, complete) == {1}


@pytest.mark.parametrize("name", ["embed.weight", "model.embed_tokens.weight", "embedding.word_embeddings.weight"])
def test_embeddings_of_one_name_in_two_stages(tmp_path: Path, name: str) -> None:
    """The first and the last stage hold one embedding: equal copies are in sync, other copies are not."""
    first = {name: EMBED, "layers.0.weight": FIRST}
    complete = save_pth(tmp_path / "full.pth", {"model": first | {"layers.1.weight": LAST}})
    good = save_stages(tmp_path / "good", first, last_stage(EMBED, name), tied={})
    bad = save_stages(tmp_path / "bad", first, last_stage(GARBAGE, name), tied={})
    assert (exit_codes(good, complete), exit_codes(bad, complete)) == ({0}, {1})
    assert (syncheck.compare(good).exit_code, syncheck.compare(bad).exit_code) == (0, 1)


def test_two_copies_in_the_last_stage(tmp_path: Path) -> None:
    """A copy of a copy is compared with the first tensor, and so is a second copy in one stage."""
    tied = {"mtp.weight": "head.weight", **TIED}
    good = save_stages(tmp_path / "good", first_stage(), last_stage() | {"mtp.weight": EMBED}, tied=tied)
    bad = save_stages(tmp_path / "bad", first_stage(), last_stage() | {"mtp.weight": GARBAGE}, tied=tied)
    assert (syncheck.compare(good).exit_code, syncheck.compare(bad).exit_code) == (0, 1)
    assert exit_codes(bad, save_pth(tmp_path / "full.pth", {"model": MODEL})) == {1}


def test_stage_files_without_metadata(tmp_path: Path) -> None:
    """Files with other names are parts, not replicas; a tensor in two of them is compared."""
    complete = save_pth(tmp_path / "full.pth", {"model": MODEL})
    for folder, copy, code in (("good", EMBED, 0), ("bad", GARBAGE, 1)):
        save_pth(tmp_path / folder / "stage0.pth", {"model": first_stage()})
        save_pth(tmp_path / folder / "stage1.pth", {"model": last_stage(copy, "embed.weight")})
        assert exit_codes(tmp_path / folder, complete) == {code}


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    """Shards without an index may hold a tensor twice; a copy that differs is out of sync."""
    complete = save_pth(tmp_path / "full.pth", {"model": MODEL})
    for folder, copy, code in (("good", EMBED, 0), ("bad", GARBAGE, 1)):
        save_safetensors(tmp_path / folder / "model-00001-of-00002.safetensors", first_stage())
        save_safetensors(tmp_path / folder / "model-00002-of-00002.safetensors", last_stage(copy, "embed.weight"))
        shards = tmp_path / folder / "model-*-of-00002.safetensors"
        assert exit_codes(shards, complete) == {code}


def steps_of(count: int) -> dict[str, Any]:
    """Return an optimizer with one parameter and its step."""
    moments = {"step": np.array(count, np.float32), "exp_avg": FIRST}
    return {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}


@pytest.mark.parametrize(
    "content",
    [
        ({"step": 100}, {"step": 99}),
        ({"epoch": 1}, {"epoch": 2}),
        ({"trainer": {"global_step": 7}}, {"trainer": {"global_step": 8}}),
        ({"iteration": 10, "lr": 0.1}, {"iteration": 20, "lr": 0.1}),
        ({"optimizer": steps_of(100)}, {"optimizer": steps_of(99)}),
    ],
    ids=["step", "epoch", "nested", "iteration", "optimizer"],
)
@pytest.mark.parametrize("as_b", [False, True])
def test_parts_of_two_steps_are_no_model(tmp_path: Path, content: tuple[Any, Any], as_b: bool) -> None:
    """Parts of two steps or epochs are an error, although the first part agrees with the other model."""
    parts = [{"layers.0.weight": FIRST}, {"layers.1.weight": LAST}]
    for i, part in enumerate(parts):
        save_pth(tmp_path / f"stage{i}.pth", {"model": part, **content[i]})
    complete = save_pth(tmp_path / "full.pth", {"model": parts[0] | parts[1], **content[0]})
    stages = [tmp_path / "stage0.pth", tmp_path / "stage1.pth"]
    with pytest.raises(CheckpointError, match="one step of one run"):
        syncheck.diff(*((complete, stages) if as_b else (stages, complete)))
    for i, part in enumerate(parts):
        save_pth(tmp_path / f"stage{i}.pth", {"model": part, **content[0]})
    model = parts[0] | parts[1]
    more = {} if "optimizer" in content[0] else content[0]
    assert syncheck.diff(stages, save_pth(tmp_path / "full.pth", {"model": model, **more})).exit_code in (
        {1} if "optimizer" in content[0] else {0}
    )


@pytest.mark.parametrize("name", ["step{}/part0.pth", "stage0_epoch{}.pth", "run/checkpoint-{}/stage0.pth"])
def test_parts_from_folders_of_two_steps(tmp_path: Path, name: str) -> None:
    """Steps in names of files and folders count; equal saved steps count more."""
    second = name.replace("0.pth", "1.pth").replace("stage0", "stage1")
    files = [tmp_path / name.format(100), tmp_path / second.format(200)]
    for file, part in zip(files, ({"a": FIRST}, {"b": LAST}), strict=True):
        save_pth(file, {"model": part})
    complete = save_pth(tmp_path / "full.pth", {"model": {"a": FIRST, "b": LAST}})
    with pytest.raises(CheckpointError, match="one step of one run"):
        syncheck.diff(files, complete)
    for file, part in zip(files, ({"a": FIRST}, {"b": LAST}), strict=True):
        save_pth(file, {"model": part, "global_step": 200})
    assert syncheck.diff(files, complete).exit_code == 0


def test_an_adapter_has_its_own_steps(tmp_path: Path) -> None:
    """A base model of step 1000 and its adapter of step 10 are one side."""
    save_safetensors(tmp_path / "checkpoint-1000" / "model.safetensors", {"q.weight": EMBED[:4]})
    (tmp_path / "checkpoint-1000" / "config.json").write_text("{}")
    (tmp_path / "checkpoint-1000" / "trainer_state.json").write_text('{"global_step": 1000}')
    factors = {"A": np.zeros((2, 4), np.float32), "B": np.zeros((4, 2), np.float32)}
    names = {f"base_model.model.q.lora_{letter}.weight": factor for letter, factor in factors.items()}
    save_safetensors(tmp_path / "checkpoint-10" / "adapter_model.safetensors", names)
    settings = '{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q"]}'
    (tmp_path / "checkpoint-10" / "adapter_config.json").write_text(settings)
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text('{"global_step": 10}')
    complete = save_pth(tmp_path / "merged.pth", {"model": {"q.weight": EMBED[:4]}})
    assert syncheck.diff([tmp_path / "checkpoint-1000", tmp_path / "checkpoint-10"], complete).exit_code == 0


def save_neox(folder: Path, ranks: int) -> Path:
    """Save a folder of GPT-NeoX: the bias of a row-parallel layer is a sum over the ranks, the norm drifted."""
    for rank in range(ranks):
        layer = {
            "input_layernorm.weight": EMBED[0] + np.float32(rank * 1e-3),
            "attention.dense.bias": EMBED[1] / np.float32(ranks),
            "attention.dense.weight": np.ascontiguousarray(np.split(FIRST, ranks, axis=1)[rank]),
        }
        save_pth(folder / f"layer_02-model_{rank:02}-model_states.pt", layer)
        save_pth(folder / f"mp_rank_{rank:02}_model_states.pt", {"module": None, "global_steps": 5})
    return folder


def test_parts_of_tensor_parallel_ranks_are_not_joined(tmp_path: Path) -> None:
    """Slices and partial sums equal those of the same layout only; with another layout, nothing is decided."""
    two, copy, first = save_neox(tmp_path / "two", 2), save_neox(tmp_path / "copy", 2), save_neox(tmp_path / "one", 1)
    names = ("input_layernorm.weight", "attention.dense.bias", "attention.dense.weight")
    layer = dict(zip(names, (EMBED[0], EMBED[1], FIRST), strict=True))
    complete = save_pth(tmp_path / "full.pth", {"model": add_prefix(layer, "gpt_neox.layers.0.")})
    rules = [f'[[rule]]\nname = "layer_02-model_00.{name}"\nparts = ["gpt_neox.layers.0.{name}"]\n' for name in names]
    (tmp_path / "map.toml").write_text("".join(rules))
    assert exit_codes(two, copy) == {0}
    for second in (complete, first):
        for options in (None, syncheck.DiffOptions(map=str(tmp_path / "map.toml"))):
            for sides in ((two, second), (second, two)):
                with pytest.raises(UsageError, match="model-parallel ranks"):
                    syncheck.diff(*sides, options=options)
    assert syncheck.diff(first, complete, options=syncheck.DiffOptions(map=str(tmp_path / "map.toml"))).exit_code == 0


def save_folder(folder: Path, tensors: dict[str, Any] = MODEL) -> Path:
    """Save a Hugging Face folder."""
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text("{}")
    return folder


SECOND = ["original/consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin", "model.fp16.safetensors"]


@pytest.mark.parametrize("second", SECOND)
def test_second_copies_of_weights(tmp_path: Path, second: str) -> None:
    """The model of a Hugging Face folder is compared without other copies of its weights, which are reported."""
    published, export = save_folder(tmp_path / "published"), save_folder(tmp_path / "export")
    altered = replace_in_names(MODEL, "layers", "blocks")
    (save_safetensors if second.endswith(".safetensors") else save_pth)(published / second, altered)
    report = syncheck.diff(published, export)
    assert (report.exit_code, report.counts.identical) == (0, len(MODEL))
    assert any(second in str(note) for note in report.groups[-1].notes)
    assert exit_codes(published, save_folder(tmp_path / "wrong", MODEL | {"layers.1.weight": FIRST})) == {1}
    # Two copies of a folder: all files are compared.
    (save_safetensors if second.endswith(".safetensors") else save_pth)(
        export / second, altered | {"embed.weight": FIRST}
    )
    assert syncheck.compare(published, export).exit_code == 1


def test_other_parts_of_a_folder_stay(tmp_path: Path) -> None:
    """A module in a folder of its own belongs to the model, as in sentence-transformers; it is not a second copy."""
    good = save_folder(tmp_path / "good")
    save_folder(good / "2_Dense", {"linear.weight": FIRST})
    bad = save_folder(tmp_path / "bad")
    save_folder(bad / "2_Dense", {"linear.weight": LAST})
    try:
        codes = exit_codes(good, bad)
    except SyncheckError:
        codes = {2}
    assert codes <= {1, 2}


@pytest.mark.parametrize("file_name", ["stage", "m_pp", "model_pp_rank"])
def test_stages_that_number_their_layers_from_0(tmp_path: Path, file_name: str) -> None:
    """Stages with other data under the same numbers of layers are no copies: it cannot tell."""
    embed = {"embed.weight": EMBED, "layers.0.weight": FIRST, "layers.1.weight": LAST}
    head = {"head.weight": EMBED, "layers.0.weight": FIRST + 1, "layers.1.weight": LAST - 1}
    save_pth(tmp_path / f"{file_name}0.pth", embed)
    save_pth(tmp_path / f"{file_name}1.pth", head)
    complete = {**embed, "head.weight": EMBED, "layers.2.weight": FIRST + 1, "layers.3.weight": LAST - 1}
    save_pth(tmp_path / "whole.pth", complete)
    stages = f"{tmp_path}/{file_name}0.pth,{tmp_path}/{file_name}1.pth"
    for sides in ((stages, tmp_path / "whole.pth"), (tmp_path / "whole.pth", stages)):
        with pytest.raises(UsageError, match="number their layers"):
            syncheck.diff(*sides)
    # Without tensors of their own, only the names of the files tell them from replicas.
    for position, layers in enumerate((embed, head)):
        numbered = {name: array for name, array in layers.items() if name.startswith("layers")}
        save_pth(tmp_path / f"{file_name}{position}.pth", numbered)
    with pytest.raises(UsageError, match="number their layers"):
        syncheck.diff(stages, tmp_path / "whole.pth")
    # One copy that agrees shows that the files hold copies, and that another one is wrong.
    save_pth(tmp_path / f"{file_name}0.pth", embed)
    save_pth(tmp_path / f"{file_name}1.pth", {**head, "layers.1.weight": LAST})
    assert syncheck.diff(stages, tmp_path / "whole.pth").exit_code == 1
