"""The sentences of the findings of parity. Each docstring is the text of `syncheck explain`."""

from __future__ import annotations

from syncheck.sentences import Sentence


class Scaled(Sentence, topic="SYN441"):
    """The whole gradient is too large or too small by one factor.

    Signature: in every tensor and on every rank, all ranks and micro-batches entered the gradient with one and the same
    weight, which is not 1. The finding lists the products and quotients of the sizes of the run that equal the weight:
    data-parallel, tensor-parallel and context-parallel sizes, number of micro-batches, number of terms.

    Cause: the loss is divided once too often or too rarely. DDP and FSDP divide the sum over ranks by the number of
    ranks; a loss that is already divided by the number of all tokens must be multiplied by it. A trainer, a pipeline
    schedule and an accumulation loop may each divide by the number of micro-batches. Adam hides the factor, except in
    weight decay, clipping and epsilon.

    Fix: divide by the number of all terms exactly once, and undo the average of the wrapper:
    `(loss_sum * data_parallel_size / all_terms).backward()`.

    Incidents: meta-pytorch/torchtune#2172 (averaged by FSDP after a division by all tokens), pytorch/torchtitan#2972
    and pytorch/torchtitan#1733 (pipeline schedules), areal-project/AReaL#1273, NVIDIA/Megatron-LM#906 (context
    parallelism), NVlabs/stylegan3#184 (accumulation).
    """

    FACTOR = "the whole batch ({owners:count part}) has weight {factor:number 6}, expected 1, in {count:count tensor}"
    NONE = "{count:count tensor} {count:verb has|have} no gradient: call backward(), and do not clear the result"
    ONLY_COUNTS = (
        "no product of mesh sizes and `micro_batches` is {factor:number 6}: set `micro_batches` if the program or "
        "its schedule has several; numbers of terms give {matches:list}"
    )
    MATCHES = "{factor:number 6} = {matches:list}"
    NO_MATCH = "{factor:number 6} is no product of up to three sizes of the run ({sizes:list})"
    CAUSE = (
        "The loss is divided once too often or too rarely, gradients are summed where they should be averaged, or "
        "no gradient is left."
    )
    FIX = (
        "Divide the sum of all terms once by their number over all ranks and micro-batches, and multiply by the number "
        "of ranks if DDP or FSDP averages."
    )


class MeanOfMeans(Sentence, topic="SYN442"):
    """The gradient is a mean of means: parts of the batch with few terms have larger weights.

    Signature: the weight of each part of the batch times its number of terms is one number, and the numbers of terms
    differ. The parts are ranks, micro-batches, both, or single samples. If the parts have equal numbers of terms, the
    mean of means is right, and there is no finding. If `count` of the case returns another amount for each part, for
    example a sum of weights, this amount takes the place of the number of terms.

    Cause: each rank, micro-batch or sequence divides its loss by its own number of tokens, and then the means are
    averaged. Tokens of short sequences count more than tokens of long sequences.

    Fix: count the terms of all ranks and micro-batches before the first backward, with one all-reduce, and divide each
    sum by this number.

    Incidents: huggingface/transformers#34242, pytorch/torchtitan#2206, PrimeIntellect-ai/prime-rl#1960,
    meta-pytorch/torchtune#1917.
    """

    SHARE = "the weight of each {level:words} is inverse to its {amount:words}: {parts:names 4}"
    PART_OF_COUNT = "{label} has {count:number 6} of the count and weight {weight:number 4}"
    PART = "{label} has {count:count term} and weight {weight:number 4}"
    FACTOR = "in addition, all weights have the factor {factor:number 6} ({matches:list})"
    UNKNOWN_FACTOR = "in addition, all weights have the factor {factor:number 6}, which matches no size of the run"
    CAUSE = "Each {level:words} divides its loss by its own {amount:words}, and the means are averaged."
    FIX = (
        "Add the numbers of terms, or what `count` counts, of all ranks and micro-batches before the first backward, "
        "and divide each sum of losses by the result."
    )


