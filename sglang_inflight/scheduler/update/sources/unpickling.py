"""Unpickles payloads of tensors; a refused payload has no side effects."""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing import AuthenticationError
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.multiprocessing import reductions

from sglang_inflight.scheduler.update.sources.gpu_sharing import read_tensor
from sglang_inflight.scheduler.update.sources.regular_file import Stream
from sglang_inflight.vocabulary.errors import Refused, shorten

# Torch asks a manager process for shared memory. On busy cores it may not answer within a second:
# then torch gives up and has opened nothing, so another try is safe. The limit is a payload's:
# torch holds the interpreter for that second.
_LATE = "Shared memory manager connection has timed out"
TRIES = 10
# calls between two rests: a tensor needs one to three
_CALLS = 8


def unpickle(payload: bytes | BinaryIO, rest: Callable[[], None] = lambda: None) -> Any:
    """Return the tensors pickled plainly or by ``MultiprocessingSerializer``.

    ``rest`` is called now and then, to give the interpreter to others. Raise ``Refused`` if another
    process does not hand out its shared memory, and ``pickle.UnpicklingError`` or another error
    for a malformed payload.
    """
    return Unpickler(io.BytesIO(payload) if isinstance(payload, bytes) else payload, rest).load()


class Function:
    """A function a payload may call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class _Record:
    """A class for a payload to instantiate and fill."""

    __slots__ = ("type",)

    def __init__(self, type: type) -> None:
        self.type = type


def _plain(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a parameter's plain tensor: a loader needs only the data."""
    return tensor


def _of_type(rebuild: Any, _type: Any, args: Any, *_: Any) -> Any:
    if not isinstance(rebuild, Function):
        raise pickle.UnpicklingError("a tensor is rebuilt by something other than a function")
    return rebuild(*args)


def _no_items() -> OrderedDict[str, Any]:
    return OrderedDict()


