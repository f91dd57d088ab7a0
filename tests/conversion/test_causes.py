"""The causes of differences between two models: each fault is named, alone and together with others."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from support import llama
from support.listings import find_texts, list_codes
from support.states import cast

import syncheck
from syncheck.diagnose.model_values import Cast
from syncheck.errors import UsageError
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.llama import Weights

LAYER = "model.layers.0."


def find(tmp_path: Path, a: Weights, b: Weights, config: object = None, **options: Any) -> dict[str, set[str]]:
    """Return the tensors of each finding."""
    report = syncheck.diff(
        llama.write(tmp_path / "a", a, config), llama.write(tmp_path / "b", b), options=DiffOptions(**options)
    )
    return {finding.code: set(finding.tensors) for finding in report.groups[-1].findings}


def transpose(model: Weights) -> None:
    """A square matrix is transposed."""
    model[f"{LAYER}self_attn.o_proj.weight"] = model[f"{LAYER}self_attn.o_proj.weight"].T


def transpose_shape(model: Weights) -> None:
    """A matrix is transposed, and its shape shows it."""
    model[f"{LAYER}mlp.down_proj.weight"] = model[f"{LAYER}mlp.down_proj.weight"].T


def swap(model: Weights) -> None:
    """Gate and up are exchanged."""
    names = [f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up")]
    model[names[0]], model[names[1]] = model[names[1]], model[names[0]]


def exchange_halves(model: Weights) -> None:
    """The halves of a matrix are exchanged."""
    model[f"{LAYER}mlp.up_proj.weight"] = np.roll(model[f"{LAYER}mlp.up_proj.weight"], llama.INNER // 2, 0)


def interleave_halves(model: Weights) -> None:
    """The rows of two halves alternate."""
    rows = model[f"{LAYER}mlp.up_proj.weight"]
    model[f"{LAYER}mlp.up_proj.weight"] = rows.reshape(2, -1, llama.WIDTH).swapaxes(0, 1).reshape(rows.shape)


def permute_rows(model: Weights) -> None:
    """The rows are in a random order."""
    rows = model[f"{LAYER}mlp.up_proj.weight"]
    model[f"{LAYER}mlp.up_proj.weight"] = rows[np.random.default_rng(1).permutation(len(rows))]


def permute_heads(model: Weights) -> None:
    """Query and key have the other order for rotary embeddings."""
    for x in "qk":
        model[f"{LAYER}self_attn.{x}_proj.weight"] = llama.interleave(model[f"{LAYER}self_attn.{x}_proj.weight"])


def permute_heads_back(model: Weights) -> None:
    """The other direction."""
    rows = model[f"{LAYER}self_attn.q_proj.weight"]
    split = rows.reshape(-1, llama.HEAD // 2, 2, llama.WIDTH)
    model[f"{LAYER}self_attn.q_proj.weight"] = split.swapaxes(1, 2).reshape(rows.shape)


def round_values(model: Weights) -> None:
    """A tensor went through float16."""
    model[f"{LAYER}mlp.up_proj.weight"] = model[f"{LAYER}mlp.up_proj.weight"].astype(np.float16).astype(np.float32)


def convert_values(model: Weights) -> None:
    """A tensor is stored in float16."""
    model[f"{LAYER}mlp.up_proj.weight"] = model[f"{LAYER}mlp.up_proj.weight"].astype(np.float16)


def add_rows(model: Weights) -> None:
    """The vocabulary has more rows."""
    name = "model.embed_tokens.weight"
    model[name] = np.concatenate([model[name], np.ones((4, llama.WIDTH), np.float32)])


def remove_columns(model: Weights) -> None:
    """The last columns are lost."""
    model[f"{LAYER}mlp.down_proj.weight"] = model[f"{LAYER}mlp.down_proj.weight"][:, :-2]


def initialize(model: Weights) -> None:
    """A tensor has fresh values."""
    shape = model[f"{LAYER}mlp.down_proj.weight"].shape
    model[f"{LAYER}mlp.down_proj.weight"] = np.random.default_rng(9).standard_normal(shape, np.float32)


def reset(model: Weights) -> None:
    """A weight is constant."""
    model[f"{LAYER}mlp.down_proj.weight"] = np.zeros_like(model[f"{LAYER}mlp.down_proj.weight"])


def scale(model: Weights) -> None:
    """A tensor is multiplied by a constant."""
    model[f"{LAYER}mlp.gate_proj.weight"] = model[f"{LAYER}mlp.gate_proj.weight"] * np.float32(1 / 3)


def exchange_layers(model: Weights) -> None:
    """Two layers are exchanged."""
    for name in find_texts(model, "mlp", start=LAYER):
        second = name.replace(".0.", ".1.")
        model[name], model[second] = model[second], model[name]


FAULTS: list[tuple[Callable[[Weights], None], str, int]] = [
    (transpose, "SYN304", 1),
    (transpose_shape, "SYN304", 1),
    (swap, "SYN305", 2),
    (exchange_halves, "SYN305", 1),
    (interleave_halves, "SYN305", 1),
    (permute_rows, "SYN305", 1),
    (permute_heads, "SYN306", 2),
    (permute_heads_back, "SYN306", 1),
    (round_values, "SYN307", 1),
    (convert_values, "SYN307", 1),
    (add_rows, "SYN309", 1),
    (remove_columns, "SYN318", 1),
    (initialize, "SYN311", 1),
    (reset, "SYN311", 1),
    (scale, "SYN312", 1),
    (exchange_layers, "SYN313", 6),
]


@pytest.mark.parametrize(("damage", "code", "count"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_each_cause(tmp_path: Path, damage: Callable[[Weights], None], code: str, count: int) -> None:
    """One finding with all damaged tensors, also in the layout of Megatron-Core on the side of A or B."""
    model = llama.make_model()
    copy = dict(model)
    damage(copy)
    damaged = {name for name in model if model[name] is not copy[name]}
    assert len(damaged) == count
    assert find(tmp_path, model, copy, llama.CONFIG) == {code: damaged}
    if copy.keys() and all(copy[name].shape == model[name].shape and copy[name].dtype == np.float32 for name in model):
        converted = llama.to_megatron(copy)
        assert find(tmp_path / "1", model, converted, llama.CONFIG) == {code: damaged}
        assert find(tmp_path / "2", llama.to_megatron(model), copy, llama.CONFIG) == {code: damaged}


@pytest.mark.parametrize(
    "wrong", [{"groups": 1}, {"order": "qvk"}, {"order": "kqv"}, {"swap": True}, {"groups": 1, "order": "vkq"}]
)
def test_orders_of_fused_tensors(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A conversion that joins parts in another order: all parts of the fused tensors, in both directions."""
    model = llama.make_model()
    parts = ["mlp.gate_proj", "mlp.up_proj"] if "swap" in wrong else [f"self_attn.{x}_proj" for x in "qkv"]
    named = {f"model.layers.{i}.{part}.weight" for i, part in product(range(llama.LAYERS), parts)}
    converted = llama.to_megatron(model, **wrong)
    for i, pair in enumerate(((model, converted), (converted, model))):
        findings = find(tmp_path / str(i), *pair, llama.CONFIG)
        assert findings.keys() == {"SYN305"}
        # A part can be at its place by chance: v is the last one in two orders.
        assert findings["SYN305"] <= named
        assert len(findings["SYN305"]) >= 2 * llama.LAYERS


