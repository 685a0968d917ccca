"""How far an engine is within a round, as a display sees it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pfl_ext.algorithms import FedAvg, FedAvgFT
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import InProcess
from pfl_ext.federation import Federation, Interrupted, Reply, Request, Settings
from pfl_ext.federation.turns import Turns

CLIENTS = 4


def _federation(method: FedAvg, engine: InProcess, folder: Path | None = None) -> Federation:
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    rows = tuple(torch.arange(40).view(CLIENTS, 10))
    parts = (tuple(r[a:b] for r in rows) for a, b in ((0, 6), (6, 8), (8, 10)))
    nobody = torch.empty(0, dtype=torch.int64)
    partition = Partition(*parts, nobody, nobody)
    settings = Settings(rounds=2, seed=0)
    return Federation(
        method,
        torch.nn.Linear(4, 2),
        Dataset("d", x, y, ("a", "b"), torch.zeros(40, dtype=torch.bool)),
        partition,
        settings,
        engine=engine,
        folder=folder,
    )


def test_turns_of_a_stage_and_round_are_counted_together() -> None:
    turns = Turns()
    assert (turns.stage, turns.asked, turns.done) == (None, 0, 0)
    turns.begin([Request(k, 1, "train") for k in range(3)])
    turns.end(2)
    turns.begin([Request(3, 1, "train")])  # one more that flies in the same round
    assert (turns.stage, turns.asked, turns.done) == ("train", 4, 2)
    turns.begin([Request(k, 1, "evaluate") for k in range(5)])
    assert (turns.stage, turns.asked, turns.done) == ("evaluate", 5, 0)
    turns.begin([])
    assert turns.asked == 5


class _Watched(InProcess):
    """Looks at the turns when each reply is there."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, int, int]] = []

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        for reply in super().run(requests, costs):
            self.seen.append((self.turns.stage, self.turns.done, self.turns.asked))
            yield reply


def test_every_turn_of_a_run_is_counted_when_it_is_over() -> None:
    engine = _Watched()
    _federation(FedAvg(), engine).run()
    one = [(stage, k, CLIENTS) for stage in ("train", "evaluate") for k in range(1, CLIENTS + 1)]
    assert engine.seen == one + one


def test_turns_that_are_asked_for_in_parts_are_counted_as_one_whole() -> None:
    turns = Turns()
    turns.expect("finish", 2, 5, done=1)
    assert turns.asked == 0  # of an engine that counts none nothing is shown
    seen = []
    for group in ([1, 2], [3, 4]):
        turns.begin([Request(k, 2, "finish") for k in group])
        for _ in group:
            turns.end()
            seen.append((turns.done, turns.asked))
    assert seen == [(2, 5), (3, 5), (4, 5), (5, 5)]


def test_clients_after_the_last_round_are_counted_over_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfl_ext.federation.federation._GROUP", 3)
    engine = _Watched()
    _federation(FedAvgFT(), engine).run()
    assert [seen[1:] for seen in engine.seen if seen[0] == "finish"] == [(k, CLIENTS) for k in range(1, CLIENTS + 1)]


@pytest.mark.parametrize("saved", [False, True])
def test_the_first_signal_is_answered_before_the_round_is_over(tmp_path: Path, saved: bool) -> None:
    answers: list[tuple[str, int]] = []

    class Pressed(FedAvg):
        """Somebody presses Ctrl-C while client 1 trains in round 2."""

        def train(self, client, received):  # type: ignore[no-untyped-def]
            if client.index == 1 and federation.round == 1:
                signal.raise_signal(signal.SIGINT)
                answers.append(("and trains on", client.index))
            return super().train(client, received)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        federation = _federation(Pressed(), InProcess(), tmp_path if saved else None)
        federation.answer = lambda text: answers.append((text, federation.round))
        with pytest.raises(Interrupted, match="after round 2"):
            federation.run()
    finally:
        signal.signal(signal.SIGINT, before)
    saving = ", then saving" if saved else ""
    assert answers == [(f"finishing round 2{saving}; again to stop now", 1), ("and trains on", 1)]