class NotReduced(Sentence, topic="SYN443"):
    """Ranks have the gradient of their own samples only.

    Signature: on some ranks, the terms of other ranks have weight 0, and the terms of the rank itself, or of a group of
    ranks, do not. The finding lists the ranks with the terms in their gradient.

    Cause: the gradients are not reduced: the mesh or process group of the wrapper has one rank only, `no_sync()` is
    active in the last backward, or the module is called without its wrapper. FSDP with a mesh of one rank averages over
    this rank, so the weights also show the missing division. If only some tensors have the fault, the wrapper works:
    they are outside of it, were added or unfrozen after wrapping, are ignored by it, or were forgotten in a loop of
    all-reduces.

    Fix: print the mesh of the wrapper (`device_mesh`, `process_group`) and its size. Call the wrapper instead of the
    module inside, and end accumulation with a synchronized backward. For some tensors, wrap their module too, or
    all-reduce their gradients with the operation of the other tensors.

    Incidents: verl-project/verl#7493 (fsdp_size=1 disables the reduction silently).
    """

    ROW = "{ranks:Ranks} {ranks:verb has|have} only the terms of {parts:list}, with weight {weight:words}"
    TENSORS = "{count} of {total} tensors have this fault: {names:names}"
    SUM = (
        "the ranks along {dimensions:list} hold different parts of {count:count tensor}, which add up to "
        "{factor:number 6} times the gradient of one process: {names:names}"
    )
    OWNER = (
        "the owners of the case explain no copy: if ranks or micro-batches split the batch in another way, define "
        "`owner` and `micro_batches` of the case, and check again"
    )
    CAUSE_SOME = (
        "The gradients of the named tensors are not reduced over all ranks with different samples; those of other "
        "tensors are."
    )
    FIX_SOME = (
        "Find why the reduction leaves out the named tensors: their module is outside the wrapper, they were added, "
        "replaced or unfrozen after wrapping, the wrapper ignores them, or a loop of all-reduces skips them."
    )
    CAUSE = "Gradients are not reduced over all ranks with different samples."
    FIX = (
        "Check the size of the mesh or process group of the wrapper, call the wrapper, not the module inside, and "
        "synchronize the last backward of an accumulation."
    )


class SummedOrAveraged(Sentence, topic="SYN444"):
    """Some tensors have another factor than the rest.

    Signature: on every rank, all parts of the batch have one weight in some tensors, and another weight in the rest.
    The finding names the dimension of the mesh along which the tensors are replicated and that has the size of the
    factor. Or: the program freezes parameters (`requires_grad=False`) that `build` trains, or trains parameters that
    `build` freezes.

    Cause: the tensors are reduced separately, with a sum in the place of an average or the reverse, over another group,
    or twice: parameters outside the wrapper, replicated parameters of tensor parallelism, experts. A factor of 0 means
    that they have no gradient at all. A hook, or a weight of a part of the loss, may have the size of a dimension by
    chance, and is the cause of a factor that no size explains. Parameters are frozen by a call of `requires_grad_`,
    which a loader, an adapter, or a rank that does not use a layer may make.

    Fix: find the code that reduces the tensors, and use the same operation and group as for the rest, or the inverse
    factor. Freeze the same parameters in `build` and on all ranks of the program.

    Incidents: NVIDIA/Megatron-LM#3943 (the gradient of one part of the loss divided by the context-parallel size).
    """

    FACTOR = "{count:count tensor} {count:verb has|have} weight {factor:number 6}, expected 1: {names:names}"
    REMAINDER = "{right} of the remaining tensors are right"
    DIMENSION = "{dimension} has this size, and the tensors are replicated along it"
    MATCHES = "{factor:number 6} = {matches:list}"
    NONE = "{names:names} {count:verb has|have} no gradient, although {count:verb it affects|they affect} the loss"
    FROZEN = (
        "the program freezes {names:names} on {ranks:ranks} (requires_grad is False after backward), and `build` "
        "trains {names:verb it|them}"
    )
    EXTRA = "the program trains {names:names} on {ranks:ranks}, and `build` freezes {names:verb it|them}"
    CAUSE_FROZEN = "Program and definition train different parameters."
    FIX_FROZEN = (
        "Find the `requires_grad_` that one of them lacks: freeze the same parameters in `build` and on each rank of "
        "the program."
    )
    CAUSE_NONE = "The program computes no gradient of the named tensors, or clears it."
    FIX_NONE = (
        "Find what cuts the named tensors off from the loss, such as detach() or no_grad(), or what clears their "
        "gradients before the step."
    )
    CAUSE_FACTOR = (
        "The gradients of the named tensors are multiplied by a factor of their own, for example in a hook or by a "
        "weight of a part of the loss."
    )
    FIX_FACTOR = (
        "Find what multiplies the gradients of the named tensors: hooks, a backward method of your own, or a part of "
        "the loss with a divisor of its own."
    )
    CAUSE = (
        "Some tensors may be reduced in another way than the rest: summed instead of averaged, the reverse, or twice."
    )
    FIX = (
        "Find the code that reduces the named tensors, and use the operation and the group of the other tensors. If "
        "they are reduced alike, look for a hook or a part of the loss with this factor."
    )


