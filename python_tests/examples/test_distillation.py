from __future__ import annotations

from example_files import load_example


def test_distillation_beats_averaging_and_personalisation_beats_both_at_home():
    result = load_example("distillation_ensemble").main()
    assert result["distilled"] > result["average"] + 0.05
    assert result["personal, client 0"] >= result["distilled, client 0"]
