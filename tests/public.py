"""List the public names of the package."""

import inspect

import kfac

# The public modules of the package.
MODULES = ("curvature", "planning", "schedules", "state", "types")


def public_modules():
    return {"kfac": kfac} | {f"kfac.{name}": getattr(kfac, name) for name in MODULES}


def public_names(module):
    """Return the public functions and classes of a module.

    A module that defines names of its own also imports private helpers, so only its own definitions count.
    """
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    own = {name: value for name, value in found.items() if value.__module__ == module.__name__}
    return own or found


PUBLIC = public_names(kfac)
OBJECTS = {f"{prefix}.{name}": value for prefix, module in public_modules().items()
           for name, value in public_names(module).items()}  # fmt: skip
FUNCTIONS = sorted(name for name, value in OBJECTS.items() if inspect.isfunction(value))