class PartialNotReduced(Sentence, topic="SYN445"):
    """Each rank has a part of the gradient of some replicated tensors, and the parts were not added.

    Signature: no rank's copy is a combination of the gradients of the batch's parts, but the copies along one dimension
    of the mesh add up to the gradient, or to a multiple. `full_tensor()` adds the parts, and so hides the fault. Or:
    `build` ties weights that are several parameters of the program, and their gradients differ. Or: the program ties
    weights that `build` does not tie. No other gradient is explained then, because all of them may be wrong for this
    reason.

    Cause: under sequence or context parallelism, each rank computes replicated layers, for example norms, for its own
    positions only. Under tensor parallelism, a replicated parameter inside a sharded region has the gradient of the
    rank's heads only. Such gradients need an all-reduce, which DTensor does and plain parameters lack. Weights are
    untied by a new `nn.Parameter`, by wrapping or moving one of two modules, or by pipeline stages; each parameter then
    trains with a part of the gradient, and the weights drift apart.

    Fix: all-reduce (sum) the gradients along the named dimension after the backward pass, or make the parameters
    DTensors with the style `SequenceParallel()`. Tie untied weights again (`head.weight = embed.weight`), or give each
    copy the sum of the gradients of all copies. Tie the same weights in `build` and in the program.

    Incidents: NVIDIA/Megatron-LM#1446 (final norm under TP and sequence parallelism),
    NVIDIA/TransformerEngine#435.
    """

    SUM = "the ranks along {dimensions:list} hold different parts of {count:count tensor}: {names:names}"
    UNTIED = (
        "{names:list} are one tied tensor {name:name} in `build`, and parameters of the program with different "
        "gradients"
    )
    TIED = "the program ties {name:name} to {first:name} on {ranks:ranks}, and `build` does not"
    CAUSE_TIED = "The program ties weights that are parameters of their own in the definition."
    FIX_TIED = "Tie the same weights in `build` and in the program, or find what ties them while the program is made."
    CAUSE_UNTIED = "The program unties weights, and each of the parameters has a part of the gradient."
    FIX_UNTIED = (
        "Tie the parameters again after loading, wrapping and moving, or give each of them the sum of their gradients."
    )
    TOTAL = "their sum is {factor:number 6} times the gradient of one process"
    CAUSE = "The ranks hold partial gradients of replicated tensors, which nobody added."
    FIX = "All-reduce (sum) the gradients along the named dimension before the optimizer step."


