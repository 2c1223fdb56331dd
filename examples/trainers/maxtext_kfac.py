"""Train a small decoder with MaxText and K-FAC, next to MaxText's own AdamW and Muon.

python examples/trainers/maxtext_kfac.py             # run missing rows of results/maxtext.jsonl, print the table
python examples/trainers/maxtext_kfac.py report      # print the table
python examples/trainers/maxtext_kfac.py resume      # resume after 20 of 30 steps from MaxText's checkpoint
python examples/trainers/maxtext_kfac.py padding     # after `resume`: how much padding changes the statistics

The script copies the installed `maxtext` package to --folder and applies maxtext-0.2.5.patch to the copy. Training runs
in processes of their own, on four simulated devices with FSDP, a scan over layers and remat. The text is the Python
standard library. Each top-level class or function is a document, and MaxText packs several documents into a row.
"""

import argparse
import ast
import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VERSION = "0.2.5"
PATCH = HERE / f"maxtext-{VERSION}.patch"
RESULTS = HERE / "results" / "maxtext.jsonl"

STEPS = 60
RATES = {"kfac": (0.025, 0.05, 0.1), "adamw": (0.003, 0.01, 0.03), "muon": (0.01, 0.03, 0.1)}
VOCABULARY = 1024

# The decoder has 0.4 million parameters. A batch has 16 rows of 128 tokens.
CONFIG = {
    "hardware": "cpu", "skip_jax_distributed_system": True, "log_config": False, "enable_tensorboard": False,
    "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 16, "base_mlp_dim": 256,
    "base_num_decoder_layers": 4, "vocab_size": VOCABULARY, "attention": "dot_product", "dtype": "float32",
    "max_target_length": 128, "per_device_batch_size": 4, "ici_fsdp_parallelism": 4,
    "scan_layers": True, "remat_policy": "full",
    "dataset_type": "grain", "grain_file_type": "parquet", "grain_worker_count": 0, "packing": True,
    "tokenizer_type": "sentencepiece", "adam_weight_decay": 0.0,
}  # fmt: skip
# The length of K-FAC's steps does not depend on the gradient's norm, so a clip has nothing to protect.
OWN = {"kfac": {"gradient_clipping_threshold": 0.0}}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONDONTWRITEBYTECODE": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}  # fmt: skip


def patched(folder: Path) -> Path:
    """Return a folder that holds a patched copy of the installed package."""
    copy = folder / f"maxtext-{VERSION}"
    if not (copy / "maxtext").is_dir():
        found = importlib.metadata.version("maxtext")
        if found != VERSION:
            raise SystemExit(f"the patch is for maxtext {VERSION}, but {found} is installed")
        package = Path(str(importlib.metadata.distribution("maxtext").locate_file("maxtext")))
        shutil.rmtree(copy, ignore_errors=True)
        unfinished = folder / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(package, unfinished / "maxtext", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["patch", "--quiet", "-p1", "-i", str(PATCH)], cwd=unfinished, check=True)
        unfinished.rename(copy)
    return copy


def documents() -> Iterator[str]:
    """Yield the top-level classes and functions of the standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if "site-packages" in name or "test" in name:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            nodes = ast.parse(text).body
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        lines = text.splitlines(keepends=True)
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def data(folder: Path) -> tuple[Path, Path]:
    """Return the files with the shuffled documents and with a tokenizer, which the first call writes."""
    import pyarrow
    import pyarrow.parquet
    import sentencepiece

    text, tokenizer = folder / "text.parquet", folder / "tokenizer.model"
    if not text.is_file() or not tokenizer.is_file():
        found = list(documents())
        random.Random(0).shuffle(found)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for document in found[:2000] for line in document.splitlines()),
            model_prefix=str(tokenizer.with_suffix("")), vocab_size=VOCABULARY, model_type="bpe", byte_fallback=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            num_threads=1, minloglevel=2,
        )  # fmt: skip
        pyarrow.parquet.write_table(pyarrow.table({"text": found}), text)
    return text, tokenizer


def words(folder: Path, optimizer: str, rate: float, name: str, steps: int, **options: Any) -> list[str]:
    """Return MaxText's command line without the program: the file with the defaults, and our settings."""
    text, tokenizer = data(folder)
    config: dict[str, Any] = {
        **CONFIG, "run_name": name, "base_output_directory": folder / "out", "grain_train_files": text,
        "tokenizer_path": tokenizer, "metrics_file": folder / f"{name}.metrics", "opt_type": optimizer,
        "learning_rate": rate, "steps": steps, "enable_checkpointing": False, **OWN.get(optimizer, {}), **options,
    }  # fmt: skip
    defaults = patched(folder) / "maxtext" / "configs" / "base.yml"
    return [str(defaults), *(f"{key}={value}" for key, value in config.items())]


