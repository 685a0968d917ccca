import pytest

from pfl_ext.benchmarks.shapes import SHAPE_SETS, parameter_count


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("lenet", 10, 62_006), ("adapters", 84, 1_413_258), ("resnet18", 62, 11_181_642)],
)
def test_shape_sets_have_the_published_sizes(name, tensors, parameters):
    assert len(SHAPE_SETS[name]) == tensors
    assert parameter_count(SHAPE_SETS[name]) == parameters


def test_resnet18_has_the_shapes_of_torchvision():
    models = pytest.importorskip("torchvision.models", exc_type=Exception)
    model = models.resnet18(num_classes=10)
    assert [tuple(p.shape) for p in model.parameters()] == list(SHAPE_SETS["resnet18"])
