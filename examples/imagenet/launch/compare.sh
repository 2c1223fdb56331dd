#!/bin/bash
# Compare K-FAC and SGD with the same warm-up, batches and length, and three seeds each. Plot all curves on a page:
#
#   bash examples/imagenet/launch/compare.sh --data-dir photographs --image-size 32 --arch resnet20 --global-batch auto
#
# Every run of train.py gets the options. If a run is stopped or fails, this script ends with the run's exit code. The
# same command resumes the comparison.
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
