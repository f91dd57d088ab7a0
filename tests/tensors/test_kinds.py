"""Kinds of tensors, and their certainty."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.checkpoints import save

import syncheck
from syncheck.snapshots import Metadata
from syncheck.tensors.kinds import KINDS, classify_tensors, make_selector

if TYPE_CHECKING:
    from pathlib import Path

BN = {"bn.running_mean": (4,), "bn.running_var": (4,), "bn.num_batches_tracked": ()}


@pytest.mark.parametrize(
    "name, kind",
    [
        ("fc.weight", "parameter"),
        ("attn.rotary.inv_freq", "buffer"),
        ("embeddings.position_ids", "buffer"),
        ("rng", "rng"),
        ("powersgd.error_dict.0", "rng"),
        ("cuda_rng_state", "rng"),
        ("random_states.torch", "rng"),
        ("scaler._scale", "scaler"),
        ("ema.fc.weight", "parameter"),
        ("scaler.scale", "parameter"),
        ("error_dict.weight", "parameter"),
        ("optimizer.fc.weight.exp_avg", "optimizer"),
        ("optimizer.fc.weight.step", "optimizer_step"),
        ("encoder.step.weight", "parameter"),
        ("drawing.weight", "parameter"),
        ("schema.weight", "parameter"),
    ],
)
def test_well_known_names(name: str, kind: str) -> None:
    """Well-known names of libraries have their kind, and similar names do not."""
    shape = () if name.endswith(("step", "scale")) else (3,)
    assert classify_tensors({name: shape}, None)[0] == {name: kind}
    assert kind in KINDS


def test_batchnorm_by_siblings() -> None:
    """Running statistics are confirmed by their siblings; a parameter with such a name is a parameter."""
    assert list(classify_tensors(BN, None)[0].values()) == ["bn_mean", "bn_var", "bn_count"]
    assert classify_tensors({"x.running_mean": (4,)}, None)[0] == {"x.running_mean": "parameter"}
    assert list(classify_tensors({"running_mean": (4,), "running_var": (4,)}, None)[0].values()) == [
        "bn_mean",
        "bn_var",
    ]


def test_metadata_precedes_names() -> None:
    """Recorded buffer names decide in both directions, and nothing is guessed."""
    shapes = {"a": (2,), "x.inv_freq": (2,)} | BN
    kinds, guessed, _ = classify_tensors(shapes, Metadata(buffers=("a", *BN)), ["x.*"])
    assert (kinds["a"], kinds["x.inv_freq"], guessed) == ("buffer", "parameter", False)
    assert kinds["bn.running_mean"] == "bn_mean"


def test_a_submodule_may_have_the_name_of_a_helper() -> None:
    """Known parameters and buffers keep their kind with a name of an optimizer, scaler or RNG state."""
    names = [f"{source_value}.weight" for source_value in ("rng", "random_state", "ema", "scaler", "optimizer")]
    shapes = dict.fromkeys(names, (2,))
    assert set(classify_tensors(shapes, Metadata(buffers=tuple(names)))[0].values()) == {"buffer"}
    assert set(classify_tensors(shapes, Metadata(buffers=(), optimizer_parameters=tuple(names)))[0].values()) == {
        "parameter"
    }
    assert set(classify_tensors(shapes, None, parameters=names)[0].values()) == {"parameter"}


@pytest.mark.parametrize(
    ("dtype", "kind"), [("uint8", "rng"), ("uint32", "rng"), ("float32", "parameter"), ("int64", "rng")]
)
def test_rng_states_have_no_floats(dtype: str, kind: str) -> None:
    """Floats below `rng` belong to a layer; bytes or words are an RNG state."""
    assert classify_tensors({"rng.torch": (5,)}, None, dtypes={"rng.torch": dtype})[0] == {"rng.torch": kind}


def test_the_optimizer_identifies_parameters() -> None:
    """Tensors with optimizer state are parameters; if all have states, nothing is guessed."""
    shapes = {"x.inv_freq": (2,), "optimizer.x.inv_freq.exp_avg": (2,)}
    assert classify_tensors(shapes, None) == (
        {"x.inv_freq": "parameter", "optimizer.x.inv_freq.exp_avg": "optimizer"},
        False,
        frozenset(),
    )
    assert classify_tensors(shapes | {"fc.weight": (2,)}, None)[1:] == (True, {"fc.weight"})


def test_globs_name_buffers() -> None:
    """--buffers GLOB makes buffers of tensors that the metadata does not describe."""
    assert classify_tensors({"a.table": (2,), "a.weight": (2,)}, None, ["*.table"])[0] == {
        "a.table": "buffer",
        "a.weight": "parameter",
    }


def test_selector() -> None:
    """--only, --include and --exclude must all accept a tensor; globs match full names with case."""
    expected = make_selector(frozenset({"buffer"}), ["a.*"], ["*.b"])
    assert expected("a.c", "buffer")
    assert not expected("a.c", "parameter")
    assert not expected("b.a.c", "buffer")
    assert not expected("a.b", "buffer")
    assert not expected("A.c", "buffer")
    assert make_selector(frozenset(), [], [])("anything", "parameter")


WEIGHTS = {"fc.weight": (3, 2), "fc.bias": (3,), "head.weight": (1, 3)}
STATES = {f"optimizer.{name}.exp_avg": shape for name, shape in WEIGHTS.items()}


def below(key: str, *, dots: bool = True) -> dict[str, tuple[int, ...]]:
    """Return a copy of WEIGHTS below a key."""
    return {f"{key}.{name if dots else name.replace('.', '')}": shape for name, shape in WEIGHTS.items()}


@pytest.mark.parametrize(
    "copy",
    [
        below("ema"),
        below("swa_model.module") | {"swa_model.n_averaged": ()},
        below("callbacks.EMA.ema_state_dict"),
        below("ema.shadow"),
        below("model_ema", dots=False) | {"model_ema.decay": (), "model_ema.num_updates": ()},
        {f"ema.shadow_params.{i}": shape for i, shape in enumerate(WEIGHTS.values())},
    ],
    ids=lambda copy: next(iter(copy)),
)
@pytest.mark.parametrize("states", [{}, STATES], ids=["model", "model and optimizer"])
def test_an_averaged_copy_mirrors_the_model(copy: Any, states: Any) -> None:
    """A tensor is averaged if all parameters have a copy with their name and shape below its key."""
    kinds, _, unsure = classify_tensors(WEIGHTS | copy | states, None)
    assert {kinds[name] for name in copy} == {"ema"}
    assert unsure.isdisjoint(copy)
    first = next(name for name, shape in copy.items() if shape)
    kinds, _, unsure = classify_tensors(WEIGHTS | copy | states | {first: (7, 7)}, None)
    assert "ema" not in kinds.values()
    assert first in unsure


def test_an_averaged_copy_beside_its_module() -> None:
    """`ema_model` mirrors `model`, although a loss network is beside both; `swa` within a layer mirrors nothing."""
    shapes = {f"{key}.{name}": shape for key, (name, shape) in product(("model", "ema_model"), WEIGHTS.items())}
    kinds, _, unsure = classify_tensors(shapes | {"vgg.conv.weight": (3, 3)}, None)
    assert {kinds[name] for name in shapes if name.startswith("ema_model.")} == {"ema"}
    assert not unsure
    kinds, _, unsure = classify_tensors(WEIGHTS | {"fc.swa.weight": (3, 2)}, None)
    assert (kinds["fc.swa.weight"], unsure) == ("parameter", {"fc.swa.weight"})


def test_a_gradient_scaler_has_its_fields() -> None:
    """A scaler is recognized by two of its fields or by an attribute; other modules belong to the model."""
    assert set(classify_tensors({"scaler.scale": (), "scaler.growth_tracker": ()}, None)[0].values()) == {"scaler"}
    for shapes in ({"scaler.scale": ()}, {"scaler.scale": (3,), "scaler.growth_tracker": (3,)}, {"scaler.a": ()}):
        assert set(classify_tensors(shapes, None)[0].values()) == {"parameter"}


UNSURE = {
    "fc.weight_v": {},
    "inv_freq": {},
    "vq.cluster_size": {},
    "frequencies": {},
    "cls_token": {},
    "bn.weight": dict.fromkeys(("bn.running_mean", "bn.running_var"), (3,)),
    "swa.weight": {"fc.weight": (3,)},
    "optimizer.lstm.weight": {},
    "frozen.weight": {"fc.weight": (3,), "optimizer.fc.weight.exp_avg": (3,)},
}
SURE = {
    "fc.weight": ({}, "parameter"),
    "rnn.weight_ih_l0_reverse": ({}, "parameter"),
    "fc.weight_v": ({"fc.weight_g": (1,)}, "parameter"),
    "sn.weight_v": ({"sn.weight_orig": (3, 3)}, "buffer"),
    "p.parametrizations.weight.0._u": ({"p.parametrizations.weight.original": (3, 3)}, "buffer"),
    "inv_freq": ({"fc.weight": (3,), "optimizer.fc.weight.exp_avg": (3,)}, "buffer"),
    "swa.weight": ({"optimizer.swa.weight.exp_avg": (3,)}, "parameter"),
    "bn.running_mean": ({"bn.running_var": (3,)}, "bn_mean"),
    "a.weight": ({"optimizer.1.a.weight.exp_avg": (3,), "optimizer.0.b.exp_avg": ()}, "parameter"),
}


@pytest.mark.parametrize("name", UNSURE)
def test_kinds_by_name_are_unsure(name: str) -> None:
    """A tensor that may be a parameter or a buffer is selected with either kind, but not with the optimizer."""
    kinds, _, unsure = classify_tensors({name: (3,)} | UNSURE[name], None)
    assert name in unsure
    for only in ("parameter", "buffer"):
        assert make_selector(frozenset({only}), [], [], unsure)(name, kinds[name])
    assert not make_selector(frozenset({"optimizer_step"}), [], [], unsure)(name, kinds[name])


@pytest.mark.parametrize("name", SURE)
def test_kinds_by_other_tensors_are_sure(name: str) -> None:
    """The optimizer, siblings, and names of torch.nn determine the kind."""
    remaining, kind = SURE[name]
    kinds, _, unsure = classify_tensors({name: (3,)} | remaining, None)
    assert (kinds[name], name in unsure) == (kind, False)


def test_metadata_describes_its_own_modules(tmp_path: Path) -> None:
    """Beside a described model and optimizer, another module's tensor is unsure unless it is called weight."""
    shapes = {"a": (2,), "loss.centers": (2,), "head.weight": (2,)}
    assert classify_tensors(shapes, Metadata(buffers=(), optimizer_parameters=("a",)))[2] == {"loss.centers"}
    assert not classify_tensors(shapes, Metadata(buffers=()))[2]