def test_several_causes(tmp_path: Path) -> None:
    """Each cause has its tensors, and what has none is unexplained."""
    model = llama.make_model()
    copy = dict(model)
    for damage in (transpose, permute_heads, round_values, initialize, add_rows):
        damage(copy)
    noise = np.random.default_rng(2).standard_normal(copy["lm_head.weight"].shape, np.float32)
    copy["lm_head.weight"] = copy["lm_head.weight"] + np.float32(0.1) * noise
    findings = find(tmp_path, model, copy)
    assert findings == {
        "SYN304": {f"{LAYER}self_attn.o_proj.weight"},
        "SYN306": {f"{LAYER}self_attn.{x}_proj.weight" for x in "qk"},
        "SYN307": {f"{LAYER}mlp.up_proj.weight"},
        "SYN309": {"model.embed_tokens.weight"},
        "SYN311": {f"{LAYER}mlp.down_proj.weight"},
        "SYN399": {"lm_head.weight"},
    }


def test_a_cause_and_a_conversion(tmp_path: Path) -> None:
    """A model in float16 with a transposed tensor: with --cast, only the transposed tensor is reported."""
    model = llama.make_model()
    copy = cast(model, np.float16)
    transpose(copy)
    findings = find(tmp_path, model, copy)
    assert findings["SYN304"] == {f"{LAYER}self_attn.o_proj.weight"}
    assert len(findings["SYN307"]) == len(model) - 1
    assert find(tmp_path, model, copy, cast="float16") == {"SYN304": {f"{LAYER}self_attn.o_proj.weight"}}


