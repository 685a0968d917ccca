from __future__ import annotations

import pytest
import torch

from pfl_ext.ops import ensemble_distillation_loss, personalization_scores, squared_distance
from pfl_ext.ops._declare import Op

# As it comes through the stable ABI.
OUT_OF_MEMORY = (
    'CUDA out of memory. Tried to allocate 2.00 GiB. (originally from torch_call_dispatcher( "aten::new_empty", ...'
)


def failing(message):
    def overload(*args):
        raise RuntimeError(message)

    return Op("failing", "failing() -> ()", overload, overload)


def test_running_out_of_memory_in_a_kernel_is_torchs_error():
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB\.$"):
        failing(OUT_OF_MEMORY)()
    with pytest.raises(RuntimeError, match="another one") as found:
        failing("another one")()
    assert found.type is RuntimeError


def test_none_for_the_only_tensor_of_an_op_is_named():
    with pytest.raises(TypeError, match="half_spectrum is None"):
        torch.ops.pfl_ext.spectral_teacher(None, 6, 1)


CALLS = {
    "squared_distance": lambda x: squared_distance([x], [x]),
    "personalization_scores": lambda x: personalization_scores([x], [x]),
    "distillation": lambda x: ensemble_distillation_loss(x.view(1, -1), [x.view(1, -1)]),
    "distillation, training": lambda x: ensemble_distillation_loss(x.view(1, -1).requires_grad_(), [x.view(1, -1)]),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("call", CALLS)
def test_running_out_of_memory_on_cuda_is_torchs_error(call):
    with pytest.raises(RuntimeError) as own:
        torch.empty(2**50, device="cuda")
    if own.type is not torch.OutOfMemoryError:
        pytest.skip("torch's caching allocator is off, and its own error is another one")
    # More than any GPU has, for the copy that a strided input needs.
    x = torch.zeros(1, device="cuda").expand(2**50)
    with pytest.raises(torch.OutOfMemoryError):
        CALLS[call](x)
