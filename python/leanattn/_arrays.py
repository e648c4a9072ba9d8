# SPDX-License-Identifier: Apache-2.0
"""What differs between frameworks: making an array, where it lies, which stream its work is on. None of them is imported here; an
array's own module is at hand already."""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import numpy as np

from . import _core

# Any array with DLPack: numpy.ndarray, torch.Tensor, jax.Array, cupy.ndarray.
Array = Any

_FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "cupy": "cupy"}

# torch, once leanattn.ops is imported: before that nothing of this package is traced.
torch: Any = None


def tracing() -> bool:
    """True while torch.compile or torch.export traces the caller; arrays are torch's then."""
    return torch is not None and torch.compiler.is_compiling()


def framework(array: Array) -> str:
    """One of numpy, torch, jax and cupy; for other types their module."""
    kind: Any = type(array)  # mypy: a type[Any] is not Hashable
    return "torch" if tracing() else framework_of(kind)


@functools.lru_cache(maxsize=64)
def framework_of(kind: type) -> str:
    """framework() of a type's arrays, outside of a trace."""
    for base in kind.__mro__:  # the first, but for a caller's own subclass
        name = base.__module__.partition(".")[0]
        if name in _FRAMEWORKS:
            return _FRAMEWORKS[name]
    return kind.__module__


def module(array: Array) -> Any:
    """The framework of an array as a module: numpy, torch, jax.numpy or cupy."""
    if tracing():
        return torch
    name = framework(array)
    if name not in _FRAMEWORKS:
        raise ValueError(f"a {type(array).__name__} of {name}: known are arrays of numpy, torch, jax and cupy")
    return sys.modules["jax.numpy" if name == "jax" else name]


def is_cuda(array: Array) -> bool:
    if tracing():
        return array.is_cuda
    device = getattr(array, "__dlpack_device__", None)
    return device is not None and device()[0] in (2, 13)


def device_word(array: Array | None) -> int:
    """The address of a device array's only element, of 8 bytes; 0 for None. ValueError for any other array."""
    if array is None:
        return 0
    memory = getattr(array, "__cuda_array_interface__", None)
    if memory is None or math.prod(memory["shape"]) != 1 or memory["typestr"] not in ("<i8", "<u8"):
        raise ValueError("data_status must be a CUDA array of one int64 or uint64")
    return memory["data"][0]


def is_checked(array: Array) -> bool:
    """True where values can be looked at for the price of reading them: in host memory, and not while a graph is traced."""
    return not tracing() and not is_cuda(array)


def float32(like: Array) -> Any:
    return module(like).float32


def int32(like: Array) -> Any:
    return module(like).int32


def empty(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """An array to be written to, in like's framework and on its device. JAX on the CPU: a NumPy array, for finish()."""
    name = framework(like)
    if name == "torch":
        return like.new_empty(shape, dtype=dtype)
    if name == "cupy":
        with like.device:
            return module(like).empty(shape, dtype)
    if name == "jax" and is_cuda(like):
        fresh = module(like).empty(shape, dtype, device=next(iter(like.devices())))
        return fresh.block_until_ready()
    return np.empty(shape, dtype)


def from_list(values: Any, dtype: Any, like: Array) -> Array:
    """values as a new array beside like."""
    name = framework(like)
    if name == "torch":
        return module(like).tensor(values, dtype=dtype, device=like.device)
    if name == "cupy":
        with like.device:
            return module(like).asarray(values, dtype)
    if name == "jax" and is_cuda(like):
        return module(like).asarray(values, dtype, device=next(iter(like.devices())))
    return np.asarray(values, dtype)


def integers(values: Any, name: str) -> list[Any]:
    """A caller's integers, in a list or in lists of one length, as Python's. Raises ValueError with the place of one that is none, or that
    32 bits do not hold."""
    most = 2**31
    if not values or (set(map(type, values)) == {int} and -most <= min(values) and max(values) < most):
        return list(values)
    plain: list[Any] = []
    for index, given in enumerate(values):
        place = f"{name}[{index}]"
        value = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(value, (list, tuple)):
            plain.append(integers(value, place))
        elif isinstance(value, int) and not isinstance(value, bool) and -most <= value < most:
            plain.append(value)
        else:
            raise ValueError(f"{place} is {value!r}: an integer of 32 bits is needed")
    if len({len(value) if isinstance(value, list) else -1 for value in plain}) > 1:
        raise ValueError(f"{name}: rows of one length are needed")
    return plain


def int32_list(values: Any, name: str, like: Array) -> Array:
    """A caller's list as an int32 array beside like; name is what the caller calls it. Arrays and None come back as they are. Raises
    ValueError as integers() does, but where the list is traced."""
    if not isinstance(values, (list, tuple)):
        return values
    return from_list(values if tracing() else integers(values, name), int32(like), like)


def described(array: Any) -> str:
    """What was given in place of an array that is needed, for a sentence that begins with its name."""
    return f"of shape {list(array.shape)}" if hasattr(array, "shape") else f"is a {type(array).__name__}"


def refuse_negated(*arrays: Array) -> None:
    """torch may leave a negation undone in memory (`x.conj().imag`), where the library would not see it."""
    for array in arrays:
        if hasattr(array, "is_neg") and array.is_neg():
            raise ValueError(f"a tensor {described(array)} has torch's negative bit set: resolve_neg() makes an ordinary one")


def host(array: Array) -> Array:
    """The array in host memory: itself, or a copy."""
    if array is None or not is_cuda(array):
        return array
    name = framework(array)
    if name == "torch":
        return array.cpu()
    return array.get() if name == "cupy" else np.asarray(array)


def stream_of(stream: Any, like: Array) -> int | None:
    """The handle of a stream given as one, or as an object of torch, CuPy or __cuda_stream__. None: the one that like's framework works
    on; where that is torch, the library asks torch itself."""
    if isinstance(stream, int):
        return stream
    if stream is None:
        if framework(like) == "cupy":
            return int(module(like).cuda.get_current_stream().ptr)
        return None
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(handle)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    raise ValueError(f"stream is a {type(stream).__name__}: an int, or a stream of torch, CuPy or __cuda_stream__ is needed")


def wait_for(arrays: tuple[Array, ...]) -> None:
    """JAX runs ahead; what a call reads has to be there."""
    for array in arrays:
        if framework(array) == "jax":
            array.block_until_ready()


def finish(array: Array, like: Array, stream: int | None) -> Array:
    """What empty() gave, as the caller gets it. JAX takes a buffer as ready, so the call is waited for."""
    if framework(like) != "jax":
        return array
    if is_cuda(like):
        _core.synchronize(stream or 0)
        return array
    return module(like).asarray(array)
