#!/bin/bash
# Train in two or more processes on this machine's CPU, to try a run on several machines.
#
#   bash examples/imagenet/launch/processes.sh                            # two processes with two devices each
#   PROCESSES=4 DEVICES=1 bash examples/imagenet/launch/processes.sh --optimizer sgd --steps 20
#
# train.py gets all options.
set -uo pipefail

count=${PROCESSES:-2}
here=$(dirname "$(readlink -f "$0")")
python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("localhost", 0)); print(s.getsockname()[1])')
export JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=${DEVICES:-2}
pids=()
for ((i = 0; i < count; i++)); do
  "$python" "$here/../train.py" "$@" --processes "localhost:$port" "$count" "$i" &
  pids+=($!)
done
# After a signal, all processes end together, with a checkpoint. If a process fails, the others would wait for it, so
# this script ends them after PATIENCE seconds.
stopped=
trap 'stopped=1; kill -TERM "${pids[@]}" 2>/dev/null' TERM
trap 'stopped=1' INT # the terminal sends the signal to all processes

for ((left = count; left > 0; left--)); do wait -n || break; done
if [[ -z $stopped ]]; then
  (sleep "${PATIENCE:-10}"; kill -KILL "${pids[@]}") >/dev/null 2>&1 &
  patience=$!
fi
status=0
for pid in "${pids[@]}"; do
  # A signal interrupts `wait`, not the process.
  wait "$pid" 2>/dev/null; code=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid" 2>/dev/null; code=$?; done
  ((status == 0 || status == 137)) && ((code != 0)) && status=$code
done
[[ -n ${patience:-} ]] && kill "$patience" 2>/dev/null
exit "$status"
