"""numpy, imported on first use, so a program that samples with plain lists does not load it.

This module imports only `_base.lazy`. Modules that need numpy import `np` and the types of arrays from here.
They must not read an attribute of `np` at import time, because that would import numpy at once. Their tables
therefore name dtypes by text ("<i4").
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tinker_sync._base.lazy import LazyModule

if TYPE_CHECKING:
    from typing import TypeAlias

    import numpy as np
    import numpy.typing as npt

    AnyArray: TypeAlias = npt.NDArray[Any]
    BoolArray: TypeAlias = npt.NDArray[np.bool_]
    Int32Array: TypeAlias = npt.NDArray[np.int32]
    Int64Array: TypeAlias = npt.NDArray[np.int64]
    Float32Array: TypeAlias = npt.NDArray[np.float32]
else:
    np = LazyModule("numpy")
    AnyArray = BoolArray = Int32Array = Int64Array = Float32Array = Any

__all__ = ["AnyArray", "BoolArray", "Float32Array", "Int32Array", "Int64Array", "is_array", "np"]


def is_array(value: object) -> bool:
    """Return True if a value is a numpy array.

    This function does not import numpy: if the value is an array, its creator has imported numpy.
    """
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, "ndarray", ()))