def exchange(model: Weights) -> None:
    """Two experts are exchanged."""
    for name in find_texts(model, start=f"{LAYER}mlp.experts.1."):
        second = name.replace("experts.1.", "experts.2.")
        model[name], model[second] = model[second], model[name]


def duplicate(model: Weights) -> None:
    """Expert 3 is a copy of expert 0."""
    for name in find_texts(model, ".experts.3."):
        model[name] = model[name.replace("experts.3.", "experts.0.")]


def lose(model: Weights) -> None:
    """The last experts are not saved."""
    for name in [name for name in model if ".experts.2." in name or ".experts.3." in name]:
        del model[name]


@pytest.mark.parametrize(("damage", "count"), [(exchange, 6), (duplicate, 6), (lose, 12)])
def test_experts(tmp_path: Path, damage: Callable[[Weights], None], count: int) -> None:
    """Exchanged, duplicated and lost experts."""
    model = llama.make_model(experts=4)
    copy = dict(model)
    damage(copy)
    findings = find(tmp_path, model, copy)
    assert findings.keys() == {"SYN310"}
    assert len(findings["SYN310"]) == count


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [0, 1, 2, 0], [0, 1]])
def test_stacked_experts(tmp_path: Path, order: list[int]) -> None:
    """The same in one tensor for all experts."""
    stack = np.random.default_rng(0).standard_normal((4, 6, 5), np.float32)
    model = {"mlp.experts.down_proj": stack, "mlp.gate.weight": stack[:, :, 0]}
    findings = find(tmp_path, model, {**model, "mlp.experts.down_proj": stack[order]})
    assert findings.keys() == ({"SYN318"} if len(order) == 2 else {"SYN310"})


def update(model: Weights, *, step: float = 0.01) -> Weights:
    """Return a model after an update of all tensors but one."""
    rng = np.random.default_rng(5)
    retained = "model.norm.weight"
    return {
        name: w if name == retained else w + np.float32(step) * rng.standard_normal(w.shape, np.float32)
        for name, w in model.items()
    }


def test_not_updated(tmp_path: Path) -> None:
    """B is the base: every tensor that A changed. A frozen tensor is no sign of an update."""
    base = llama.make_model()
    path = llama.write(tmp_path / "base", base)
    model = update(base)
    changed = model.keys() - {"model.norm.weight"}
    assert find(tmp_path, model, base, base=path) == {"SYN301": changed}
    assert find(tmp_path, model, llama.to_megatron(base), llama.CONFIG, base=path) == {"SYN301": changed}


def test_a_base_that_cannot_be_read(tmp_path: Path) -> None:
    """An error, even if the models agree."""
    a = llama.write(tmp_path / "a", llama.make_model())
    with pytest.raises(UsageError):
        syncheck.diff(a, a, options=DiffOptions(base=str(tmp_path / "missing")))


def test_partially_updated(tmp_path: Path) -> None:
    """Stale tensors are listed, if others are new or differ for another reason."""
    base = llama.make_model()
    path = llama.write(tmp_path / "base", base)
    model = update(base)
    stale = set(find_texts(base, "mlp"))
    copy = {name: base[name] if name in stale else weight for name, weight in model.items()}
    assert find(tmp_path, model, copy, base=path) == {"SYN302": stale}
    copy = {**base, f"{LAYER}self_attn.o_proj.weight": model[f"{LAYER}self_attn.o_proj.weight"].T}
    findings = find(tmp_path, model, copy, base=path)
    assert findings.keys() == {"SYN302", "SYN304"}


