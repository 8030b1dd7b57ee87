"""`TensorData`: a tensor, dense or in compressed sparse rows (CSR), over numpy arrays; torch is optional."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from tinker_sync._base.numpy import AnyArray, Int64Array, np
from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.types._arrays import (
    ArrayHead,
    array_of_torch,
    dtype_name,
    quick_hash,
    same_values,
    wire_array,
)
from tinker_sync.types._convert import converter_for
from tinker_sync.types._model import AsDataclass, Model, advising
from tinker_sync.types._structured import refuse
from tinker_sync.types.scalars import TensorDtype as TensorDtype

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from typing_extensions import Self

__all__ = ["TensorData"]

_DTYPES = ("int64", "float32")


class _Unlocked(AsDataclass, Model):
    """A `TensorData` under construction, whose fields can still be assigned."""

    __slots__ = ("_col", "_crow", "_numpy", "dtype", "shape")

    dtype: TensorDtype
    shape: list[int] | None
    """The dense shape that is sent; None sends the values of the data in one dimension."""
    _numpy: AnyArray
    _crow: Int64Array | None
    _col: Int64Array | None


class TensorData(_Unlocked):
    """One tensor as requests and answers contain it: int64 or float32, dense or sparse (CSR).

    Immutable; threads may share it. An array that already has the dtype is kept without a copy: do not write
    into it while a request is in flight. A retry that finds the array changed fails, because it would send
    other bytes than the first try.

    Two tensors are equal if dtype, shape, layout and values are equal (NaN equals NaN).

    >>> TensorData(data=[1, 2, 3], dtype="int64")
    TensorData(data=[1, 2, 3], dtype='int64', shape=None)
    >>> TensorData.from_numpy_sparse(np.eye(8)).tolist()[0]
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """

    __slots__ = ()

    @advising
    def __init__(
        self,
        data: Iterable[Any] | float | None = None,
        dtype: TensorDtype | None = None,
        shape: Sequence[int] | None = None,
        sparse_crow_indices: Sequence[int] | AnyArray | None = None,
        sparse_col_indices: Sequence[int] | AnyArray | None = None,
    ) -> None:
        """Create a tensor from values and a wire dtype.

        Args:
            data: the values: a sequence, numpy array or torch tensor of numbers; if sparse, the listed cells.
                None stands for no values.
            dtype: "int64" or "float32"; required.
            shape: the dense shape; required for a sparse tensor. One size of a dense tensor may be -1.
            sparse_crow_indices: CSR row pointers, one more than there are rows.
            sparse_col_indices: CSR column of each listed cell.

        Raises:
            TypeError: the dtype is missing, or the data cannot contain numbers, such as a text.
            InvalidInputError: the dtype cannot hold a value, the shape does not fit, or the indices are bad.
        """
        if dtype is None:
            raise TypeError("TensorData: dtype is required, 'int64' or 'float32'")
        if dtype not in _DTYPES:
            raise InvalidInputError(f"TensorData.dtype: expected 'int64' or 'float32', got {dtype!r}")
        if data is None:
            values = np.empty(0, dtype=dtype)
        else:
            given = list(data) if isinstance(data, Iterator) else data
            values = wire_array(given, "TensorData.data", dtype)
        sizes = None if shape is None else _sizes(shape)
        crow = col = None
        if sparse_crow_indices is not None or sparse_col_indices is not None:
            values = values.reshape(-1)
            crow, col = check_indices(values, sizes, sparse_crow_indices, sparse_col_indices)
        elif sizes is not None and list(values.shape) != sizes:
            values = _reshape(values, sizes)
            sizes = list(values.shape)
        self._assign(values, dtype, sizes, crow, col)

    def _assign(
        self,
        values: AnyArray,
        dtype: TensorDtype,
        shape: list[int] | None,
        crow: Int64Array | None,
        col: Int64Array | None,
    ) -> None:
        put = object.__setattr__
        put(self, "_numpy", values)
        put(self, "dtype", dtype)
        put(self, "shape", shape)
        put(self, "_crow", crow)
        put(self, "_col", col)

    @classmethod
    def _wrap(
        cls,
        values: AnyArray,
        dtype: TensorDtype,
        shape: list[int] | None,
        crow: Int64Array | None = None,
        col: Int64Array | None = None,
    ) -> Self:
        """Create a tensor from arrays that are already checked, without copies."""
        if cls is not TensorData:  # a subclass may have another layout
            made = cls.__new__(cls)
            made._assign(values, dtype, shape, crow, col)
            return made
        # An answer has thousands of tensors; object.__setattr__ for each field takes three times as long.
        fresh: Any = _Unlocked()
        fresh.dtype = dtype
        fresh.shape = shape
        fresh._numpy = values
        fresh._crow = crow
        fresh._col = col
        fresh.__class__ = cls
        tensor: Self = fresh
        return tensor

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TensorData is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"TensorData is immutable: cannot delete {name!r}")

    # ------------------------------------------------------------------------------------------- content

    @property
    def data(self) -> list[int] | list[float]:
        """The stored values as one flat list, created at each access.

        >>> TensorData(data=[[1, 2], [3, 4]], dtype="int64", shape=[2, 2]).data
        [1, 2, 3, 4]
        """
        return cast("list[int] | list[float]", self._numpy.reshape(-1).tolist())

    @property
    def is_sparse(self) -> bool:
        """True if the tensor is stored as CSR.

        >>> TensorData(data=[1], dtype="int64").is_sparse
        False
        """
        return self._crow is not None

    @property
    def sparse_crow_indices(self) -> list[int] | None:
        """The CSR row pointers as a list; None for a dense tensor.

        >>> TensorData([7.0], "float32", [2, 9], [0, 0, 1], [4]).sparse_crow_indices
        [0, 0, 1]
        """
        return None if self._crow is None else cast("list[int]", self._crow.tolist())

    @property
    def sparse_col_indices(self) -> list[int] | None:
        """The CSR column of each stored value as a list; None for a dense tensor.

        >>> TensorData([7.0], "float32", [2, 9], [0, 0, 1], [4]).sparse_col_indices
        [4]
        """
        return None if self._col is None else cast("list[int]", self._col.tolist())

    @property
    def nbytes(self) -> int:
        """The size in bytes of values and CSR indices.

        >>> TensorData(data=[1.0, 2.0], dtype="float32").nbytes
        8
        """
        indices = 0 if self._crow is None or self._col is None else self._crow.nbytes + self._col.nbytes
        return self._numpy.nbytes + indices

    @classmethod
    def _dataclass_fields(cls) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        yield "data", "list[int] | list[float]", {"default": None}
        yield "dtype", "TensorDtype", {}
        for name in ("shape", "sparse_crow_indices", "sparse_col_indices"):
            yield name, "list[int] | None", {"default": None}

    def _fields_out(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self.sparse_crow_indices,
            "sparse_col_indices": self.sparse_col_indices,
        }

    def _evolved(self, changes: dict[str, Any]) -> Self:
        kept = {
            "data": self._numpy,
            "dtype": self.dtype,
            "shape": self.shape,
            "sparse_crow_indices": self._crow,
            "sparse_col_indices": self._col,
        }
        return type(self)(**{**kept, **changes})

    # ------------------------------------------------------------------------------------------ creation

    @classmethod
    def _of(cls, values: AnyArray) -> Self:
        """Create a dense tensor from an int64 or float32 array."""
        return cls._wrap(values, dtype_name(values), list(values.shape))

    @classmethod
    def from_numpy(cls, array: npt.ArrayLike) -> Self:
        """Create a dense tensor: floats become float32, whole numbers and booleans int64.

        Values that do not fit raise the same errors as in the constructor.

        >>> TensorData.from_numpy(np.array([1, 2], dtype=np.uint8)).dtype
        'int64'
        """
        return cls._of(wire_array(array, "TensorData.from_numpy"))

    @classmethod
    def from_torch(cls, tensor: torch.Tensor) -> Self:
        """Create a dense tensor from a torch tensor like `from_numpy`, over the same memory if possible."""
        return cls._of(wire_array(tensor, "TensorData.from_torch"))

    @classmethod
    def from_numpy_sparse(cls, array: npt.ArrayLike, pad_value: int = 0) -> Self:
        """Create a sparse tensor (CSR) of a 2-D array, without the cells equal to `pad_value`.

        The tensor stays dense if CSR would not be smaller, or if the array is not 2-D.

        Raises:
            TypeError: `pad_value` is not a whole number, or the array cannot contain numbers.
            InvalidInputError: a value is not a number or does not fit.

        >>> TensorData.from_numpy_sparse(np.diag([5] * 9)).sparse_col_indices
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
        """
        pad = _checked_pad(pad_value)
        dense = cls.from_numpy(array)
        values = dense._numpy
        if values.ndim != 2:
            return dense
        parts = compress(values, pad)
        if parts is None:
            return dense
        stored, crow, col = parts
        return cls._wrap(stored, dense.dtype, list(values.shape), crow, col)

    @classmethod
    def from_torch_sparse(cls, tensor: torch.Tensor, pad_value: int = 0) -> Self:
        """Create a tensor like `from_numpy_sparse`, from a torch tensor."""
        return cls.from_numpy_sparse(array_of_torch(tensor, "TensorData.from_torch_sparse"), pad_value)

    # ---------------------------------------------------------------------------------------- conversion

    def to_numpy(self, pad_value: int = 0) -> AnyArray:
        """Return the dense array: the stored one, or for CSR a new one with `pad_value` in unlisted cells.

        Raises:
            InvalidInputError: a sparse tensor lists a cell twice.
            TypeError: the tensor is sparse, and `pad_value` is not a whole number.

        >>> TensorData([7.0], "float32", [2, 3], [0, 0, 1], [2]).to_numpy(pad_value=-1).tolist()
        [[-1.0, -1.0, -1.0], [-1.0, -1.0, 7.0]]
        """
        if self._crow is None or self._col is None or self.shape is None:
            return self._numpy
        pad = wire_array(_checked_pad(pad_value), "pad_value", self.dtype)
        return expand(self._numpy, self.shape, self._crow, self._col, pad)

    def to_torch(self, pad_value: int = 0) -> torch.Tensor:
        """Return a dense torch tensor. It shares the memory of `to_numpy()` if torch can use it.

        Torch cannot use read-only arrays and negative strides; such values are copied.

        Raises:
            MissingExtraError: torch is not installed. Other errors are those of `to_numpy`.
        """
        try:
            import torch
        except ImportError:
            raise MissingExtraError("torch", feature="TensorData.to_torch") from None
        values = self.to_numpy(pad_value)
        if not values.flags.writeable or any(stride < 0 for stride in values.strides):
            values = values.copy()  # torch lacks read-only tensors and negative strides
        return torch.from_numpy(values)

    def tolist(self, pad_value: int = 0) -> list[Any]:
        """Return the values of `to_numpy` as nested lists: dense, with `pad_value` in unlisted cells.

        >>> TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2]).tolist()
        [[1, 2], [3, 4]]
        """
        return cast("list[Any]", self.to_numpy(pad_value).tolist())

    # ------------------------------------------------------------------------------------- comparison, repr

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorData):
            return NotImplemented
        return (
            self.dtype == other.dtype
            and self._effective_shape == other._effective_shape
            and same_values(self._numpy, other._numpy)
            and same_values(self._crow, other._crow)
            and same_values(self._col, other._col)
        )

    def __hash__(self) -> int:
        return hash((self.dtype, tuple(self._effective_shape), quick_hash(self._numpy)))

    @property
    def _effective_shape(self) -> tuple[int, ...]:
        return self._numpy.shape if self.shape is None or self._crow is None else tuple(self.shape)

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        yield "data", ArrayHead(self._numpy)
        yield "dtype", self.dtype
        yield "shape", self.shape
        if self.is_sparse:
            yield "stored", self._numpy.size

    def __copy__(self) -> Self:
        return self

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore a tensor from a pickle of the reference client's class, which has other names."""
        made = TensorData(
            state["_numpy"],
            state["dtype"],
            state["shape"],
            state["sparse_crow_indices"],
            state["sparse_col_indices"],
        )
        self._assign(made._numpy, made.dtype, made.shape, made._crow, made._col)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self._numpy, self.dtype, self.shape, self._crow, self._col)


