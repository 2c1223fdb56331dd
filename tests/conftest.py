"""What every test needs before jax starts: its environment, and float64 on request."""

import atexit
import importlib.metadata
import os
import shutil
import tempfile

# Several BLAS thread pools on a few cores get in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What is compiled is kept for the other files and workers, and for the scripts they start (tests/runs.py), in a folder
# that is as old as this run: nothing depends on what an earlier run compiled. All of them inherit its name.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kfac-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Optimised code takes longer to compile than these programs to run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
QUICKLY = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"].lower() in ("1", "true", "yes", "on")

# Where in a source file an operation stands takes time to find and to compile, and no test asks.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Compiling allocates and frees much. Workers and scripts, which start after this, keep what they have been given, and
# no small pieces apart, which would be put together again and again.
_MALLOC = {"mmap_threshold": 2**25, "trim_threshold": 2**30, "top_pad": 2**26, "mxfast": 0}
os.environ.setdefault("GLIBC_TUNABLES", ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()))

# Flags count when the first backend starts, hence here. A flag that the caller has set stays.
_XLA_FLAGS = {
    # Tests over a device axis run on four CPU devices.
    "--xla_force_host_platform_device_count": "4",
    # Several devices on two cores may take longer to meet in a collective than XLA waits before it aborts.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # XLA's concurrency-optimised CPU schedule runs independent operations at the same time. On a
    # machine with few cores a convolution and a LAPACK call can then wait for each other's threads
    # for ever.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
if QUICKLY and importlib.metadata.version("jaxlib").startswith("0.10."):
    # XLA's newer code generator for fused operations needs two to four times as long as the older one. Only jaxlib 0.10
    # has both, so the tests take half the processor time there. Newer versions abort at this flag.
    _XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
    # Compile a program in one piece. In 32 pieces, for as many threads, the older code generator takes twice the
    # processor time. The newer one takes as long either way.
    _XLA_FLAGS["--xla_cpu_parallel_codegen_split_count"] = "1"
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", "")]
    + [f"{k}={v}" for k, v in _XLA_FLAGS.items() if k not in os.environ.get("XLA_FLAGS", "")]
).strip()

import ctypes  # noqa: E402
import gc  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402

C_LIBRARY = ctypes.CDLL(None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run without the tests of the examples does not import what they import, which is large."""
    return (collection_path.name.startswith("test_example") and "not examples" in config.option.markexpr) or None


LONGEST = (
    "zoo docs distributed interop sharded_models any_mesh wrappers properties repeated_owners transform "
    "plan train_step example_simple example_runs example_wavefunction example_stops"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin, so that no worker is left alone with one of them."""
    names = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))


def memory() -> float:
    """Gigabytes that this process holds, where the system says it."""
    held = Path("/proc/self/statm")
    return int(held.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9 if held.exists() else float("inf")


def pytest_collection_finish() -> None:
    """What was imported stays, and no collection of garbage needs to go through it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # traces make so many objects that 700 are no reason to go through them


@pytest.fixture(scope="module", autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    """Files share operations that JAX compiles one by one; all that they compile fills gigabytes."""
    yield
    if memory() > 0.9:
        jax.clear_caches()
        gc.collect()
        if hasattr(C_LIBRARY, "malloc_trim"):  # glibc keeps what is freed
            C_LIBRARY.malloc_trim(0)


@pytest.fixture
def x64() -> Iterator[None]:
    """Switches float64 on for one test; everywhere else it stays off."""
    with jax.enable_x64(True):
        yield
