"""Train a model like minimal.py, with each rank started by hand: one file to copy.

    python minimal_by_hand.py                                                     # one process
    python minimal_by_hand.py --method ddp --ranks 2 --rank 0 --init-method tcp://HOST0:29500
    python minimal_by_hand.py --method ddp --ranks 2 --rank 1 --init-method tcp://HOST0:29500

The last two commands belong to one run, each in a shell of its own, on one or two machines; HOST0 is that of rank 0.
Start one rank per GPU; without a GPU, ranks train on the CPU. All methods train the same model, apart from rounding,
because --batch-size counts the samples of all ranks. To train your own model, replace the first three definitions.
"""

import argparse
import math
import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole tensors, also under FSDP
compute_loss = nn.CrossEntropyLoss()  # the mean over the samples, because DDP and FSDP average over the ranks


def make_data(samples: int, seed: int) -> TensorDataset:
    """Draw images of noisy stripes, [N, 1, 16, 16], labeled with one of ten directions, [N]."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (samples,), generator=random)
    angle, phase = (y * math.pi / 10)[:, None, None], 2 * math.pi * torch.rand(samples, 1, 1, generator=random)
    row, column = torch.arange(16)[:, None], torch.arange(16)
    stripes = torch.sin(row * angle.cos() + column * angle.sin() + phase)
    return TensorDataset((stripes + torch.randn(stripes.shape, generator=random))[:, None], y)


def make_model() -> nn.Module:
    """Build a convolutional network, [N, 1, H, W] to logits [N, 10], from torch's current seed."""
    blocks = [nn.Sequential(nn.Conv2d(channels, 32, 3, stride=2, padding=1), nn.ReLU()) for channels in (1, 32, 32)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def wrap(module: nn.Module, method: str, device: torch.device) -> Any:
    """Return the module that training calls."""
    # BatchNorm: first call nn.SyncBatchNorm.convert_sync_batchnorm (GPUs only), or each rank has its own statistics.
    if method == "ddp":
        return DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
    if method == "fsdp":
        for block in module.children():
            if isinstance(block, nn.Sequential):  # in your model: the repeated blocks, gathered one after another
                fully_shard(block)
        fully_shard(module)  # the other layers
    return module


def evaluate(module: nn.Module, test: TensorDataset, rank: int, ranks: int, device: torch.device) -> Tensor:
    """Return the part of the accuracy for this rank's test samples; the sum over all ranks is the accuracy."""
    # DistributedSampler would repeat samples. The number of batches is equal on all ranks, which FSDP's forward needs.
    batches = torch.arange(rank, len(test), ranks).tensor_split(math.ceil(len(test) / (512 * ranks)))
    correct = torch.zeros((), device=device)
    module.eval()
    with torch.no_grad():
        for x, y in DataLoader(test, batch_sampler=[batch.tolist() for batch in batches]):
            correct += (module(x.to(device)).argmax(1) == y.to(device)).sum()
    module.train()
    return correct / len(test)


def train(args: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> None:
    """Train. Every rank runs the same lines: a rank that skips a collective would leave the other ranks waiting."""
    torch.manual_seed(0)  # equal on all ranks, because FSDP does not broadcast the model
    train_data, test_data = make_data(4096, seed=1), make_data(1024, seed=2)
    module = make_model().to(device)
    model = wrap(module, args.method, device)
    # With dropout, call torch.manual_seed(rank) here: with equal seeds, all ranks would drop the same positions.
    optimizer = SGD(module.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)  # FSDP has replaced the parameters
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp == "fp16")  # float16 rounds small gradients to 0
    done = load(args.checkpoint, module, optimizer, scaler) if args.resume and os.path.exists(args.checkpoint) else 0
    if rank == 0 and args.resume:
        print(f"{done} of {args.epochs} epochs are done", flush=True)
    sampler: DistributedSampler[Any] = DistributedSampler(train_data, ranks, rank, drop_last=True)
    micro_batch, steps = args.batch_size // (ranks * args.accumulate), len(train_data) // args.batch_size
    loader: DataLoader[Any] = DataLoader(
        train_data, micro_batch, sampler=sampler, pin_memory=device.type == "cuda",
        num_workers=args.num_workers, persistent_workers=args.num_workers > 0,  # each rank starts its own workers
    )  # fmt: skip
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.amp)
    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        batches, mean_loss = iter(loader), torch.zeros((), device=device)
        for step in range(epoch * steps, (epoch + 1) * steps):
            # A function of the step, which needs no state in the checkpoint: half a cosine from --lr to 0.
            optimizer.param_groups[0]["lr"] = args.lr * (1 + math.cos(math.pi * step / (args.epochs * steps))) / 2
            for part in range(1, args.accumulate + 1):
                x, y = (tensor.to(device, non_blocking=True) for tensor in next(batches))
                if args.method == "fsdp":  # reduce gradients over ranks only once, with the last micro-batch
                    model.set_requires_gradient_sync(part == args.accumulate)
                with model.no_sync() if args.method == "ddp" and part < args.accumulate else nullcontext():
                    with torch.autocast(device.type, precision, enabled=precision is not None):
                        loss = compute_loss(model(x), y)  # model, not module: DDP's forward prepares its backward
                    scaler.scale(loss / args.accumulate).backward()  # outside autocast
                mean_loss += loss.detach() / (ranks * steps * args.accumulate)  # item() would wait for the GPU
            scaler.unscale_(optimizer)  # before clipping
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        # Evaluate module, not model: a forward of DDP would broadcast buffers.
        means = torch.stack((mean_loss, evaluate(module, test_data, rank, ranks, device)))
        if dist.is_initialized():
            dist.all_reduce(means)  # the sum of all ranks' parts
        save(args.checkpoint, module, optimizer, scaler, epoch + 1)
        if rank == 0:
            print(f"epoch {epoch + 1}: train loss {means[0]:.4f}, test accuracy {means[1]:.1%}", flush=True)


