"""numpy, imported when something of it is first used: a program that samples with lists never waits for it.

A leaf: it imports `_lazy` alone. Modules that need numpy import `np` and the types of arrays from here. An
attribute of `np` read while a module is imported would undo it all, so such modules read none then, and name
dtypes by text ("<i4") in their tables.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from tinker_sync._lazy import LazyModule

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
    """Return True for a numpy array, without importing numpy: its creator has imported it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, getattr(numpy, "ndarray", ()))
