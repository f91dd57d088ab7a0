"""Shard a model for tensor parallelism by the `tp_plan` of its class.

A plan has a style for each pattern of module names. With --sequence-parallel, tensors between the blocks have a shard
of the tokens, otherwise all tokens:

- embedding, head: sharded by vocabulary. The head gathers the logits, except with --loss-parallel.
- colwise, rowwise: linear layers sharded by outputs or inputs.
- norm: replicated; applied to this rank's tokens.
- replicated: applied to all tokens.
- all_tokens: a module without own parameters that needs all tokens, such as a mixture of experts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from train.errors import UserError
from train.mesh import refuse_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from train.settings import Settings


def apply_plan(model: nn.Module, mesh: DeviceMesh, settings: Settings) -> None:
    """Replace all parameters by DTensors on a mesh of one dimension; a collective.

    Parameters shared by modules, such as tied embeddings, stay shared. Raises UserError for models without a plan, and
    for shapes that the mesh does not divide.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if plan is None:
        raise refuse_model(settings, "needs a model with a tp_plan")
    styles: dict[str, str] = {}
    for name, _ in model.named_modules():
        for pattern, style in plan.items():
            if fnmatchcase(name, pattern):
                styles[name] = style
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
        check_parameter(model, name, parameter, styles.get(name.rpartition(".")[0]), mesh.size(), settings)
    full_size = tuple(f"{name}." for name, style in styles.items() if style == "all_tokens")
    for name, style in styles.items():
        split = settings.sequence_parallel and not name.startswith(full_size)
        torch_styles = make_styles(split_tokens=split, split_logits=settings.loss_parallel)
        if style in torch_styles:
            parallelize_module(model.get_submodule(name), mesh, torch_styles[style])
        else:
            replicate_module(model.get_submodule(name), mesh)
    for first, *other_names in shared.values():
        for other_name in other_names:
            module, _, name = other_name.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(first))
    if settings.sequence_parallel:
        model.register_forward_pre_hook(lambda _, inputs: check_length(inputs[0], mesh.size()))


def check_parameter(
    model: nn.Module, name: str, parameter: Tensor, style: str | None, ranks: int, settings: Settings
) -> None:
    """Raise UserError if a parameter has no style, or cannot be sharded evenly. ranks: of the tensor dimension."""
    path = name.rpartition(".")[0]
    if style is None:
        raise refuse_model(settings, f"needs a style for {path} in the tp_plan", "add it")
    if style in ("norm", "replicated") or (style == "rowwise" and parameter.dim() == 1):
        return
    # Each rank has whole attention heads.
    unit = getattr(model.get_submodule(path.rpartition(".")[0]), "head_dim", 1)
    parts = parameter.shape[int(style == "rowwise")] // unit
    if parts % ranks:
        raise UserError(
            f"--method {settings.method} --parallel-degree {ranks}: must divide the {parts} "
            f"{'rows or columns' if unit == 1 else 'heads'} of {path}"
        )


def check_length(tokens: Tensor, ranks: int) -> None:
    """Raise UserError if ranks cannot have equal shards of the tokens. tokens: [N, T]."""
    if tokens.shape[1] % ranks:
        raise UserError(f"--sequence-parallel: {ranks} ranks cannot share {tokens.shape[1]} tokens equally")


def make_styles(*, split_tokens: bool, split_logits: bool) -> dict[str, Any]:
    """Return torch's styles by the style of a plan; modules with another style are replicated."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInputOutput,
        RowwiseParallel,
        SequenceParallel,
    )

    tokens = Shard(1) if split_tokens else Replicate()
    logits = Shard(-1) if split_logits else Replicate()
    styles: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=logits, use_local_output=not split_logits),
        "colwise": ColwiseParallel(input_layouts=tokens),
        "rowwise": RowwiseParallel(output_layouts=tokens),
        "all_tokens": PrepareModuleInputOutput(
            input_layouts=tokens,
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=tokens,
        ),
    }
    if split_tokens:
        styles["norm"] = SequenceParallel()
    return styles


def replicate_module(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the parameters as DTensors. Inputs and outputs are plain tensors, equal on all ranks."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module

    distribute_module(
        module,
        mesh,
        input_fn=lambda _, inputs, mesh: DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),  # type: ignore[arg-type]
        output_fn=lambda _, output, __: output.to_local(),
    )