def _rebuild(
    cls: type[TensorData],
    values: AnyArray,
    dtype: TensorDtype,
    shape: list[int] | None,
    crow: Int64Array | None,
    col: Int64Array | None,
) -> TensorData:
    return cls._wrap(values, dtype, shape, crow, col)


def not_tensors(inputs: Mapping[str, object]) -> list[str]:
    """Return a problem for each input of a loss that is no `TensorData`, such as a list assigned later."""
    return [
        f".loss_fn_inputs[{name!r}]: expected TensorData, got {type(value).__name__}; "
        "make a new Datum with it, which converts it"
        for name, value in inputs.items()
        if not isinstance(value, TensorData)
    ]


_size = cast("Callable[[Any], int]", converter_for(int, "TensorData.shape"))


def _sizes(shape: Iterable[Any]) -> list[int]:
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise refuse("TensorData.shape", "a list of sizes", shape)
    return [_size(size) for size in shape]


def _reshape(values: AnyArray, sizes: list[int]) -> AnyArray:
    """Reshape values; one size may be -1 and is then computed."""
    try:
        if min(sizes, default=0) >= -1:
            return values.reshape(sizes)
    except ValueError:
        pass
    raise InvalidInputError(f"TensorData.shape: {values.size} values do not fill the shape {sizes}")


def _checked_pad(pad_value: Any) -> int:
    if isinstance(pad_value, bool) or not isinstance(pad_value, (int, np.integer)):
        raise TypeError(f"pad_value: expected a whole number, got {pad_value!r} ({type(pad_value).__name__})")
    return int(pad_value)


# ----------------------------------------------------------------------------------------- sparse rows


def compress(dense: AnyArray, pad: int) -> tuple[AnyArray, Int64Array, Int64Array] | None:
    """Return a 2-D array in CSR form (stored, crow, col) without cells equal to `pad`.

    Return None if CSR would not be smaller.
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
