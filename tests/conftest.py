"""Set up the environment before JAX starts, and provide float64 on request."""

import atexit
import importlib.metadata
import os
import shutil
import tempfile

# On a few cores, several BLAS thread pools get in each other's way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Test files, workers and the scripts that they start (tests/runs.py) share compiled programs. The cache folder is new
# for each run, so no result depends on an earlier run. Workers and scripts inherit the folder's name.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="kfac-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

# Compiling optimised code takes longer than running these programs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
QUICKLY = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"].lower() in ("1", "true", "yes", "on")

# Operations' source locations take time to find and to compile, and no test needs them.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Compilation allocates and frees much memory. These settings apply to workers and scripts, which start later. They make
# malloc keep freed memory, and they disable fast bins, whose small pieces would be merged again and again.
_MALLOC = {"mmap_threshold": 2**25, "trim_threshold": 2**30, "top_pad": 2**26, "mxfast": 0}
os.environ.setdefault("GLIBC_TUNABLES", ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC.items()))

# XLA reads these flags when the first backend starts, so they are set here. Flags that the caller has set stay.
_XLA_FLAGS = {
    # Tests with a device axis run on four CPU devices.
    "--xla_force_host_platform_device_count": "4",
    # On two cores, several devices may take longer to meet in a collective than XLA waits before it aborts.
    "--xla_cpu_collective_call_terminate_timeout_seconds": "600",
    # XLA's concurrency-optimised CPU schedule runs independent operations at the same time. On a machine with few
    # cores, a convolution and a LAPACK call can then wait for each other's threads for ever.
    "--xla_cpu_enable_concurrency_optimized_scheduler": "false",
}
if QUICKLY:
    # JAX_DISABLE_MOST_OPTIMIZATIONS does not reach LLVM for programs that are jitted without compiler options, which
    # then take up to three times as long to compile.
    _XLA_FLAGS |= {"--xla_backend_optimization_level": "0", "--xla_llvm_disable_expensive_passes": "true"}
if QUICKLY and importlib.metadata.version("jaxlib").startswith("0.10."):
    # XLA's newer code generator for fused operations takes two to four times as long as the older generator. Only
    # jaxlib 0.10 has both, and there the older generator halves the tests' processor time. Newer versions abort at this
    # flag.
    _XLA_FLAGS["--xla_cpu_use_fusion_emitters"] = "false"
    # Compile each program as a whole. With 32 pieces for as many threads, the older code generator takes twice the
    # processor time. The newer generator takes equally long either way.
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
    """Skip the tests of the examples unless they are selected, because their imports are large."""
    return (collection_path.name.startswith("test_example") and "not examples" in config.option.markexpr) or None


LONGEST = (
    "zoo docs distributed interop sharded_models any_mesh wrappers properties repeated_owners transform "
    "planning train_step factors convolution observe obstacles "
    "example_simple example_runs example_wavefunction example_stops"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the slowest files first, so that no worker is left alone with one of them."""
    names = [f"test_{name}" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names))


def memory() -> float:
    """Return this process's resident memory in gigabytes, or infinity if the system does not report it."""
    held = Path("/proc/self/statm")
    return int(held.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9 if held.exists() else float("inf")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, because they stay alive until the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # traces make many objects; the default of 700 would collect too often


@pytest.fixture(scope="module", autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    """Clear JAX's caches after a test file if the process has grown large.

    Test files share the operations that JAX compiles one by one, so a smaller process keeps its caches. All compiled
    programs together would fill gigabytes.
    """
    yield
    if memory() > 1.3:
        jax.clear_caches()
        gc.collect()
        if hasattr(C_LIBRARY, "malloc_trim"):  # glibc keeps freed memory
            C_LIBRARY.malloc_trim(0)


@pytest.fixture
def x64() -> Iterator[None]:
    """Enable float64 for one test. It is off everywhere else."""
    with jax.enable_x64(True):
        yield
