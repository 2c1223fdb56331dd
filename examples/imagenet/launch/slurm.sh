#!/bin/bash
# Trains on all GPUs of several nodes, one process per GPU:
#
#   sbatch examples/imagenet/launch/slurm.sh --config bs32k --data-dir /path/to/imagenet --output /path/to/run
#
# from the root of the repository, with an environment that has `kfac-optax[examples]` and a JAX for the GPUs. Options go
# to train.py; the output folder must be one that all nodes see. Submitted or queued again, the same line goes on with
# the run in it, and ends at once when that is done. A job that ran out of time ends with 143, one that is done with 0:
# a chain is `sbatch --dependency=afternotok:JOB ...`.
#SBATCH --job-name=kfac
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to all processes five minutes before the time is up: they write a checkpoint and end.
#SBATCH --signal=TERM@300

set -euo pipefail

# Every task sees all GPUs of its node, which NCCL needs for the direct way between them, and uses the one of its number:
# jax.distributed finds both in SLURM's environment.
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none \
  python examples/imagenet/train.py --distributed "$@"
