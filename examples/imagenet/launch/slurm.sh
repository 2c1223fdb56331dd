#!/bin/bash
# Train on all GPUs of several nodes, with a process per GPU:
#
#   sbatch examples/imagenet/launch/slurm.sh --config bs32k --data-dir /path/to/imagenet --output /path/to/run
#
# Submit it from the root of the repository, in an environment with `kfac-optax[examples]` and a JAX for the GPUs.
# train.py gets all options. All nodes must see the output folder. The same command resumes the run, or ends at once if
# the run is done. A job ends with 0 if the run is done, and with 143 if its time is up. So
# `sbatch --dependency=afternotok:JOB ...` makes a chain.
#SBATCH --job-name=kfac
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Send SIGTERM to all processes five minutes before the time is up. They write a checkpoint and end.
#SBATCH --signal=TERM@300

set -euo pipefail

# Every task sees all GPUs on its node, because NCCL needs them for direct transfers. Each task uses the GPU with its
# own number. jax.distributed reads these settings from SLURM's environment.
exec srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --gpu-bind=none \
  python examples/imagenet/train.py --distributed "$@"
