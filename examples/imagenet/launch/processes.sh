#!/bin/bash
# Trains in two processes (or more) on this machine's CPU, as several machines would: to try things out.
#
#   bash examples/imagenet/launch/processes.sh                            # two processes with two devices each
#   PROCESSES=4 DEVICES=1 bash examples/imagenet/launch/processes.sh --optimizer sgd --steps 20
#
# Options go to train.py.
set -uo pipefail

count=${PROCESSES:-2}
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=${DEVICES:-2}
pids=()
for ((i = 0; i < count; i++)); do
  "$python" "$here/../train.py" "$@" --coordinator "localhost:$port" --num-processes "$count" --process-id "$i" &
  pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
trap '' INT # The terminal sends it to all of them.

# One that fails leaves the others waiting.
status=0
for ((left = count; left > 0;)); do
  wait -n "${pids[@]}"
  code=$?
  ((code > 128)) && kill -0 "${pids[@]}" 2>/dev/null && continue # a signal came in between
  ((left--))
  if ((code != 0 && status == 0)); then
    status=$code
    sleep 10
    kill -KILL "${pids[@]}" 2>/dev/null
  fi
done
exit $status
