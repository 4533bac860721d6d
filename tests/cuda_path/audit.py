"""A dispatch mode that lists synchronisations, copies between devices and collectives, with file and line."""

from __future__ import annotations

import collections
import pathlib
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from smp.plan import fake_cuda

ROOT = str(pathlib.Path(__file__).parent.parent.parent) + "/"
_LIBRARIES = ("transformers.", "torch.distributed.fsdp._fully_shard.", "torch.optim.")
# Operations whose result has a size that the host must know.
_SIZED_BY_VALUES = {
    "aten.nonzero.default", "aten.masked_select.default", "aten.unique_dim.default", "aten._unique2.default",
    "aten.equal.default", "aten.is_nonzero.default", "aten.repeat_interleave.Tensor", "aten.bincount.default",
}  # fmt: skip

_COPIES = ("aten.copy_.default", "aten._to_copy.default", "aten.div.Tensor")


def _short(path: str) -> str:
    return path.rpartition("site-packages/")[2].removeprefix(ROOT)


def where() -> str:
    """Return the innermost line of smp on the stack, and the innermost of transformers or torch's FSDP inside it."""
    frame, library, program = sys._getframe(2), "", ""
    while frame is not None:
        path, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if module.startswith("smp.") and module != fake_cuda.__name__:  # the stand-in asks
            return f"{_short(path)}:{frame.f_code.co_qualname}" + (f" <- {library}" if library else "")
        if path.startswith(ROOT + "tests/") and module != __name__:
            program = program or f"{_short(path)}:{frame.f_code.co_qualname}"
        if not library and module.startswith(_LIBRARIES):
            library = f"{_short(path)}:{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return library or program or "autograd"


def is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


_pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no other memory gets the address
_PINNED = "_audit_pinned"  # attribute of fake tensors, which have no memory


def note_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Count the memory of a tensor as page-locked from now on; returns the tensor."""
    if is_real(tensor):
        storage = tensor.untyped_storage()
        _pinned[storage.data_ptr()] = storage
    else:
        setattr(tensor, _PINNED, True)
    return tensor


def is_pinned(tensor: torch.Tensor, *_: Any) -> bool:
    """Return whether a tensor's memory is page-locked."""
    return tensor.untyped_storage().data_ptr() in _pinned if is_real(tensor) else hasattr(tensor, _PINNED)


def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    """Stand in for the method of tensors."""
    return tensor if is_pinned(tensor) else note_pinned(tensor.clone())


def is_cuda(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"


class Audit(TorchDispatchMode):
    """Count what a step does.

    Attributes:
        syncs, copies, collectives: counts by description and line.
        operations: counts of all operations on the device.
        written: bytes that copies and casts write, and operations of ``fully_shard``, by operation and line.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        tensor: Any = torch.Tensor
        tensor.pin_memory, tensor.is_pinned = pin_memory, is_pinned  # in place of the shim's, which all memory passes
        self.clear()

    def clear(self) -> None:
        self.syncs: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.collectives: collections.Counter[str] = collections.Counter()
        self.operations: collections.Counter[str] = collections.Counter()
        self.written: collections.Counter[str] = collections.Counter()

    def report(self) -> dict[str, dict[str, int]]:
        """Return the counts since :meth:`clear`."""
        return {name: dict(getattr(self, name)) for name in ("syncs", "copies", "collectives", "operations", "written")}

    def __enter__(self) -> Audit:
        fake_cuda.log = lambda what: self.syncs.update([f"{what} @ {where()}"])
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        fake_cuda.log = fake_cuda._ignore
        super().__exit__(*exception)

    def _copy(self, source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
        if target.type == "meta" or source.device.type in ("meta", target.type):
            return
        how = "" if non_blocking else ", blocking"
        text = f"{source.device.type} to {target.type}{how} @ {where()}"
        self.copies[text] += 1
        if not non_blocking:
            self.syncs[f"copy {text}"] += 1

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._fake.from_tensor(tensor) if is_real(tensor) else tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        asked = name == "aten._to_copy.default" and is_cuda(kwargs) and kwargs.get("non_blocking")
        if asked and args[0].device.type == "cpu" and not is_pinned(args[0]):  # CUDA waits, and says nothing
            self.syncs[f"copy of memory that is not pinned @ {where()}"] += 1
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(is_real(each) for each in tensors):  # batches are
            if all(is_real(each) for each in tensors) and not is_cuda(kwargs):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._faked, (args, kwargs))
        if name == "aten._local_scalar_dense.default":
            if args[0].device.type == "cuda":
                self.syncs[f"read a number @ {where()}"] += 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        if name == "aten._to_copy.default" and kwargs.get("device") is not None:
            self._copy(args[0], torch.device(kwargs["device"]), bool(kwargs.get("non_blocking")))
        elif name == "aten.copy_.default":
            self._copy(args[1], args[0].device, bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
        elif name in _SIZED_BY_VALUES and args[0].device.type == "cuda":
            self.syncs[f"{name.split('.')[1]} @ {where()}"] += 1
        elif name.startswith(("c10d.", "symm_mem.")):
            self.collectives[f"{name.split('.')[1].strip('_')} @ {where()}"] += 1
        found = func(*args, **kwargs)
        out = kwargs.get("out") if func.namespace == "fsdp" else None  # which is not returned, too
        leaves = pytree.tree_leaves((found, out))
        made = [each for each in leaves if isinstance(each, torch.Tensor) and each.device.type == "cuda"]
        if made:
            self.operations[name] += 1
        itself = name == "aten.copy_.default" and args[0] is args[1]
        if (name in _COPIES or func.namespace == "fsdp") and not itself:
            self.written[f"{name} @ {where()}"] += sum(each.nbytes for each in made)
        return found
