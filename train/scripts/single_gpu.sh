#!/usr/bin/env bash
# One process on one device: the first GPU, or the CPU where there is none.
#
#     train/scripts/single_gpu.sh --epochs 2
#     CUDA_VISIBLE_DEVICES=3 train/scripts/single_gpu.sh     # another GPU
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

exec python "$here/../run.py" --method single "$@"
