"""What must be set before JAX starts, and where the example's network and data are. Import it first."""

import os
import pathlib
import sys

# On small machines LAPACK's threads stall, and XLA's CPU schedule can deadlock with convolutions.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "concurrency_optimized_scheduler" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_concurrency_optimized_scheduler=false".strip()
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "imagenet"))
