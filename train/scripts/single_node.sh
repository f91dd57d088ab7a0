#!/usr/bin/env bash
# One machine: a process per GPU, or two processes on the CPU where there is none. The method is ddp unless --method
# names another.
#
#     train/scripts/single_node.sh --save-per-rank
#     NPROC=4 train/scripts/single_node.sh --save-per-rank   # as many processes as you say
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

# torchrun starts the processes and tells each of them its rank. --standalone lets it choose a free port itself.
nproc=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or the processes fight for the cores
exec python -m torch.distributed.run --standalone --nproc-per-node "$nproc" "$here/../run.py" "$@"
