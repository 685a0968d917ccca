"""LoRA: a network wrapped by peft trains, keeps and sends its small matrices only.

What is frozen is no part of a model's state, for every method, so nothing has to be said: the network goes into the
federation as peft made it. Needs peft: ``pip install peft``.
"""

from __future__ import annotations

import copy
from typing import cast

from peft import LoraConfig, PeftModel, get_peft_model
from text import PUBLIC, pretrained, speakers
from torch import nn

from pfl_ext import data
from pfl_ext.algorithms import Ditto
from pfl_ext.federation import Federation, Settings, WorkingModel, stream


def wrapped(network: nn.Module, rank: int) -> PeftModel:
    """A copy of a character transformer with matrices of that rank beside its linear layers."""
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["mlp.0", "mlp.3", "out_proj", "head"])
    return cast(PeftModel, get_peft_model(copy.deepcopy(network), config))  # type: ignore[arg-type]


def main(
    rounds: int = 5, public_rounds: int = 5, length: int = 64, width: int = 64, rank: int = 4
) -> dict[str, dict[str, float]]:
    """Ditto with the whole network and with LoRA: results on clients' own tests, and what a client sends."""
    texts = data.load(f"speeches@{length}")
    public, private = speakers(texts, range(PUBLIC)), speakers(texts, range(PUBLIC, len(texts.domains)))
    network = pretrained(public, public_rounds, width)
    partition = data.PARTITIONERS["by_domain"](private, generator=stream(0, "partition"))
    found = {}
    for name, module in (("whole", network), ("lora", wrapped(network, rank))):
        method = Ditto(optimizer="adam", lr=0.001 if name == "whole" else 0.01, batch_size=16, lam=0.1)
        run = Federation(method, module, private, partition, Settings(rounds=rounds))
        last = run.run()[-1]
        tests, sent = last["models"]["personal"]["test"], last["communication"]
        found[name] = {metric: tests[metric]["mean"] for metric in ("accuracy", "perplexity")}
        found[name] |= {f"sent_{what}": sent[f"up_{what}"] / partition.clients for what in ("parameters", "bytes")}
    # The trained matrices, added to the network's own weights: a plain network again.
    WorkingModel(module).load(run.server["model"])
    plain = cast(PeftModel, module).merge_and_unload()
    assert isinstance(plain, nn.Module) and not any("lora" in label for label, _ in plain.named_parameters())
    return found


if __name__ == "__main__":
    for name, results in main().items():
        print(f"{name:6} " + "  ".join(f"{metric} {value:,.3f}" for metric, value in results.items()))
