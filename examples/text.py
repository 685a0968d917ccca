"""Text: FedAvg, Ditto, SCD and PerAda on what twelve speakers said, one client per speaker, character by character.

Three speakers are public: the network is trained on them first, and their text is what PerAda's server distils on. The
other nine are the clients. FedAvg, Ditto and SCD go on with the whole network; PerAda freezes it and trains adapters,
so that a client sends a part of it.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from pfl_ext import data
from pfl_ext import nn as networks
from pfl_ext.algorithms import SCD, Ditto, FedAvg, PerAda
from pfl_ext.federation import Federation, Method, Settings, WorkingModel, stream

PUBLIC = 3


def speakers(dataset: data.Dataset, chosen: range) -> data.Dataset:
    """The samples of some speakers."""
    assert dataset.domain is not None
    some = dataset.subset(((dataset.domain >= chosen.start) & (dataset.domain < chosen.stop)).nonzero().flatten())
    assert some.domain is not None
    return dataclasses.replace(
        some, domain=some.domain - chosen.start, domains=dataset.domains[chosen.start : chosen.stop]
    )


def pretrained(public: data.Dataset, rounds: int, width: int) -> nn.Module:
    """The network after some passes over the public text: a federation of one client."""
    network = networks.build(
        "char-transformer", public.input_shape, len(public.classes), stream(0, "network"), width=width
    )
    one = data.PARTITIONERS["iid"](public, 1, generator=stream(0, "public"))
    run = Federation(FedAvg(optimizer="adam", lr=0.003, batch_size=16), network, public, one, Settings(rounds=rounds))
    run.run()
    WorkingModel(network).load(run.server["model"])
    return network


def main(rounds: int = 5, public_rounds: int = 5, length: int = 64, width: int = 64) -> dict[str, dict[str, float]]:
    """The mean of each method's results on the clients' own tests: of personal models, where it has some."""
    texts = data.load(f"speeches@{length}")
    public, private = speakers(texts, range(PUBLIC)), speakers(texts, range(PUBLIC, len(texts.domains)))
    network = pretrained(public, public_rounds, width)
    adapted = networks.freeze_backbone(networks.add_adapters(copy.deepcopy(network), dropout=0.0, width=8))
    partition = data.PARTITIONERS["by_domain"](private, generator=stream(0, "partition"))
    steps = {"optimizer": "adam", "lr": 0.001, "batch_size": 16}
    methods: dict[str, tuple[Method, nn.Module]] = {
        "fedavg": (FedAvg(**steps), network),
        "ditto": (Ditto(**steps, lam=0.1), network),
        "scd": (SCD(**steps), network),
        "perada": (PerAda(**steps, lam=0.1, kd_steps=10, kd_batch_size=32), adapted),
    }
    found = {}
    for name, (method, module) in methods.items():
        torch.manual_seed(0)
        run = Federation(method, module, private, partition, Settings(rounds=rounds), auxiliary=public)
        last = run.run()[-1]
        tests = last["models"].get("personal", last["models"]["global"])["test"]
        found[name] = {metric: tests[metric]["mean"] for metric in ("accuracy", "perplexity")}
        found[name]["sent"] = last["communication"]["up_parameters"] / len(partition.train)
    return found


if __name__ == "__main__":
    for name, results in main().items():
        print(f"{name:8} " + "  ".join(f"{metric} {value:,.3f}" for metric, value in results.items()))
