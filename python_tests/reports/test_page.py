from __future__ import annotations

import json
import re
import shutil
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from invented_results import HOSTILE, add_rounds, invented_run

from pfl_ext.cli import main
from pfl_ext.reports.page import document as document_module
from pfl_ext.reports.page import live
from pfl_ext.reports.page.document import document
from pfl_ext.reports.page.found import Reader

pytest.importorskip("uplot", reason="the page's charts are of the package uplot-python")


class Page(HTMLParser):
    """What of a page the tests ask for: its elements, its text, the numbers in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        elif self.cdata_elem is None:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def numbers(self) -> dict:
        return json.loads(self.scripts[0])


def page_of(*folders: Path) -> Page:
    return Page(document(Reader(folders).read()))


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    for method, level in (("ditto", 0.9), ("fedavg", 0.6)):
        for seed in (0, 1):
            invented_run(tmp_path / "compared" / f"{method}-seed{seed}", method, seed=seed, level=level)
    return tmp_path / "compared"


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_a_page_is_one_file_that_loads_nothing(comparison):
    page = page_of(comparison)
    assert not [tag for tag, attributes in page.tags if "src" in attributes]
    links = {attributes["href"] for _, attributes in page.tags if attributes.get("href")}
    assert {link for link in links if not link.startswith("#")} == {"data:,"}
    (policy,) = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv")]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_text_and_tables_come_before_numbers_and_scripts(comparison):
    text = document(Reader([comparison]).read())
    assert text.rindex("</table>") < text.index('<script type="application/json"') < text.index("uPlot = (function")


def test_seeds_are_pooled_into_a_mean_and_a_standard_deviation(comparison):
    group = page_of(comparison).numbers["groups"][0]
    assert (group["name"], group["seeds"]) == ("ditto", [0, 1])
    curve = group["curves"]["personal/test/accuracy/mean"]
    folders = [Reader([comparison / f"ditto-seed{seed}"]).read().runs[0] for seed in (0, 1)]
    a, b = ([r["models"]["personal"]["test"]["accuracy"]["mean"] for r in run.history] for run in folders)
    assert curve["round"] == [1, 2, 3, 4] and curve["seeds"] == [2] * 4
    assert curve["mean"] == pytest.approx([(x + y) / 2 for x, y in zip(a, b, strict=True)], rel=1e-5)
    assert curve["std"] == pytest.approx([abs(x - y) / 2**0.5 for x, y in zip(a, b, strict=True)], rel=1e-5)


def test_traffic_and_times_add_up_over_the_rounds(comparison):
    measured = page_of(comparison).numbers["groups"][0]["measured"]
    assert measured["megabytes, up and down"]["mean"] == pytest.approx([9, 18, 27, 36])
    assert measured["virtual seconds, wait-free"]["mean"] == [1.5, 3, 4.5, 6]
    assert measured["training: loss"]["mean"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4], rel=1e-5)


def test_each_client_has_its_samples_classes_and_results(comparison):
    numbers = page_of(comparison).numbers
    run, cut = numbers["runs"][0], numbers["partitions"][0]
    assert cut["classes"] == ["cat", "dog", "ship"]
    held = [dict(zip(pairs[::2], pairs[1::2], strict=True)) for pairs in cut["held"]]
    assert [sum(own.values()) for own in held] == cut["sizes"]["train"] == run["clients"]["train_samples"]
    assert len(run["clients"]["personal/test/accuracy"]) == 12
    # Both methods have the same partition with the same seed, and each seed its own.
    assert [run["partition"] for run in numbers["runs"]] == [0, 1, 0, 1]


def test_options_that_differ_are_listed_and_those_of_one_value_are_not(comparison):
    page = page_of(comparison)
    start = page.text.index("Options that differ")
    assert "method.lr ditto ditto 0.9 fedavg fedavg 0.6" in page.text[start:]
    assert "federation.rounds" not in page.text[start : page.text.index("Configuration and versions", start)]


def test_a_sweep_has_lines_over_the_option_that_was_varied(tmp_path):
    for alpha in (0.1, 1.0):
        for method in ("ditto", "fedavg"):
            run = invented_run(tmp_path / f"alpha={alpha}" / f"{method}-seed0", method)
            config = (run.path / "config.toml").read_text()
            (run.path / "config.toml").write_text(config + f"\n[partition]\nalpha = {alpha}\n")
    (option,) = page_of(tmp_path).numbers["options"]
    assert option == {
        "name": "partition.alpha",
        "values": ["0.1", "1.0"],
        "lines": [{"0.1": 0, "1.0": 2}, {"0.1": 1, "1.0": 3}],
    }


def test_runs_of_one_name_in_two_folders_are_told_apart(tmp_path):
    for folder in ("first", "second"):
        invented_run(tmp_path / folder / "ditto-seed0")
    found = Reader([tmp_path / "first", tmp_path / "second", tmp_path / "second" / "ditto-seed0"]).read()
    assert list(found.groups) == ["first/ditto", "second/ditto"]


def test_runs_with_different_partitions_have_no_best(tmp_path):
    for seed, method in enumerate(("ditto", "fedavg")):
        invented_run(tmp_path / f"{method}-seed{seed}", method, seed=seed)
    page = page_of(tmp_path)
    assert "strong" not in {tag for tag, _ in page.tags}
    assert "none is called best" in page.text


def test_a_metric_of_which_low_is_good_is_shown_so(comparison):
    for path in comparison.glob("*/config.toml"):
        path.write_text(path.read_text().replace('metric = "accuracy"', 'metric = "loss"'))
    text = document(Reader([comparison]).read())
    rows = re.findall(r'<tr><th scope="row">(ditto|fedavg)</th>.*?</tr>', text[text.index('id="results"') :])
    assert rows[:2] == ["ditto", "fedavg"]
    ditto = re.search(r'<th scope="row">ditto</th>.*?</tr>', text[text.index('id="results"') :])[0]
    assert "<strong>0.3" in ditto
    assert "Loss after the last round, mean over clients" in text


def test_a_long_run_is_drawn_by_400_points_with_the_last_one(tmp_path):
    invented_run(tmp_path / "run", rounds=900, clients=2)
    curve = page_of(tmp_path).numbers["groups"][0]["curves"]["personal/test/accuracy/mean"]
    assert len(curve["round"]) == 400
    assert curve["round"][-1] == 900


def test_what_is_not_a_number_is_a_gap_and_not_json_that_browsers_refuse(tmp_path):
    results = invented_run(tmp_path / "run")
    record = results.records()[-1]
    record["round"], record["training"]["loss"] = 5, float("nan")
    record["models"]["personal"]["test"]["accuracy"]["mean"] = float("inf")
    results.append(record)
    group = page_of(tmp_path).numbers["groups"][0]
    assert group["curves"]["personal/test/accuracy/mean"]["mean"][-1] is None
    assert group["measured"]["training: loss"]["mean"][-1] is None


# ---- what is missing -------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_says_how_far_it_is(tmp_path):
    invented_run(tmp_path / "run", rounds=3, planned=20)
    page = page_of(tmp_path)
    assert "unfinished, 3 of 20 rounds are over" in page.text
    assert "3 of 20 rounds unfinished" in page.text


def test_a_run_without_a_round_is_a_page_too(tmp_path):
    results = invented_run(tmp_path / "run", rounds=1, planned=5)
    (results.path / "metrics.jsonl").write_text("")
    (results.path / "clients.csv").unlink()
    page = page_of(tmp_path)
    assert "unfinished, 0 of 5 rounds are over" in page.text
    assert "no client was evaluated" in page.text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clients.csv", "the clients' table (clients.csv) is missing"),
        ("config.toml", "its configuration (config.toml) is missing"),
        ("versions.json", "what it ran with (versions.json) is missing"),
        ("partition.safetensors", "its partition (partition.safetensors) is missing"),
        ("classes.csv", "its table of classes (classes.csv) is missing"),
    ],
)
@pytest.mark.parametrize("damage", ["removed", "damaged"])
def test_a_file_that_is_missing_or_damaged_is_named_and_the_rest_is_shown(name, said, damage, tmp_path):
    results = invented_run(tmp_path / "run")
    if damage == "removed":
        (results.path / name).unlink()
    else:
        (results.path / name).write_bytes(b"\xff\xfe\x00not this")
    page = page_of(tmp_path)
    assert said in page.text
    assert page.numbers["groups"][0]["curves"]["personal/test/accuracy/mean"]["round"] == [1, 2, 3, 4]


def test_a_damaged_run_is_left_out_with_the_line_that_is_wrong(comparison):
    path = comparison / "ditto-seed1" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    page = page_of(comparison)
    assert f"{comparison / 'ditto-seed1'} is left out" in page.text and "line 2 is damaged" in page.text
    assert [run["name"] for run in page.numbers["runs"]] == ["ditto", "fedavg, seed 0", "fedavg, seed 1"]


def test_the_half_written_last_line_of_a_run_is_passed_over(tmp_path):
    results = invented_run(tmp_path / "run")
    with (results.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "mod')
    assert page_of(tmp_path).numbers["groups"][0]["measured"]["seconds measured"]["round"] == [1, 2, 3, 4]


# ---- names that would be code ----------------------------------------------------------------------------------------


def test_no_text_of_a_file_becomes_an_element_or_ends_the_script(tmp_path):
    results = invented_run(tmp_path / "run", HOSTILE, classes=(HOSTILE, "<b>dog", "ship"))
    config = (results.path / "config.toml").read_text()
    (results.path / "config.toml").write_text(
        config + f"\n[{json.dumps(HOSTILE)}]\n{json.dumps(HOSTILE)} = {json.dumps(HOSTILE)}\n"
    )
    results.write_json("versions.json", {HOSTILE: HOSTILE})
    rows = [{**row, HOSTILE: HOSTILE} for row in results.clients()]
    results.write_clients(rows)
    page = page_of(results.path)
    assert len(page.scripts) == 3
    assert not {"img", "b"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.numbers["partitions"][0]["classes"][0] == HOSTILE
    assert HOSTILE.split("<")[0] in page.text and HOSTILE in " ".join(page.words)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_page_beside_the_results(comparison, capsys):
    assert main(["report", str(comparison)]) == 0
    assert "report on 4 runs" in capsys.readouterr().out
    assert page_of(comparison).numbers == Page((comparison / "report.html").read_text()).numbers


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no folder nowhere"),
        (["empty"], "empty holds no results: there is no metrics.jsonl"),
        (["empty", "--watch", "--output", "a.html"], "--watch serves the page and writes no file"),
        (["empty", "--port", "1"], "--port works with --watch alone"),
        (["empty", "--watch", "--port", "70000"], "accepted is 0 to 65535"),
        (["empty", "--output", "empty"], "is a folder; name a file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_and_nothing_is_written(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["report", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_without_the_chart_library_the_extra_is_named(comparison, monkeypatch, capsys):
    document_module._library.cache_clear()
    monkeypatch.setattr(document_module.importlib.util, "find_spec", lambda name: None)
    assert main(["report", str(comparison)]) == 1
    assert "pip install 'pfl_ext[report]'" in capsys.readouterr().err
    assert not (comparison / "report.html").exists()
    document_module._library.cache_clear()


def test_all_runs_damaged_is_an_error_that_says_how(tmp_path, capsys):
    results = invented_run(tmp_path / "run")
    (results.path / "metrics.jsonl").write_text("nothing\nof this\n")
    assert main(["report", str(tmp_path / "run")]) == 1
    assert "line 1 is damaged" in capsys.readouterr().err


# ---- live ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path):
    """A growing run and the address of its page."""
    results = invented_run(tmp_path / "run", rounds=2, planned=4)
    server = live._Server(("127.0.0.1", 0), live._Page([results.path]))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield results, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(address: str, **headers: str) -> tuple[int, str, str | None]:
    request = urllib.request.Request(
        address, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers["ETag"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers["ETag"]


def test_new_rounds_are_served_once_and_only_when_there_are_some(served):
    results, address = served
    status, text, tag = ask(f"{address}/numbers")
    rounds = json.loads(text)["numbers"]["groups"][0]["measured"]["seconds measured"]["round"]
    assert (status, rounds) == (200, [1, 2])
    assert ask(f"{address}/numbers", If_None_Match=tag)[0] == 304
    add_rounds(results, 3, 3)
    status, text, _ = ask(f"{address}/numbers", If_None_Match=tag)
    assert status == 200
    assert json.loads(text)["numbers"]["groups"][0]["measured"]["seconds measured"]["round"] == [1, 2, 3]
    assert "3 of 4 rounds" in json.loads(text)["parts"]["summary"]


def test_only_this_machine_s_own_page_is_answered(served):
    _, address = served
    assert ask(address)[0] == 200
    assert ask(f"{address}/../etc/passwd")[0] == 404
    assert ask(address, Host="elsewhere.example:80")[0] == 403


def test_results_that_vanish_are_told_and_served_again_when_they_are_back(served):
    results, address = served
    shutil.move(results.path, results.path.with_name("away"))
    status, text, _ = ask(f"{address}/numbers")
    assert (status, "there is no folder" in text) == (503, True)
    shutil.move(results.path.with_name("away"), results.path)
    assert ask(f"{address}/numbers")[0] == 200
