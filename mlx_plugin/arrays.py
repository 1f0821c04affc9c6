"""Arrays of a model, and their bits."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from deltasync.errors import StageError


def bits(array: mx.array) -> np.ndarray:
    """Return an array's bit patterns, unsigned, in its shape; they share its memory. Raises StageError."""
    try:
        return np.asarray(array.view(getattr(mx, f"uint{8 * array.itemsize}")))
    except RuntimeError as error:  # a graph is computed in the thread that built it
        raise StageError(
            f"The model has an array that is not computed: call mx.eval(model.parameters()). {error}"
        ) from None


def of_bits(bits_of: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Return a new array of these bit patterns."""
    return mx.array(bits_of).view(dtype)


def arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return a model's parameters by name."""
    return dict(tree_flatten(model.parameters()))