def save(path: str, module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, done: int) -> None:
    """Save to one file that every method can load; a collective, because FSDP gathers its shards."""
    model_state, optimizer_state = get_state_dict(module, optimizer, options=FULL)  # on every rank
    if not dist.is_initialized() or dist.get_rank() == 0:
        state = {"model": model_state, "optimizer": optimizer_state, "scaler": scaler.state_dict(), "epoch": done}
        torch.save(state, path + ".new")
        os.replace(path + ".new", path)  # an interrupted save keeps the previous file


def load(path: str, module: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> int:
    """Load a file of `save` on every rank, which must have access to it; return the number of epochs done."""
    file = torch.load(path, map_location="cpu", weights_only=True)  # otherwise all ranks would load to GPU 0
    set_state_dict(module, optimizer, model_state_dict=file["model"], optim_state_dict=file["optimizer"], options=FULL)
    scaler.load_state_dict(file["scaler"] or scaler.state_dict())  # empty without --amp fp16
    return int(file["epoch"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train one model.", allow_abbrev=False)
    parser.add_argument("--method", choices=("single", "ddp", "fsdp"), default="single")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the run, on all machines")
    parser.add_argument("--rank", type=int, default=0, help="number of this process, from 0")
    parser.add_argument("--init-method", help="tcp://HOST:PORT of rank 0, or file:///PATH, a new file for each run")
    parser.add_argument("--num-workers", type=int, default=0, help="processes of each rank that load batches")
    parser.add_argument("--epochs", type=int, default=5, help="of the whole run, also with --resume")
    parser.add_argument("--batch-size", type=int, default=64, help="samples per optimizer step, over all ranks")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off")
    parser.add_argument("--checkpoint", default="minimal.pt", help="file of rank 0")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if it exists")
    args = parser.parse_args()
    rank, ranks = args.rank, args.ranks
    if (args.init_method is None) != (args.method == "single") or not 0 <= rank < ranks:
        parser.error(f"--method {args.method}: ddp and fsdp need --ranks, --rank from 0 and --init-method")
    if not 0 < args.accumulate <= args.batch_size <= 4096 or args.batch_size % (ranks * args.accumulate):
        parser.error(f"--batch-size: at most 4096, and a multiple of {ranks} ranks x {args.accumulate} micro-batches")
    device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # otherwise the collectives of all ranks would use GPU 0
    if args.method != "single":
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=args.init_method, rank=rank, world_size=ranks)  # waits for all
    train(args, rank, ranks, device)
    if dist.is_initialized():
        time.sleep(0.1)  # if Python ended while a thread of gloo releases its last tensors, the process would abort
        dist.destroy_process_group()
