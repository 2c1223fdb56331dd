"""Trains in two processes (or more) on this machine's CPU, as several machines would: to try things out.

python examples/imagenet/launch/two_processes.py                   # two processes with two devices each
python examples/imagenet/launch/two_processes.py --processes 4 --devices 1 -- --optimizer sgd --steps 20

What stands behind `--` goes to train.py.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of each process (default: 2)")
    parser.add_argument("args", nargs="*", metavar="-- OPTION", help="options of train.py")
    options = parser.parse_args()
    if min(options.processes, options.devices) < 1:
        parser.error("--processes and --devices must be at least 1")

    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices)}
    coordinator = f"localhost:{free_port()}"
    processes = []
    for number in range(options.processes):
        command = [sys.executable, str(TRAIN), *options.args, "--coordinator", coordinator,
                   "--num-processes", str(options.processes), "--process-id", str(number)]  # fmt: skip
        processes.append(subprocess.Popen(command, env=env))

    def forward(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The terminal sends it to all of them.
    # One that fails leaves the others waiting.
    while all(process.poll() in (None, 0) for process in processes):
        if all(process.poll() == 0 for process in processes):
            return 0
        time.sleep(0.1)
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return next(abs(process.returncode) for process in processes if process.returncode)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
