"""Types in signatures by their names: Sphinx spells `ArrayLike` and `ScalarOrSchedule` out as unions."""

import jax
from sphinx.util.typing import stringify_annotation

from kfac._optimizer.scale_by_kfac import ScalarOrSchedule

NAMES = {
    stringify_annotation(ScalarOrSchedule, "smart"): "ScalarOrSchedule",
    stringify_annotation(
        jax.typing.ArrayLike, "smart"
    ): "~jax.typing.ArrayLike",  # after the one that holds it
}


def _named(text):
    for spelt_out, name in NAMES.items():
        text = text and text.replace(spelt_out, name)
    return text


def _signature(app, what, name, obj, options, signature, returns):
    return _named(signature), _named(returns)


def setup(app):
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