class GradientNorm(Sentence, topic="SYN446"):
    """All gradients are right, but the gradient norm or the clipping is wrong.

    Signature: every tensor has the gradient of one process, and the norm that `finish` returned is another one, or the
    gradients at the optimizer step were scaled by another factor than max_norm / norm. The finding names the norm that
    was computed instead, if it is that of this rank's shards, or of all copies of all ranks.

    Cause: the norm of local shards without a reduction, or replicated tensors that count once for each rank of a
    tensor-parallel group. Clipping then scales by the wrong factor, and may differ between ranks.

    Fix: add the squared norms of shards over the ranks that share the tensor, and count each replicated tensor once.
    `torch.nn.utils.clip_grad_norm_` does this for DTensors of one mesh. The case must declare the clipping of the
    trainer: set `max_norm` (or `clip_value` for `clip_grad_value_`), return the optimizer from `optimizer(model)`, and
    let `finish(model, optimizer)` clip, step, and return the norm before clipping.

    Incidents: ROCm/TransformerEngine#715 (replicated weights count once per tensor-parallel rank: 1.52 times too
    large), NVIDIA-NeMo/RL#3788, huggingface/transformers#46113 (correct norm, but nothing is clipped).
    """

    NORM = "the program reports the gradient norm {values:by_rank}; expected {norm:number 6} (ratio {ratio:number 4})"
    COPIES = "{norm:number 6} is the norm of all copies along {dimensions:list}, so replicated tensors count repeatedly"
    SHARD = "each rank reports the norm of the tensors and shards that it holds, without other ranks"
    CLIP = "at the step, gradients are scaled by {values:by_rank}; expected {expected:number 6}"
    MAX_NORM = (
        "the case sets no max_norm, so no clipping is expected: if the trainer clips, set max_norm to the same value"
    )
    CLIP_VALUE = (
        "at the step, gradients are no multiple of the gradients after backward: if the trainer calls "
        "clip_grad_value_, set clip_value of the case to the same value"
    )
    CAUSE = "The gradient norm is computed from other tensors than the whole gradient, or clipping uses another factor."
    FIX = (
        "Add the squared norms of shards over ranks, count each replicated tensor once, and clip by that norm. The "
        "case declares the clipping: max_norm or clip_value, optimizer(model), and finish(model, optimizer), which "
        "returns the norm before clipping."
    )


class SampleLost(Sentence, topic="SYN447"):
    """Some samples or micro-batches do not enter the gradient, or enter it several times.

    Signature: most of the batch has one weight, and some samples, tokens or micro-batches have 0, 2, 3, ... times this
    weight.

    Cause: a sampler or loader drops the remainder (`drop_last`) or repeats samples to fill the last batch; a gradient
    is cleared in the middle of an accumulation; labels at the borders of context-parallel shards are lost; or gradients
    of earlier micro-batches are all-reduced once more with each later one, so that they count twice for two ranks, four
    times after two more.

    Fix: for lost or repeated samples, check sampler and loader. If earlier micro-batches have the larger weights,
    reduce once, after the last micro-batch.

    Incidents: lhotse-speech/lhotse#695 (samples dropped with several ranks), pytorch/pytorch#41171.
    """

    WEIGHT = "{parts:names 6} {parts:verb has|have} {multiple} times the usual weight"
    LOST = "{parts:names 6} {parts:verb does|do} not enter the gradient"
    USUAL = "the remaining batch has weight {usual:number 6}{matches:words}"
    CAUSE = "Parts of the batch are lost or counted several times."
    FIX = (
        "Check drop_last and padding of the sampler, zero_grad() during accumulation, and that gradients are reduced "
        "once, after the last micro-batch."
    )


