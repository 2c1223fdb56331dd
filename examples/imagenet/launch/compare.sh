#!/bin/bash
# K-FAC and SGD with the same warm-up, batches and length, three seeds each, and one page of curves:
#
#   bash examples/imagenet/launch/compare.sh --data-dir photographs --image-size 32 --arch resnet20 --global-batch auto
#
# Options go to train.py, of all runs. A run that is stopped or fails ends it, with the run's exit code. Started again,
# it goes on where it was.
set -euo pipefail

folder=${FOLDER:-runs/compare}
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python}
for seed in ${SEEDS:-0 1 2}; do
  for optimizer in ${OPTIMIZERS:-kfac sgd}; do
    "$python" "$here/../train.py" "$@" --optimizer "$optimizer" --seed "$seed" --output "$folder/$optimizer-$seed"
  done
done
"$python" "$here/../report.py" "$folder"/*-* --output "$folder/curves.png"
