"""CUDA graphs on a simulated GPU, whose capture has the kernels of this extension and none of torch's own ops.

Here the ops are recorded where torch dispatches them: torch's and ours, forward and backward, each with the very memory
that it was given. As with a GPU nothing is computed meanwhile, Python's part of the code is not seen, and a replay
computes the same ops on the same memory. So a graph goes wrong here as it does there: with a number of Python's that
should have changed, with a tensor that was replaced, with what was computed on another device. What cannot be captured
is refused: what the host reads or waits for, what has a shape that numbers decide, copies from and to the host.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_ALLOCATE = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_ON_CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Call:
    """An op, what it is given, and the memory that its results go to."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: list[Tensor | None]
    """None for what the op writes itself."""

    def __call__(self) -> None:
        found = self.op(*self.args, **self.kwargs)
        for memory, result in zip(self.results, _tensors(found), strict=True):
            if memory is not None:
                memory.copy_(result)


def _tensors(nest: Any) -> list[Tensor]:
    return [x for x in tree_leaves(nest) if isinstance(x, Tensor)]


class _Recorder(TorchDispatchMode):
    """Records the ops on one GPU. Those on other devices run at once, as they are on no captured stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._device = device
        self._fakes = FakeTensorMode()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one."""
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        on = {x.device for x in given} | {torch.device(x) for x in [kwargs.get("device")] if x is not None}
        if self._device not in {_numbered(device) for device in on}:
            return op(*args, **kwargs)
        name = op._schema.name.partition("::")[2]
        self._refuse_the_host(op, given, kwargs)
        if name in _ALLOCATE or op.is_view:
            return op(*args, **kwargs)
        # Another object for the same memory: what becomes of the tensor later (x.data = y) a graph does not know.
        seen: dict[int, Tensor] = {}
        memory = tree_map(lambda x: seen.setdefault(id(x), _memory(x)) if isinstance(x, Tensor) else x, (args, kwargs))
        results = self._results(op, *memory, {id(seen[id(x)]): x for x in given})
        # Of results too: these tensors get a history, which would live as long as the graph.
        made = [None if any(x is y for y in given) else _memory(x) for x in _tensors(results)]
        self.calls.append(_Call(op, *memory, made))
        return results

    def _refuse_the_host(self, op: Any, given: list[Tensor], kwargs: Mapping[str, Any]) -> None:
        written = [
            argument.alias_info is not None and argument.alias_info.is_write for argument in op._schema.arguments
        ]
        from_host = any(x.device == _ON_CPU and x.dim() > 0 for x in given)
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]) == _ON_CPU
        into_host = written and written[0] and given[0].device == _ON_CPU
        chosen = op._schema.name in ("aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::index")
        masks = chosen and any(x.dtype in (torch.bool, torch.uint8) for x in given[1:])
        if from_host or to_host or into_host or masks or isinstance(kwargs.get("generator"), torch.Generator):
            raise _not_permitted(op)

    def _results(self, op: Any, args: Any, kwargs: Any, given: Mapping[int, Tensor]) -> Any:
        """What the op returns: what it was given, or new memory that nothing has written yet."""
        fakes = {key: self._fakes.from_tensor(x) for x in _tensors((args, kwargs)) for key in [id(x)]}
        returned = {id(fake): given[key] for key, fake in fakes.items()}

        def real(x: Any) -> Any:
            if not isinstance(x, Tensor):
                raise _not_permitted(op)  # a number is for the host
            if id(x) in returned:
                return returned[id(x)]
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

        stand_in = tree_map(lambda x: fakes[id(x)] if isinstance(x, Tensor) else x, (args, kwargs))
        try:
            with self._fakes:
                found = op(*stand_in[0], **stand_in[1])
        except RuntimeError as error:
            raise _not_permitted(op) from error
        return None if found is None else tree_map(real, found)


def _numbered(device: torch.device) -> torch.device:
    """``cuda`` is the current one."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
    )


def _memory(x: Tensor) -> Tensor:
    """The memory of a tensor; of a number of the host its value, which a kernel is given as an argument."""
    return x.data.clone() if x.device == _ON_CPU else x.data


def _not_permitted(op: Any) -> RuntimeError:
    return RuntimeError(f"{op}: operation not permitted when stream is capturing")


class _Capture(torch.cuda.graph):
    """Capture as torch has it, with its stream and memory; the ops are kept out of it, and recorded."""

    def __enter__(self) -> None:
        super().__enter__()
        self._recorder = _Recorder(self.capture_stream.device)
        self._recorder.__enter__()

    def __exit__(self, *args: Any) -> None:
        self._recorder.__exit__(*args)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            super().__exit__(*args)
        calls = self._recorder.calls

        def replay() -> None:
            with torch.no_grad():
                for call in calls:
                    call()

        self.cuda_graph.replay = replay


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Graphs of whole steps on a simulated GPU; a real one has them anyway."""
    try:
        import fakegpu
    except ImportError:
        fakegpu = None
    if fakegpu is None or not fakegpu.active():
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "graph", _Capture)
        yield
