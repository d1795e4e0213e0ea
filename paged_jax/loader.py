"""The one door to the `models` package, found by where it is installed.

`models` is a common name: a script that stands beside a `models/` folder of its own would shadow ours. So it
is loaded from beside this package, under a name that nobody else uses, and `sys.modules["models"]` stays
the user's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import jax.numpy as jnp

from paged_jax import errors

if TYPE_CHECKING:
    from models.loading import LoadedModel
    from pallas_kernels import Implementation

_ALIAS = "paged_jax_models"


def models_module(name: str) -> ModuleType:
    """A module of the models package, such as "loading"."""
    if _ALIAS not in sys.modules:
        folder = Path(__file__).resolve().parent.parent / "models"
        spec = importlib.util.spec_from_file_location(
            _ALIAS, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder}: the models package, installed with paged_jax, is not there.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[_ALIAS] = module
        spec.loader.exec_module(module)
    return importlib.import_module(f"{_ALIAS}.{name}")


def load_model(
    model: str | os.PathLike[str],
    *,
    dtype: Callable[[str], jnp.dtype],
    implementation: Implementation = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """models.loading.load_model; raises errors of ours."""
    with our_errors():
        loading = models_module("loading")
        return loading.load_model(model, dtype=dtype, implementation=implementation, progress=progress)


@contextmanager
def our_errors() -> Iterator[None]:
    """Turn the errors of the models package into those of paged_jax.errors of the same names."""
    try:
        yield
    except models_module("errors").ModelError as error:
        raise getattr(errors, type(error).__name__, errors.PagedJaxError)(str(error)) from error
