"""Compressed sparse rows (CSR) over numpy: what is stored of a 2-D array, and the way back.

`stored` are the listed values row by row, `crow` says where each row begins and ends in them, `col` says the
column of each. Arrays in, arrays out; the two index arrays are int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import AnyArray, Int64Array, wire_array


def compressed(dense: AnyArray, pad: int) -> tuple[AnyArray, Int64Array, Int64Array] | None:
    """The cells of a 2-D array that differ from `pad`, as stored, crow, col; None if no smaller."""
    listed = dense != pad
    nnz = int(np.count_nonzero(listed))
    rows, columns = dense.shape
    if rows + 1 + 2 * nnz >= rows * columns:
        return None
    crow = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(np.count_nonzero(listed, axis=1), out=crow[1:])
    col = np.nonzero(listed)[1].astype(np.int64, copy=False)
    return dense[listed], crow, col


def expanded(
    stored: AnyArray, shape: Sequence[int], crow: Int64Array, col: Int64Array, pad: AnyArray
) -> AnyArray:
    """The dense array of checked indices, with `pad` in every cell that is not listed."""
    rows = np.repeat(np.arange(shape[0], dtype=np.int64), np.diff(crow))
    _refuse_twice(rows * shape[1] + col, shape)
    dense: AnyArray = np.full(shape, pad, dtype=stored.dtype)
    dense[rows, col] = stored
    return dense


def _refuse_twice(cells: Int64Array, shape: Sequence[int]) -> None:
    """An error if a cell is listed twice: nobody knows which of the values is meant."""
    if bool(np.all(cells[1:] > cells[:-1])):
        return  # in order, as everybody writes them
    order = np.sort(cells)
    twice = order[1:] == order[:-1]
    if twice.any():
        row, column = divmod(int(order[int(np.argmax(twice))]), shape[1])
        raise InvalidInputError(f"TensorData.sparse_col_indices: cell [{row}][{column}] is listed twice")


def checked_indices(
    stored: AnyArray, shape: Sequence[int] | None, crow: Any, col: Any
) -> tuple[Int64Array, Int64Array]:
    """What a user gave as indices, as arrays; an error if they do not describe a sparse tensor."""
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
    """What is wrong with these CSR indices for `nnz` stored values of a dense shape; None if nothing is."""
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