HELD = {"fc.weight": (3,), "bn.running_mean": (3,), "bn.running_var": (3,), "bn.num_batches_tracked": ()}


@pytest.mark.parametrize(
    ("only", "odd", "code"),
    [
        ("params", "conv.weight_v", 1),
        ("params", "conv.weight_g", 1),
        ("params", "swa.weight", 1),
        ("params", "block.shadow.proj", 1),
        ("params", "scaler.weight", 1),
        ("params", "scaler.scale", 1),
        ("params", "ema.weight", 1),
        ("params", "rng.weight", 1),
        ("params", "optimizer.lstm.weight", 1),
        ("params", "cluster_size", 1),
        ("params", "bn.running_mean", 0),
        ("buffers", "frequencies", 1),
        ("buffers", "conv.weight_v", 1),
        ("buffers", "bn.running_mean", 1),
        ("buffers", "ema.codes", 1),
        ("buffers", "fc.weight", 0),
    ],
)
def test_only_keeps_unsure_tensors(tmp_path: Path, only: str, odd: str, code: int) -> None:
    """A tensor that differs is skipped only if its kind is sure, and skipped tensors are counted."""
    for rank in range(2):
        state = {name: np.ones(shape, np.float32) for name, shape in ({odd: (3,)} | HELD).items()}
        state[odd] = state[odd] + np.float32(rank)
        save(tmp_path / f"rank{rank}.pth", state)
    report = syncheck.compare(tmp_path, options=syncheck.Options(only=(only,)))
    (group,) = report.groups
    assert report.exit_code == code
    assert group.counts.tensors + group.left_out == len({odd, *HELD})
    assert (odd in group.evidence.names) == (code == 1)


def test_another_rank_may_show_floats_below_rng(tmp_path: Path) -> None:
    """Bytes called `rng` on one rank and floats on another are a difference in any order."""
    for order in ((0, 1), (1, 0)):
        for rank, kind in enumerate(order):
            outlier = np.ones(8, (np.int64, np.float32)[kind])
            save(tmp_path / f"rank{rank}.pth", {"rng": outlier, "w": np.ones(2, np.float32)})
        assert syncheck.compare(tmp_path).exit_code == 1
