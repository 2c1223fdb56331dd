#!/bin/bash
# Trains on all GPUs of several nodes, one process per GPU:
#
#   sbatch examples/imagenet/launch/slurm.sh --data-dir /path/to/imagenet --output /path/to/run
#
# from the root of the repository, with an environment that has `kfac-optax[examples]` and a JAX for the GPUs. Options go
# to train.py; the output folder must be one that all nodes see.
#SBATCH --job-name=kfac
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
# SIGTERM to all processes five minutes before the time is up: they write a checkpoint and end. Put `--resume` behind
# the options to go on in another job.
#SBATCH --signal=TERM@300

set -euo pipefail

# Each task sees its own GPU only, under number 0, whatever its number on the node.
export JAX_LOCAL_DEVICE_IDS=0
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" python examples/imagenet/train.py --distributed "$@"
