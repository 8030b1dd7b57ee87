"""Compressed sparse rows (CSR) over numpy: compression of 2-D arrays, expansion, and checks of indices.

`stored` has the listed values row by row. `crow` has the index in `stored` at which each row begins, and last
the number of stored values. `col` has the column of each value. `crow` and `col` are int64. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_sync._base.numpy import AnyArray, Int64Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import wire_array


def compress(dense: AnyArray, pad: int) -> tuple[AnyArray, Int64Array, Int64Array] | None:
    """Return a 2-D array in CSR form (stored, crow, col) without cells equal to `pad`.

    Return None if that form does not have fewer numbers than the array.
    """
    listed = dense != pad
    nnz = int(np.count_nonzero(listed))
    rows, columns = dense.shape
    if rows + 1 + 2 * nnz >= rows * columns:
        return None
    crow = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.count_nonzero(listed, axis=1), out=crow[1:])
    col = np.nonzero(listed)[1].astype(np.int64, copy=False)
    return dense[listed], crow, col


def expand(
    stored: AnyArray, shape: Sequence[int], crow: Int64Array, col: Int64Array, pad: AnyArray
) -> AnyArray:
    """Return the dense array of a CSR form, with `pad`, an array of one value, in cells that are not stored.

    The indices must be valid by `csr_problem`.

    Raises:
        InvalidInputError: a cell is listed twice.
    """
    rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(crow))
    _refuse_duplicates(rows * shape[1] + col, shape)
    dense: AnyArray = np.full(shape, pad, dtype=stored.dtype)
    dense[rows, col] = stored
    return dense


def _refuse_duplicates(cells: Int64Array, shape: Sequence[int]) -> None:
    """Raise an error for a cell that is listed twice, because its value is ambiguous."""
    if bool(np.all(cells[1:] > cells[:-1])):
        return  # in order, the usual case
    order = np.sort(cells)
    twice = order[1:] == order[:-1]
    if twice.any():
        row, column = divmod(int(order[int(np.argmax(twice))]), shape[1])
        raise InvalidInputError(f"TensorData.sparse_col_indices: cell [{row}][{column}] is listed twice")


def check_indices(
    stored: AnyArray, shape: Sequence[int] | None, crow: Any, col: Any
) -> tuple[Int64Array, Int64Array]:
    """Convert a user's CSR indices to arrays.

    Raises:
        InvalidInputError: the shape is not that of a matrix, or the indices are incomplete or do not fit the
            shape or the values.
    """
    if crow is None or col is None:
        raise InvalidInputError(
            "TensorData: sparse_crow_indices and sparse_col_indices go together; one is missing"
        )
    if shape is None or len(shape) != 2 or min(shape) < 0:
        raise InvalidInputError(f"TensorData.shape: a sparse tensor needs its 2-D dense shape, got {shape}")
    crow = wire_array(crow, "TensorData.sparse_crow_indices", "int64")
    col = wire_array(col, "TensorData.sparse_col_indices", "int64")
    problem = csr_problem(stored.size, shape, crow, col)
    if problem is not None:
        raise InvalidInputError(f"TensorData.{problem}")
    return crow, col


def csr_problem(nnz: int, shape: Sequence[int], crow: Int64Array, col: Int64Array) -> str | None:
    """Describe the fault in the CSR indices of a matrix with `nnz` stored values; None if they are valid."""
    rows, columns = shape
    if crow.ndim != 1 or crow.size != rows + 1:
        return f"sparse_crow_indices: {rows} rows need {rows + 1} pointers, got {crow.size}"
    if col.ndim != 1 or col.size != nnz:
        return f"sparse_col_indices: {nnz} values need as many columns, got {col.size}"
    if crow[0] != 0 or crow[-1] != nnz or bool(np.any(crow[1:] < crow[:-1])):
        return f"sparse_crow_indices: must rise from 0 to the {nnz} stored values"
    if nnz and (int(col.min()) < 0 or int(col.max()) >= columns):
        return f"sparse_col_indices: columns must lie in 0 … {columns - 1}"
    return None
