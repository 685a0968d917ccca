"""What is no tensor, or one without strides, is refused by every public function, and the error says what it is."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from pfl_ext.ops import (
    StreamingAverage,
    all_finite,
    conv_pool_relu,
    distillation_loss,
    ensemble_distillation_loss,
    ensemble_logits,
    layer_groups,
    linear_relu,
    lwsam_perturb_,
    personalization_scores,
    proximal_sgd_step_,
    restore_,
    server_update,
    spectral_divergence,
    spectrum,
    squared_distance,
    weighted_average,
)


def x33():
    return torch.ones(3, 3)


def streaming_second(x):
    average = StreamingAverage()
    average.add([x33()])
    average.add([x])


def streaming_out(x):
    average = StreamingAverage()
    average.add([x33()])
    average.result(out=[x])


LISTS = {
    "clients": lambda x: weighted_average([[x], [x]]),
    "one client": lambda x: weighted_average([[x33()], [x]]),
    "out": lambda x: weighted_average([[x33()]], out=[x]),
    "server": lambda x: server_update([x], [[x33()]]),
    "streaming": lambda x: StreamingAverage().add([x]),
    "streaming, second": streaming_second,
    "streaming, out": streaming_out,
    "all_finite": all_finite,
    "params": lambda x: lwsam_perturb_([x], [x]),
    "grads": lambda x: lwsam_perturb_([x33()], [x]),
    "restored": lambda x: restore_([x], torch.zeros(64, dtype=torch.uint8)),
    "models": lambda x: personalization_scores([x], [x]),
    "stepped": lambda x: proximal_sgd_step_([x], [x], [x], 1, 1),
    "anchors": lambda x: proximal_sgd_step_([x33()], [x33()], [x], 1, 1),
    "distance": lambda x: squared_distance([x], [x]),
    "distance of one": lambda x: squared_distance([x33()], [x]),
    "student": lambda x: ensemble_distillation_loss(x, [x]),
    "teacher": lambda x: ensemble_distillation_loss(x33(), [x]),
    "one teacher": lambda x: distillation_loss(x33(), x, torch.zeros(3, dtype=torch.int64), 0.5, 1),
    "labels": lambda x: distillation_loss(x33(), x33(), x, 0.5, 1, multilabel=True),
    "logits": lambda x: ensemble_logits([x, x]),
    "spectrum": spectrum,
    "spectrum of a list": lambda x: spectrum([x]),
    "divergence": lambda x: spectral_divergence(x, x33()),
    "spectral teacher": lambda x: spectral_divergence(x33(), x),
}
LAYERS = {
    "linear, input": lambda x: linear_relu(x, x33(), torch.ones(3)),
    "linear, weight": lambda x: linear_relu(x33(), x, torch.ones(3)),
    "linear, bias": lambda x: linear_relu(x33(), x33(), x),
    "convolution, input": lambda x: conv_pool_relu(x, torch.ones(1, 1, 2, 2), torch.ones(1)),
    "convolution, weight": lambda x: conv_pool_relu(torch.ones(1, 1, 4, 4), x, torch.ones(1)),
    "convolution, bias": lambda x: conv_pool_relu(torch.ones(1, 1, 4, 4), torch.ones(1, 1, 2, 2), x),
}
OPTIONS = {
    "backup": lambda x: lwsam_perturb_([x33()], [x33()], backup=x),
    "restored from": lambda x: restore_([x33()], x),
    "ignore": lambda x: ensemble_distillation_loss(x33(), [x33()], ignore=x),
    "sample_weights": lambda x: ensemble_distillation_loss(x33(), [x33()], sample_weights=x),
    "teachers": lambda x: ensemble_distillation_loss(x33(), x),
    "names": layer_groups,
}


@pytest.mark.parametrize("call", LISTS)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch._mkldnn])
def test_a_sparse_tensor_is_refused(call, layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its CSR tensors are a beta
        x = x33().to_mkldnn() if layout == torch._mkldnn else x33().to_sparse(layout=layout)
    with pytest.raises((ValueError, TypeError), match=rf"{str(layout).removeprefix('torch.')} float32 \[3, 3\] on cpu"):
        LISTS[call](x)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_scores_are_refused(layout):
    x = torch.ones(1, 1, dtype=torch.float64).to_sparse(layout=layout)
    with pytest.raises(ValueError, match=r"scores is sparse_.* dense tensors are accepted"):
        lwsam_perturb_([x33()], [x33()], x)


@pytest.mark.parametrize("call", [*LISTS, *LAYERS])
def test_none_is_refused(call):
    with pytest.raises((ValueError, TypeError), match="NoneType"):
        (LISTS | LAYERS)[call](None)


@pytest.mark.parametrize("call", OPTIONS)
def test_a_number_for_a_tensor_is_refused(call):
    with pytest.raises((ValueError, TypeError), match=r"(is|are) an? int"):
        OPTIONS[call](3)


def test_complex_numbers_may_be_infinite_too(device):
    x = torch.zeros(3, dtype=torch.complex64, device=device)
    assert all_finite(x, x.conj())
    x[1] = complex(0, math.inf)
    assert not all_finite(x)
    assert not all_finite(x.conj())
