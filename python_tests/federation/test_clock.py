from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pfl_ext.federation import Clock, Device, Settings, Span, Timeline, Work, clock_of

# Two clients: the first trains slowly, the second has slow links.
CLOCK = Clock([Device(0.5, 10.0, 20.0, 1.0), Device(0.1, 5.0, 10.0, 2.0)], aggregation=0.25)
# 8 samples trained for the server, 4 and 20 personally; 20 bytes up, 40 down.
WORKS = [Work(0, 8, 4, 20, 40), Work(1, 8, 20, 20, 40)]


def test_compute_and_wait_does_one_thing_after_the_other() -> None:
    timeline = Timeline(CLOCK, "compute-and-wait")
    spans = timeline.round(WORKS)
    # Client 0: 1 + 40/20 = 3 down, 4 training, 2 personal, 1 + 20/10 = 3 up. Client 1: 2 + 4 = 6, 0.8, 2, 2 + 4 = 6.
    assert [span for span in spans if span.client == 0] == [
        Span(0, "receive", 0, 3),
        Span(0, "train", 3, 7),
        Span(0, "personal", 7, 9),
        Span(0, "send", 9, 12),
    ]
    assert spans[-1].end == pytest.approx(14.8)
    assert timeline.time == pytest.approx(14.8 + 0.25)
    assert timeline.round(WORKS)[0].begin == pytest.approx(15.05)
    assert timeline.time == pytest.approx(2 * 15.05)


def test_wait_free_trains_the_personal_model_beside_the_upload() -> None:
    timeline = Timeline(CLOCK, "wait-free")
    spans = timeline.round(WORKS)
    assert [span for span in spans if span.client == 0] == [
        Span(0, "receive", 0, 3),
        Span(0, "train", 3, 7),
        Span(0, "personal", 7, 9),
        Span(0, "send", 7, 10),
    ]
    # Client 1: training until 6.8, upload until 12.8, the server until 13.05.
    assert timeline.time == pytest.approx(13.05)


def test_the_next_turn_of_a_client_waits_for_its_personal_steps() -> None:
    timeline = Timeline(CLOCK, "wait-free")
    long = [Work(0, 8, 100, 20, 40), WORKS[1]]
    timeline.round(long)
    assert timeline.time == 57  # client 0 trains its own model from 7 to 57
    trained = [span for span in timeline.round(long) if span.what == "train"]
    assert trained[0].begin == 57  # though the new model is there at 16.05
    assert trained[1].begin == pytest.approx(19.05)


def test_nobody_waits_for_clients_that_send_nothing() -> None:
    timeline = Timeline(CLOCK, "compute-and-wait")
    timeline.round([Work(0, 8, 0, 20, 0), Work(1, 0, 1000, 0, 40)])
    assert timeline._sends == 4 + 3 + 0.25
    assert timeline.time == pytest.approx(6 + 100)


def test_wait_free_never_takes_longer_and_never_half_as_long() -> None:
    for personal in (0, 1, 10, 100, 1000):
        for up in (1, 100, 10000):
            times = []
            for protocol in ("compute-and-wait", "wait-free"):
                timeline = Timeline(CLOCK, protocol)
                for _ in range(50):
                    timeline.round([Work(0, 8, personal, up, up), Work(1, 8, personal, up, up)])
                times.append(timeline.time)
            assert times[1] <= times[0] < 2 * times[1]


def test_there_is_room_for_personal_steps_until_the_new_model_arrives() -> None:
    timeline = Timeline(CLOCK, "until-arrival")
    bare = [work._replace(personal=0) for work in WORKS]
    # The server has its model at 13.05; client 0 has it at 16.05 and is idle from 7 on, client 1 at 19.05 and from 6.8.
    assert timeline.room(bare) == [18, 122]
    filled = [work._replace(personal=room) for work, room in zip(bare, timeline.room(bare), strict=True)]
    timeline.round(filled)
    begins = [span.begin for span in timeline.round(filled) if span.what == "train"]
    assert begins == pytest.approx([16.05, 19.05])  # nobody has to wait for its own steps


def test_links_that_take_twice_as_long_take_twice_as_long() -> None:
    slow = CLOCK.scaled(2.0)
    assert slow.send(WORKS[0]) == 2 * CLOCK.send(WORKS[0]) and slow.receive(WORKS[1]) == 2 * CLOCK.receive(WORKS[1])
    assert slow.train(0, 8) == CLOCK.train(0, 8) and slow.aggregation == 0.5


# ---- where the numbers come from -------------------------------------------------------------------------------------


def test_a_constant_clock_is_the_same_for_all_clients() -> None:
    clock = clock_of(Settings(clock="constant", clock_compute=0.5, clock_up=3.0), 4, seed=0)
    assert len(clock.devices) == 4 and set(clock.devices) == {Device(0.5, 3.0, 6.25e6, 0.05)}


def test_a_log_normal_clock_depends_on_the_seed_and_spreads_around_the_median() -> None:
    first, again, other = (
        clock_of(Settings(clock="log-normal", clock_spread=0.5), 2000, seed).devices for seed in (1, 1, 2)
    )
    assert first == again and first != other
    for name, median in (("compute", 0.001), ("up", 1.25e6), ("down", 6.25e6), ("latency", 0.05)):
        values = sorted(getattr(device, name) for device in first)
        assert values[1000] == pytest.approx(median, rel=0.06)
        assert values[1682] / values[1000] == pytest.approx(2.718**0.5, rel=0.08)  # one standard deviation
    assert sum((a.up > 1.25e6) == (a.compute > 0.001) for a in first) == pytest.approx(1000, abs=100)  # independent


def test_a_trace_is_read_from_csv_and_from_json(tmp_path: Path) -> None:
    rows = [{"client": k, "compute": 0.5 + k, "up": 10.0, "down": 20.0, "latency": 0.0} for k in (1, 0)]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    lines = ["client,compute,up,down,latency", *(",".join(str(v) for v in row.values()) for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    for name in ("t.json", "t.csv"):
        clock = clock_of(Settings(clock="trace", clock_trace=str(tmp_path / name)), 2, seed=0)
        assert clock.devices == (Device(0.5, 10.0, 20.0, 0.0), Device(1.5, 10.0, 20.0, 0.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("client,compute,up,down\n0,1,1,1\n", "row 1 has no latency"),
        ("client,compute,up,down,latency\n0,1,1,1,0\n", "1 of 2 clients; the first that is not there is 1"),
        ("client,compute,up,down,latency\n0,1,1,1,0\n0,1,1,1,0\n", "row 2: client 0 is there twice"),
        ("client,compute,up,down,latency\n7,1,1,1,0\n", "client 7 is not one of 0 to 1"),
        ("client,compute,up,down,latency\n0,fast,1,1,0\n", "numbers are accepted"),
        ("client,compute,up,down,latency\n0,1,0,1,0\n", "up of .* is 0.0; accepted is a number above 0"),
    ],
)
def test_a_wrong_trace_is_refused_by_what_is_wrong_in_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Clock.trace(path, 2)


def test_a_trace_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Clock.trace(tmp_path / "none.csv", 2)
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ValueError, match="is not json"):
        Clock.trace(tmp_path / "t.json", 2)


@pytest.mark.parametrize(
    "wrong",
    [{"clock": "trace"}, {"clock_trace": "x.csv"}, {"clock_up": 0.0}, {"clock_latency": -1.0}, {"protocol": "fast"}],
)
def test_settings_of_a_clock_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)
