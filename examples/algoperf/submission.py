"""Submit K-FAC to AlgoPerf: implement the benchmark's functions with `kfac.train_step`.

The submission supports both rulesets. With `--tuning_ruleset=external`, the hyperparameters come from
`tuning_search_space.json`. With `--tuning_ruleset=self`, they come from `SELF_TUNING`. The benchmark's documentation is
https://github.com/mlcommons/algorithmic-efficiency/blob/main/docs/DOCUMENTATION.md
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax

import kfac
from algoperf import spec  # type: ignore[attr-defined]

# The package recommends this rate. The schedule is shorter than the baseline's, because K-FAC needs fewer steps.
SELF_TUNING = {"learning_rate": 0.1, "weight_decay": 0.0, "label_smoothing": 0.0, "dropout_rate": 0.0, "steps": 0.75}

# The largest batches in the reference submissions. They fit in the memory of the benchmark's machine.
BATCH_SIZES = {
    "criteo1tb": 262_144, "fastmri": 32, "imagenet_resnet": 1024, "imagenet_vit": 1024, "librispeech_conformer": 256,
    "librispeech_deepspeech": 256, "ogbg": 512, "wmt": 128, "finewebedu_lm": 64, "mnist": 128, "cifar": 1024,
}  # fmt: skip


def _settings(hyperparameters: Any) -> SimpleNamespace:
    given = hyperparameters._asdict() if hyperparameters is not None else {}
    return SimpleNamespace(**{**SELF_TUNING, **given})


def mean_loss(workload: Any, settings: Any, params: Any, model_state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
    """Return the mean loss over a batch's valid examples, and the model's new state. K-FAC differentiates this loss."""
    logits, new_state = workload.model_fn(
        params, batch, model_state, spec.ForwardPassMode.TRAIN, rng, update_batch_norm=True,
        dropout_rate=settings.dropout_rate,
    )  # fmt: skip
    loss = workload.loss_fn(
        label_batch=batch["targets"], logits_batch=logits, mask_batch=batch.get("weights"),
        label_smoothing=settings.label_smoothing,
    )  # fmt: skip
    return loss["summed"] / loss["n_valid_examples"], new_state


class Step:
    """The step of `kfac.train_step` with a list of arrays as state, because AlgoPerf's checkpoints can hold a list."""

    def __init__(self, step: Any) -> None:
        self.step, self.structure = step, None

    def __call__(self, params: Any, leaves: Any, *args: Any) -> tuple[Any, Any, Any]:
        if self.structure is None:  # the first step, because K-FAC's state depends on a batch
            fresh, self.structure = jax.tree.flatten(self.step.init(params, *args))
            # After a restart, AlgoPerf's checkpoint is a dictionary whose keys are the list's indices.
            leaves = fresh if leaves is None else [leaves[str(k)] for k in range(len(fresh))]
        state = jax.tree.unflatten(self.structure, leaves)
        params, state, value = self.step(params, state, *args)
        return params, jax.tree.leaves(state), value

    def diagnostics(self, leaves: Any) -> dict[str, float]:
        found = kfac.diagnostics(jax.tree.unflatten(self.structure, leaves))
        return {name: float(value) for name, value in found.items()}


def init_optimizer_state(workload: Any, model_params: Any, model_state: Any, hyperparameters: Any, rng: Any) -> Any:
    """Return None as the state, and the step. The first step initializes the state."""
    del model_params, model_state, rng
    settings = _settings(hyperparameters)
    step = kfac.train_step(
        functools.partial(mean_loss, workload, settings),
        kfac.schedules.warmup_linear_decay(settings.learning_rate, max(2, round(settings.steps * workload.step_hint))),
        has_aux=True,
        weight_decay=settings.weight_decay or None,
        batch_argnums=2,
    )
    return None, Step(step)


def update_params(
    workload: Any,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    batch: dict[str, Any],
    loss_type: Any,
    optimizer_state: Any,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
    train_state: dict[str, Any] | None = None,
) -> tuple[Any, Any, Any]:
    """Train for a step; return the optimizer's state, the parameters and the model's state."""
    del current_params_types, hyperparameters, loss_type, eval_results, train_state
    state, step = optimizer_state
    batch = {name: value for name, value in batch.items() if value is not None}
    params, state, (loss, model_state) = step(current_param_container, state, model_state, batch, rng)
    if global_step % 100 == 0 and workload.metrics_logger is not None:
        workload.metrics_logger.append_scalar_metrics({"loss": float(loss), **step.diagnostics(state)}, global_step)
    return (state, step), params, model_state


def prepare_for_eval(
    workload: Any,
    current_param_container: Any,
    current_params_types: Any,
    model_state: Any,
    hyperparameters: Any,
    loss_type: Any,
    optimizer_state: Any,
    eval_results: list[tuple[int, float]],
    global_step: int,
    rng: Any,
) -> tuple[Any, Any, Any]:
    """Return the state and the last step's parameters unchanged."""
    del workload, current_params_types, hyperparameters, loss_type, eval_results, global_step, rng
    jax.block_until_ready(current_param_container)
    return optimizer_state, current_param_container, model_state


def get_batch_size(workload_name: str) -> int:
    """Return the batch size for a workload or for the base workload of a variant."""
    for name, size in BATCH_SIZES.items():
        if workload_name == name or workload_name.startswith(f"{name}_"):
            return size
    raise ValueError(f"workload_name must be one of {', '.join(BATCH_SIZES)} or a variant, but is {workload_name!r}")


def data_selection(
    workload: Any,
    input_queue: Iterator[dict[str, Any]],
    optimizer_state: Any,
    current_param_container: Any,
    model_state: Any,
    hyperparameters: Any,
    global_step: int,
    rng: Any,
) -> dict[str, Any]:
    """Return the next batch."""
    del workload, optimizer_state, current_param_container, model_state, hyperparameters, global_step, rng
    return next(input_queue)
