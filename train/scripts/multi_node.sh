#!/usr/bin/env bash
# Several machines: start this on each of them, with the same arguments but for its own number.
#
#     train/scripts/multi_node.sh NODES NODE_RANK MASTER_ADDR [MASTER_PORT] [options of run.py]
#
#     train/scripts/multi_node.sh 2 0 10.0.0.1 --save-per-rank    # on the first machine, 10.0.0.1
#     train/scripts/multi_node.sh 2 1 10.0.0.1 --save-per-rank    # on the second
#
# MASTER_ADDR is an address of machine 0 that all others reach. If the ranks find it but not each other, a machine has
# several networks: name the one to use with GLOO_SOCKET_IFNAME (CPU) or NCCL_SOCKET_IFNAME (GPU), as in eth0.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

if [ $# -lt 3 ]; then
    echo "usage: multi_node.sh NODES NODE_RANK MASTER_ADDR [MASTER_PORT] [options of run.py]" >&2
    exit 2
fi
nodes=$1 node_rank=$2 master_addr=$3
shift 3
master_port=29500
if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    master_port=$1
    shift
fi

# A process per GPU of this machine, or two on the CPU; all machines need the same number.
nproc=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or the processes fight for the cores
exec python -m torch.distributed.run \
    --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$nproc" \
    --master-addr "$master_addr" --master-port "$master_port" \
    "$here/../run.py" "$@"