def _encode(text: str, encoding: str) -> bytes:
    """Return ``text`` as bytes: protocols without bytes pickle them as encoded text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are encoded by {shorten(encoding)!r}")
    return text.encode("latin1")


def _load_storage(content: bytes) -> Any:
    """Return a storage pickled by value: torch pickles it as a saved file."""
    if (copied := _copy_saved(content)) is not None:
        return copied
    source = memoryview(content)

    def read_into(buffer: memoryview, offset: int) -> int:
        size = min(len(buffer), len(source) - offset)
        # numpy copies without the interpreter
        np.copyto(
            np.frombuffer(buffer, np.uint8, size), np.frombuffer(source, np.uint8, size, offset)
        )
        return size

    with io.BufferedReader(Stream(len(source), read_into)) as stream:
        storage = torch.load(stream, weights_only=True)
    if not isinstance(storage, torch.storage.TypedStorage | torch.storage.UntypedStorage):
        raise pickle.UnpicklingError(f"expected a storage, got a {type(storage).__name__}")
    return storage


def _head_of_saved() -> re.Pattern[bytes]:
    """Return a pattern for what torch writes before the bytes of one storage in the host's memory.

    Groups: the storage's class, its key, and its number of elements, twice.
    """
    _, (saved,) = torch.zeros(1)._typed_storage().__reduce__()
    begin, _, _ = saved.partition(b"FloatStorage")
    return re.compile(
        re.escape(begin) + rb"(\w+)\nq\x01X(.{4}\d+)q\x02X\x03\0\0\0cpuq\x03[KMJ](.{1,4}?)Ntq\x04Q"
        rb"\.\x80\x02]q\0X\2q\x01a\.(.{8})",
        re.DOTALL,
    )


_SAVED = _head_of_saved()
_DTYPES: dict[str, torch.dtype] = torch.storage._storage_type_to_dtype_map()


def _copy_saved(content: bytes) -> torch.storage.TypedStorage | None:
    """Return a storage, or None if ``content`` is not as torch writes one.

    ``torch.load`` takes 0.15 ms of Python for each.
    """
    if (head := _SAVED.match(content)) is None:
        return None
    kind, _, *counts = head.groups()
    count, again = (int.from_bytes(each, "little") for each in counts)
    dtype = _DTYPES.get(kind.decode())
    if dtype is None or not count or count != again:
        return None
    if count * dtype.itemsize != len(content) - head.end():
        return None
    # numpy copies without the interpreter
    array = np.frombuffer(content, np.uint8, offset=head.end()).copy()
    storage = torch.from_numpy(array).untyped_storage()
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _within(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Refuse a tensor beyond its storage: torch would enlarge the storage for it."""

    def rebuild_within(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
        # the dtype follows the gradient and the hooks, or is the storage's
        dtype = rest[2] if len(rest) > 2 else storage.dtype
        _require_within(storage, offset, size, stride, dtype)
        return rebuild(storage, offset, size, stride, *rest)

    return rebuild_within


def _rebuild_v2(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> torch.Tensor:
    """Rebuild a tensor's data. Torch also looks for fake tensors, in 10 µs of Python."""
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _require_within(storage: Any, offset: int, size: Any, stride: Any, dtype: torch.dtype) -> None:
    untyped = getattr(storage, "_untyped_storage", storage)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and not 0 <= last < untyped.nbytes() // dtype.itemsize:
        raise pickle.UnpicklingError("a tensor is larger than its storage")


def _rebuild_shared(kind: Any, storage: Any, metadata: Any) -> Any:
    offset, size, stride, *_ = metadata
    _require_within(storage, offset, size, stride, storage.dtype)
    return reductions.rebuild_tensor(kind, storage, metadata)


def _rebuild_from_descriptor(*arguments: Any) -> Any:
    """Open shared memory by descriptor; its owner hands a descriptor only to related processes.

    Raise ``Refused`` with the cause: the errors underneath do not tell it.
    """
    try:
        return reductions.rebuild_storage_fd(*arguments)
    except AuthenticationError as error:
        whose = "neither started this server nor was started by the process that did"
        raise Refused(_no_descriptor(whose, error)) from error
    except (ConnectionError, FileNotFoundError) as error:
        raise Refused(_no_descriptor("has ended, or is in another container", error)) from error


def _no_descriptor(whose: str, error: Exception) -> str:
    return (
        "serialized_named_tensors cannot be unpickled: it is a handle to shared memory on a CPU, "
        f"by descriptor, of a process that {whose} ({error}). Pickle the tensors themselves, or "
        "have the sender call torch.multiprocessing.set_sharing_strategy('file_system')"
    )


def _on_gpu(rebuild: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arguments first: torch's function and SGLang's replacement accept any."""

    def rebuild_on_gpu(*arguments: Any) -> Any:
        read_tensor(arguments, _TENSORS, _STORAGES)
        return rebuild(*arguments)

    return rebuild_on_gpu


# The functions of senders' payloads, by module and name, with a replacement or None.
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any] | None] = {
    ("torch", "Size"): None,
    ("torch", "device"): None,
    ("torch._utils", "_rebuild_tensor"): _within(torch._utils._rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _within(_rebuild_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _within(torch._utils._rebuild_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _plain,
    ("torch._utils", "_rebuild_parameter_with_state"): _plain,
    ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("torch.multiprocessing.reductions", "rebuild_tensor"): _rebuild_shared,
    ("torch.multiprocessing.reductions", "rebuild_storage_fd"): _rebuild_from_descriptor,
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"): None,
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"): None,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): None,
    ("torch_npu.multiprocessing.reductions", "rebuild_npu_tensor"): None,
    ("sglang.srt.utils.patch_torch", "_rebuild_npu_tensor_modified"): None,
    # a tensor's hooks, always empty
    ("collections", "OrderedDict"): _no_items,
    ("_codecs", "encode"): _encode,
}

# called after a check of their arguments
_FUNCTIONS_ON_GPU = frozenset(
    {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    }
)

_RECORDS = frozenset(
    {
        ("multiprocessing.resource_sharer", "DupFd"),
        ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            "LocalSerializedTensor",
        ),
        ("sglang.srt.model_executor.model_runner", "LocalSerializedTensor"),
    }
)

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_STORAGES = (torch.UntypedStorage, torch.storage.TypedStorage)
# passed to the functions, and never called or written to
_TYPES = frozenset(
    {
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "UntypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
    }
)

# The opcodes for data, of protocol 2 and later. Only the keys of dicts are hashed (``_set``).
_OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.MEMOIZE, pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT,
    pickle.GET, pickle.BINGET, pickle.LONG_BINGET,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE,
    pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
    pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8,
    pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8, pickle.BYTEARRAY8,
    pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD,
)  # fmt: skip


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it has the opcode {bytes([code])!r}")


class Unpickler(pickle._Unpickler):
    """Python's unpickler in Python, reduced to tensors.

    SGLang's unpickler checks only the names of globals. A payload could still write the attributes
    of a class for good, or hold the interpreter: by a long loop in C, or by hashing deeply
    nested tuples. This unpickler calls only functions that rebuild tensors, and writes
    only to its own objects. It reads opcode by opcode, so the loop's thread can run in between.

    Senders' tensors are supported. Not supported, unlike in SGLang, are containers, and sparse,
    nested and quantized tensors: no loader takes these.
    """

    memo: dict[int, Any]
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: BinaryIO, rest: Callable[[], None] = lambda: None) -> None:
        """``rest`` is called every few tensors, after some 0.1 ms of Python."""
        super().__init__(file)
        # what Python's own ``load`` sets
        self.read, self.readline = file.read, file.readline
        self.metastack: list[list[Any]] = []
        self.stack = []
        self.append = self.stack.append
        self._rest = rest
        self._calls = 0
        self._made: set[type] = set()
        self._tries = TRIES

    def load(self) -> Any:
        """Read opcode by opcode, the two most frequent without a call."""
        read, memo = self.read, self.memo
        while (code := read(1)) != pickle.STOP:
            if code == pickle.BINGET:
                self.stack.append(memo[read(1)[0]])
            elif code == pickle.MEMOIZE:
                memo[len(memo)] = self.stack[-1]
            elif code:
                self.dispatch[code[0]](self)
            else:
                raise EOFError("it has no end")
        return self.stack.pop()

    def readinto(self, buffer: bytearray) -> int:
        buffer[:] = self.read(len(buffer))
        return len(buffer)

    def load_frame(self) -> None:
        """Skip a frame's length. Reading in frames would cost a call for each read."""
        self.read(8)

    def find_class(self, module: str, name: str) -> Any:
        asked = (module, name)
        if asked in _FUNCTIONS:
            return Function(_FUNCTIONS[asked] or super().find_class(module, name))
        if asked in _FUNCTIONS_ON_GPU:
            return Function(_on_gpu(super().find_class(module, name)))
        if asked in _RECORDS:
            return _Record(super().find_class(module, name))
        if asked in _TYPES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"it names {shorten(f'{module}.{name}')}, which is not allowed in a payload of tensors"
        )

    def load_reduce(self) -> None:
        args = self.stack.pop()
        call = self.stack.pop()
        if not isinstance(call, Function) or not isinstance(args, tuple):
            raise pickle.UnpicklingError("it calls something other than an allowed function")
        self._calls += 1
        if not self._calls % _CALLS:
            self._rest()
        self.stack.append(self._call(call, args))

    def _call(self, call: Function, args: tuple[Any, ...]) -> Any:
        """Call again while torch's manager process answers late.

        The sender counts its memory up for each handle, and torch's reading counts it down. So
        only the handle that was not opened is read again. A second reading of the payload would
        count its other handles down twice, and the sender's next payload would name lost memory.
        """
        while True:
            try:
                return call(*args)
            except RuntimeError as error:
                if _LATE not in str(error):
                    raise
                self._tries -= 1
                if not self._tries:
                    raise

    def load_newobj(self) -> None:
        args = self.stack.pop()
        record = self.stack.pop()
        if not isinstance(record, _Record) or type(args) is not tuple or args:
            raise pickle.UnpicklingError("it makes an object of an unknown class")
        self._made.add(record.type)
        self.stack.append(object.__new__(record.type))

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) not in self._made or not isinstance(state, dict):
            raise pickle.UnpicklingError("it writes to an object of an unknown class")
        vars(made).update(state)

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def load_setitem(self) -> None:
        value = self.stack.pop()
        self._set([self.stack.pop(), value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        to = self.stack[-1]
        if type(to) is not list:
            raise pickle.UnpicklingError("it appends to something other than a list")
        to.extend(items)

    def _set(self, items: list[Any]) -> None:
        to = self.stack[-1]
        if not isinstance(to, dict):
            raise pickle.UnpicklingError("it sets items of something other than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise pickle.UnpicklingError(f"a dict has a key of {type(key).__name__}")
            to[key] = value

    dispatch = _Opcodes({code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES})
    dispatch |= {
        pickle.FRAME[0]: load_frame,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }
