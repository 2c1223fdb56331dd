"""Named configurations for ImageNet, selected by `--config NAME`: the fields in which each differs from the defaults.

The K-FAC ones are those of Osawa et al. 2019 (https://arxiv.org/abs/1811.12019): a batch of 32 images per device and
micro-batch, ResNet-50-D (`--arch resnet50` for the plain network of their paper). The others are first-order baselines
at the same batches. Whoever measures one of them with this code writes the result into its docstring, with the
hardware; a number that was only hoped for has no place here.
"""

import math
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]


def bs4k() -> Fields:
    """K-FAC, batch 4,096.

    Published: 75.9% top-1 in 10,948 steps (35 epochs). Measured with this code: nothing yet.
    """
    return _kfac(4096, 8.18e-3, 0.997, 2.5e-4, power=11, begin=1, end=53, alpha=0.4, epochs=35)


def bs8k() -> Fields:
    """K-FAC, batch 8,192.

    Published: 76.4% top-1 in 5,478 steps (35 epochs). Measured with this code: nothing yet.
    """
    return _kfac(8192, 1.25e-2, 0.993, 2.5e-4, power=8, begin=1, end=53.5, alpha=0.4, epochs=35)


def bs16k() -> Fields:
    """K-FAC, batch 16,384.

    Published: 76.6% top-1 in 2,737 steps (35 epochs). Measured with this code: nothing yet.
    """
    return _kfac(16384, 2.5e-2, 0.985, 2.5e-4, power=8, begin=1, end=53.5, alpha=0.4, epochs=35)


def bs32k() -> Fields:
    """K-FAC, batch 32,768.

    Published: 76.9% top-1 in 1,760 steps (45 epochs). Measured with this code: nothing yet.
    """
    return _kfac(32768, 3e-2, 0.97, 2e-4, power=3.5, begin=1.5, end=49.5, alpha=0.6, epochs=45)


def bs64k() -> Fields:
    """K-FAC, batch 65,536.

    Published: 76.3% top-1 in 1,173 steps (60 epochs). Measured with this code: nothing yet.
    """
    return _kfac(65536, 4e-2, 0.95, 1.5e-4, power=2.9, begin=2, end=64.5, alpha=0.6, epochs=60)


def bs128k() -> Fields:
    """K-FAC, batch 131,072.

    Published: 75.0% top-1 in 782 steps (80 epochs); with plain ResNet-50 75% in 978 steps (100 epochs). Measured with
    this code: nothing yet.
    """
    return _kfac(131072, 7e-2, 0.93, 1e-4, power=3, begin=1, end=95, alpha=1.0, epochs=80)


def lars_bs4k() -> Fields:
    """LARS, batch 4,096.

    Published (MLPerf reference point): 75.9% top-1 in 12,511 steps (40 epochs). The learning rate and the warm-up here
    are starting points, not those of that run. Measured with this code: nothing yet.
    """
    return _lars(4096, epochs=40, warmup=5)


def lars_bs8k() -> Fields:
    """LARS, batch 8,192.

    Published (MLPerf reference point): 75.9% top-1 in 6,568 steps (42 epochs). The learning rate and the warm-up here
    are starting points, not those of that run. Measured with this code: nothing yet.
    """
    return _lars(8192, epochs=42, warmup=8)


def lars_bs16k() -> Fields:
    """LARS, batch 16,384.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lars(16384, epochs=48, warmup=12)


def lars_bs32k() -> Fields:
    """LARS, batch 32,768.

    Published (MLPerf reference point): 75.9% top-1 in 2,189 steps (56 epochs). The learning rate and the warm-up here
    are starting points, not those of that run. Measured with this code: nothing yet.
    """
    return _lars(32768, epochs=56, warmup=18)


def lars_bs64k() -> Fields:
    """LARS, batch 65,536.

    Published (MLPerf reference point): 75.9% top-1 in 1,652 steps (84.5 epochs). The learning rate and the warm-up here
    are starting points, not those of that run. Measured with this code: nothing yet.
    """
    return _lars(65536, epochs=84.5, warmup=30)


def lars_bs128k() -> Fields:
    """LARS, batch 131,072.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lars(131072, epochs=100, warmup=35)


def nesterov_bs4k() -> Fields:
    """Nesterov momentum, batch 4,096.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _nesterov(4096, epochs=50, warmup=5)


def nesterov_bs8k() -> Fields:
    """Nesterov momentum, batch 8,192.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _nesterov(8192, epochs=50, warmup=8)