def test_an_earlier_step_is_the_base(tmp_path: Path) -> None:
    """Without --base, earlier steps of A in its folder are compared."""
    torch = pytest.importorskip("torch")
    steps = [llama.make_model()]
    for _ in range(3):
        steps.append(update(steps[-1]))
    for step, model in enumerate(steps):
        torch.save({name: torch.from_numpy(w) for name, w in model.items()}, tmp_path / f"run_step{step}.pth")
    llama.write(tmp_path / "engine", steps[1])
    report = syncheck.diff(tmp_path / "run_step3.pth", tmp_path / "engine")
    (finding,) = report.groups[-1].findings
    assert finding.code == "SYN301"
    assert "step 1" in report.groups[-1].evidence.base


@pytest.mark.slow
def test_neighbours_are_not_accused(tmp_path: Path) -> None:
    """Fine-tuned, averaged and pruned models have no cause that is a proof."""
    rng = np.random.default_rng(3)
    model = llama.make_model()
    second = llama.make_model(seed=4)
    copies = [
        update(model, step=0.5),
        {name: (w + second[name]) / 2 for name, w in model.items()},
        {name: np.where(rng.random(w.shape) < 0.5, 0, w).astype(np.float32) for name, w in model.items()},
        {name: np.sort(w.reshape(-1)).reshape(w.shape) for name, w in model.items() if w.ndim > 1},
    ]
    for i, copy in enumerate(copies):
        findings = find(tmp_path / str(i), model, copy)
        assert findings.keys() <= {"SYN101", "SYN311", "SYN399"}


def test_steps_in_folders_are_found(tmp_path: Path) -> None:
    """Earlier steps of A are found if the folder has the step in its name, and nothing else is opened."""
    steps = [llama.make_model()]
    steps.append(update(steps[0]))
    for step, model in enumerate(steps, 1):
        llama.write(tmp_path / f"step_{step}", model)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "broken.pth").write_bytes(b"PK broken")
    copy = llama.write(tmp_path / "b", steps[0])
    report = syncheck.diff(tmp_path / "step_2", copy)
    assert list_codes(report.groups[-1].findings) == ["SYN301"]


def test_masks_and_small_tensors_are_not_accused(tmp_path: Path) -> None:
    """A mask with other positions, and a few equal numbers, are no permutation and no other layer."""
    rng = np.random.default_rng(0)
    a = {f"h.{i}.mask": rng.integers(0, 2, 40).astype(np.int64) for i in range(2)}
    a |= {f"h.{i}.range": np.array([0.0, float(i)], np.float32) for i in range(2)}
    b = {name: w[::-1].copy() if "mask" in name else w for name, w in a.items()}
    b["h.1.range"] = a["h.0.range"]
    assert find(tmp_path, a, b).keys() <= {"SYN399", "SYN220"}


def test_two_conversions(tmp_path: Path) -> None:
    """A copy that was rounded twice, to dtypes of which none includes the other, names both, and another fix."""
    model = llama.make_model()
    twice = cast(cast(model, np.float16), ml_dtypes.bfloat16)
    sides = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", twice)
    report = syncheck.diff(*sides)
    assert list_codes(report.groups[-1].findings) == ["SYN307"]
    (finding,) = report.groups[-1].findings
    dtypes = [(fact.parameters["dtype"], fact.parameters.get("then")) for fact in finding.facts]
    assert ("float16", "bfloat16") in dtypes
    assert finding.fix.code is Cast.FIX_TWICE
    # The copy in between is one conversion away from B.
    half = llama.write(tmp_path / "half", cast(model, np.float16))
    assert syncheck.diff(half, sides[1], options=DiffOptions(cast="bfloat16")).exit_code == 0
    (single,) = syncheck.diff(half, sides[1]).groups[-1].findings
    assert single.fix.code is Cast.FIX