class UpdateDiffers(Sentence, topic="SYN448"):
    """All gradients are right, but the update or the settings of the optimizer are not.

    Signature: gradients, norm and clipping equal one process, and parameters after `finish` are not. The finding
    states which multiple of weight decay or of the update would explain the difference. Or: the parameters are right,
    and the groups of the optimizers have other settings, such as betas or momentum, which change later steps.

    Cause: the optimizer of the parallel program has other settings or other parameter groups: weight decay applied
    several times, also to biases and norms, another learning rate, or parameters that are missing in the optimizer. Or
    it has another class: Adam adds weight decay to the gradient, AdamW decays the parameter (decoupled weight decay).

    Fix: print the class and `optimizer.param_groups` of both programs: learning rate, weight decay, and the number of
    parameters.

    Incidents: huggingface/pytorch-image-models#2750 (weight decay applied once per group of dtypes).
    """

    DIFFERS = "{count:count tensor} {count:verb differs|differ} after the step of {optimizer:name}: {names:names}"
    SETTINGS = (
        "the first parameter group of one process has learning rate {lr:number 6} and weight decay "
        "{weight_decay:number 6}"
    )
    DECAY = "the difference is {times:number 4} times learning rate * weight decay * parameter"
    RATIO = "the update is {ratio:number 6} times that of one process"
    MISSING = "the parameters did not change"
    SETTING = (
        "{setting:name} is {found:name} in the program and {expected:name} in one process, in {count:count tensor}: "
        "{names:names}"
    )
    LATER = "the first step does not show it, later steps do"
    CAUSE_SETTINGS = "The optimizer of the parallel program has other settings."
    FIX_SETTINGS = "Give both optimizers the same settings, and check what `optimizer` of the case returns."
    CAUSE = "The optimizer of the parallel program updates some parameters in another way."
    FIX = (
        "Compare the classes of both optimizers, then their parameter groups: learning rate, weight decay, and their "
        "parameters. Adam adds weight decay to the gradient; AdamW and `decoupled_weight_decay` decay the parameter."
    )


class Unexplained(Sentence, topic="SYN449"):
    """The gradient is wrong, and no known cause explains the numbers.

    Signature: all wrong tensors that no other finding of this table covers. The finding lists the weights or the
    residual, ranks with NaN or infinite elements, ranks without a gradient, and the first tensors in the order of
    execution. A fault in one layer changes the gradients of this layer and of the layers before it, so the last wrong
    tensor in the order of execution is closest to the fault.

    Cause: unknown. Frequent causes without weights of their own are a wrong backward of a custom kernel, a missing
    communication inside the forward pass, another random state, and activations that are changed in place.

    If ranks along a dimension without data parallelism have different copies, they read different samples, or a
    collective of tensor parallelism is missing: a layer whose weights are split by rows needs the sum of its outputs
    over all ranks in the forward pass, and one split by columns the sum of the gradients of its input in the backward
    pass.

    Fix: begin with the last wrong tensor in the order of execution. Remove parallel dimensions one by one, until the
    finding disappears.

    Incidents: please send a report with the JSON attached. Every rule began as an unexplained difference.
    """

    WEIGHTS = "{ranks:Ranks} {ranks:verb has|have} the weights {weights:list} for the {parts:count part} of the batch"
    NOT_FINITE = "{ranks:Ranks} {ranks:verb has|have} NaN or infinite elements in {count:count gradient}: {names:names}"
    MISSING = "{ranks:Ranks} {ranks:verb has|have} no gradient of {names:names}: p.grad is None after backward"
    RESIDUAL = (
        "no weights of ranks and micro-batches explain {count:count tensor}; largest residual {residual:number 3} of "
        "the whole gradient"
    )
    RECIPROCALS = (
        "the reciprocals of the weights have the mean 1, as in a mean of means: if the parts differ in another amount "
        "than their number of terms, for example a sum of weights, return it from `count`, and check again"
    )
    OWNER = (
        "the owners of the case explain no copy: if ranks or micro-batches split the batch in another way, define "
        "`owner` and `micro_batches` of the case, and check again"
    )
    SPLIT = "the copies of the ranks along {dimensions:list} differ, and do not add up to the gradient of one process"
    CAUSE_SPLIT = (
        "A collective may be missing or wrong in the forward or backward pass, or the ranks along {dimensions:list} "
        "may read different samples."
    )
    FIX_SPLIT = (
        "Print the samples of each rank: ranks along this dimension need the same ones. If they have them, look at the "
        "layer after the last wrong tensor in the order of execution: if ranks hold parts of its weights, add their "
        "outputs in the forward pass, and the gradients of their inputs in the backward pass."
    )
    ORDER = "in the order of execution the first wrong tensor is {first:name}, the last {last:name}"
    CAUSE = "No known cause explains the weights."
    FIX = "Begin with the last wrong tensor in the order of execution, and remove parallel dimensions one by one."