def nesterov_bs16k() -> Fields:
    """Nesterov momentum, batch 16,384.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _nesterov(16384, epochs=56, warmup=12)


def nesterov_bs32k() -> Fields:
    """Nesterov momentum, batch 32,768.

    Published (Nado et al. 2021): 75.9% top-1 in 2,512 steps (64.2 epochs), tuned as hard as LARS. The learning rate and
    the warm-up here are starting points, not those of that run. Measured with this code: nothing yet.
    """
    return _nesterov(32768, epochs=64.2, warmup=16)


def nesterov_bs64k() -> Fields:
    """Nesterov momentum, batch 65,536.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _nesterov(65536, epochs=90, warmup=30)


def nesterov_bs128k() -> Fields:
    """Nesterov momentum, batch 131,072.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _nesterov(131072, epochs=100, warmup=35)


def lamb_bs4k() -> Fields:
    """LAMB, batch 4,096.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lamb(4096, warmup=2.5)


def lamb_bs8k() -> Fields:
    """LAMB, batch 8,192.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lamb(8192, warmup=5)


def lamb_bs16k() -> Fields:
    """LAMB, batch 16,384.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lamb(16384, warmup=10)


def lamb_bs32k() -> Fields:
    """LAMB, batch 32,768.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lamb(32768, warmup=20)


def lamb_bs64k() -> Fields:
    """LAMB, batch 65,536.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lamb(65536, warmup=30)


def lamb_bs128k() -> Fields:
    """LAMB, batch 131,072.

    Published: nothing that this follows; all its values are starting points. Measured with this code: nothing yet.
    """
    return _lamb(131072, warmup=40)


def _kfac(
    batch: int, rate: float, momentum: float, damping: float,
    *, power: float, begin: float, end: float, alpha: float, epochs: float,
) -> Fields:  # fmt: skip
    """What all of Osawa et al.'s runs have in common: the statistics of the current batch alone, in every step."""
    return _shared(batch, epochs) | dict(
        optimizer="kfac", learning_rate=rate, warmup_epochs=0.0, decay_power=power, decay_begin=begin, decay_end=end,
        momentum=momentum, nesterov=False, momentum_coupling="ratio", rate_in_momentum=True, damping=damping,
        # Their code multiplied by 16; their configurations say 64.
        unitwise_damping=16.0, factor_decay=0.0, norm_constraint=0.0, trust_ratio=0.0, weight_decay=0.0, rescale=True,
        crop="squashed", arch="resnet50d", init="he", norm_epsilon=2e-5, mixup_alpha=alpha, erasing="in-place",
        label_smoothing=0.0, divide_by_std=False,
    )  # fmt: skip


def _lars(batch: int, *, epochs: float, warmup: float) -> Fields:
    return _shared(batch, epochs) | dict(
        optimizer="lars", learning_rate=round(29 * math.sqrt(batch / 32768), 2), warmup_epochs=float(warmup),
        momentum=0.93, weight_decay=1e-4, label_smoothing=0.1,
    )  # fmt: skip


def _nesterov(batch: int, *, epochs: float, warmup: float) -> Fields:
    return _shared(batch, epochs) | dict(
        optimizer="sgd", nesterov=True, learning_rate=round(7 * math.sqrt(batch / 32768), 2),
        warmup_epochs=float(warmup), momentum=0.976, weight_decay=5e-5, label_smoothing=0.1,
    )  # fmt: skip


def _lamb(batch: int, *, warmup: float) -> Fields:
    return _shared(batch, 90) | dict(
        optimizer="lamb", learning_rate=round(0.04 * math.sqrt(batch / 32768), 4), warmup_epochs=float(warmup),
        weight_decay=1e-2, label_smoothing=0.1,
    )  # fmt: skip


def _shared(batch: int, epochs: float) -> Fields:
    return dict(
        global_batch=batch, local_batch=32, epochs=float(epochs), schedule="polynomial", arch="resnet50",
        sync_batch_norm=False,
    )  # fmt: skip


CONFIGS: dict[str, Callable[[], Fields]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        bs4k, bs8k, bs16k, bs32k, bs64k, bs128k,
        lars_bs4k, lars_bs8k, lars_bs16k, lars_bs32k, lars_bs64k, lars_bs128k,
        nesterov_bs4k, nesterov_bs8k, nesterov_bs16k, nesterov_bs32k, nesterov_bs64k, nesterov_bs128k,
        lamb_bs4k, lamb_bs8k, lamb_bs16k, lamb_bs32k, lamb_bs64k, lamb_bs128k,
    )
}  # fmt: skip