def train(folder: Path, optimizer: str, rate: float, name: str, steps: int, **options: Any) -> list[float]:
    """Train in a process of its own, and return the loss of each step."""
    metrics = folder / f"{name}.metrics"
    metrics.unlink(missing_ok=True)
    command = [sys.executable, "-m", "maxtext.trainers.pre_train.train"]
    command += words(folder, optimizer, rate, name, steps, **options)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(patched(folder))}
    with (folder / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [record["learning/loss"] for record in records if "learning/loss" in record]


def rows(folder: Path, results: Path) -> None:
    """Run what `results` does not have yet, and append a line for each run."""
    known = {(record["optimizer"], record["rate"]) for record in read(results)}
    for optimizer, rates in RATES.items():
        for rate in rates:
            if (optimizer, rate) in known:
                continue
            began = time.perf_counter()
            losses = train(folder, optimizer, rate, f"{optimizer}-{rate:g}", STEPS)
            seconds = round(time.perf_counter() - began)
            record = {"optimizer": optimizer, "rate": rate, "seconds": seconds, "losses": [round(x, 4) for x in losses]}
            results.parent.mkdir(parents=True, exist_ok=True)
            with results.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(f"{optimizer} {rate:g}: {seconds} s", flush=True)


def read(results: Path) -> list[dict[str, Any]]:
    lines = results.read_text().splitlines() if results.is_file() else []
    return [json.loads(line) for line in lines]


def report(results: Path) -> None:
    """Print the loss at some steps, as the mean over five steps that end there."""
    marks = [step for step in (10, 20, 30, 40, 50, 60) if step <= STEPS]
    print(f"{'optimizer':9} {'rate':>6}" + "".join(f"{f'step {mark}':>9}" for mark in marks))
    for record in read(results):
        means = [sum(record["losses"][mark - 5 : mark]) / 5 for mark in marks]
        cells = "".join(f"{mean:9.3f}" for mean in means)
        print(f"{record['optimizer']:9} {record['rate']:6g}{cells}")


def resume(folder: Path, optimizer: str, rate: float) -> None:
    """Compare 30 steps in a row with 20 steps, a restart from MaxText's checkpoint, and the last 10 steps."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    options = {"enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": 1000}
    whole = train(folder, optimizer, rate, "whole", 30, learning_rate_schedule_steps=30, **options)
    first = train(folder, optimizer, rate, "parts", 20, learning_rate_schedule_steps=30, **options)
    second = train(folder, optimizer, rate, "parts", 30, learning_rate_schedule_steps=30, **options)
    parts = first + second
    differences = [abs(a - b) for a, b in zip(whole, parts, strict=True)]
    print("in a row:", " ".join(f"{loss:.4f}" for loss in whole))
    print("resumed: ", " ".join(f"{loss:.4f}" for loss in parts))
    print(f"largest difference of a loss: {max(differences):.2g}")


def padding(folder: Path) -> None:
    """Print how much the padded positions change the factors `A`.

    All padded positions hold the same token, so a batch without documents has their part of `A`. The parameters come
    from the last checkpoint of `resume`.
    """
    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, str(patched(folder)))
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from maxtext.configs import pyconfig
    from maxtext.optimizers import kfac_optimizer
    from maxtext.utils import train_utils

    import kfac

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText does
    checkpoint = folder / "out" / "whole" / "checkpoints" / "29" / "items"
    for packing in (True, False):
        options = {"packing": packing, "enable_checkpointing": True, "load_full_state_path": checkpoint}
        config = pyconfig.initialize(["", *words(folder, "kfac", 0.05, "padding", 31, **options)])
        _, _, _, model, mesh, _, _, loader, _, _, state = train_utils.setup_train_loop(config, None)
        batch = loader.load_next_batch()
        loss_fn, _, layers = kfac_optimizer.find(config, model, mesh)
        _, params, rest = nnx.split(state.model, nnx.Param, ...)  # type: ignore[misc]
        share = float(jnp.mean(batch["inputs_segmentation"] == 0))
        with jax.set_mesh(mesh):
            measure = jax.jit(lambda batch: kfac.statistics(loss_fn, layers, fraction=1)(params, rest, batch).whole())  # noqa: B023
            found, empty = measure(batch), measure(jax.tree.map(jnp.zeros_like, batch))
        print(f"packing={packing}: {share:.1%} of the positions are padding", flush=True)
        for name, block in found.items():
            A = (block.A - share * empty[name].A) / (1 - share)
            error = float(jnp.linalg.norm(block.A - A) / jnp.linalg.norm(A))
            print(f"  {name:48} relative error of A {error:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=["all", "report", "resume", "padding"])
    parser.add_argument("--folder", type=Path, default=Path("runs/maxtext"), help="for the copy, the text and logs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file with a line for each run")
    parser.add_argument("--optimizer", default="kfac", choices=list(RATES), help="for `resume`")
    parser.add_argument("--rate", type=float, default=0.05, help="for `resume`")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.what != "report":
        folder.mkdir(parents=True, exist_ok=True)
    if options.what == "resume":
        resume(folder, options.optimizer, options.rate)
        return
    if options.what == "padding":
        padding(folder)
        return
    if options.what == "all":
        rows(folder, options.results)
    report(options.results)


if __name__ == "__main__":
    main()
