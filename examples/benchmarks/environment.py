"""Set environment variables before JAX starts, and add the models of examples/imagenet to the path. Import it first."""

import os
import pathlib
import sys

# On small machines, LAPACK's threads stall, and XLA's CPU scheduler can deadlock on convolutions.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "concurrency_optimized_scheduler" not in os.environ.get("XLA_FLAGS", ""):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_concurrency_optimized_scheduler=false".strip()
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "imagenet"))
