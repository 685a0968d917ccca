"""The code in docs/ runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pages import Kept, follow
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS, SCD, Ditto, FedAvg, FedAvgFT, FedBuff
from pfl_ext.benchmarks import federation, many_clients, report
from pfl_ext.benchmarks.harness import FAMILIES
from pfl_ext.cli import main
from pfl_ext.data import PARTITIONERS, Dataset, Partition, load
from pfl_ext.engines import InProcess
from pfl_ext.engines.choice import EngineOptions
from pfl_ext.federation import PROTOCOLS, Client, Engine, Federation, Method, Settings, Stage, stream
from pfl_ext.reports import read_config
from pfl_ext.tasks import TASKS

DOCS = Path(__file__).parents[1] / "docs"
PACKAGED = dict(METHODS)  # before a test makes others known


def _blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.S)


def _executed(name: str, *blocks: str) -> dict[str, Any]:
    """The names that these blocks of a page leave."""
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        # Without this file's own __future__ imports.
        exec(compile(block, f"docs/{name}", "exec", dont_inherit=True), names)
    return names


def test_the_example_method_works_and_keeps_its_input_layer(capsys: pytest.CaptureFixture[str]) -> None:
    method, use = _blocks("methods.md")
    assert len(method.splitlines()) <= 60
    names = _executed("methods.md", method, use)
    assert float(capsys.readouterr().out) > 0.6
    run, last = names["run"], names["last"]
    layers = [run.engine.store.read(k, "input") for k in range(10)]
    assert not torch.equal(layers[0], layers[1])
    assert last["communication"]["up_parameters"] == 10 * (100 * 10 + 10)
    assert list(last["models"]) == ["personal"]


def test_the_command_line_runs_a_method_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_input.py").write_text(_blocks("methods.md")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    arguments = ["--layer", "1", "--rounds", "2", "--quiet", "--no-plots", "--output", "out"]
    assert main(["run", "own_input.py:OwnInput", *arguments]) == 0
    assert "personal" in capsys.readouterr().out
    assert main(["run", "own_input.py:OwnInputt", *arguments]) == 2
    assert "has no method OwnInputt" in capsys.readouterr().err
    assert main(["run", "other.py:OwnInput", *arguments]) == 2
    assert "is not a file" in capsys.readouterr().err


def _in_order(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What clients keep, whichever engine said it, by their numbers."""
    kept = {}
    for name in state:
        if name.endswith("/rows"):
            clients = state[name.removesuffix("rows") + "clients"]
            kept[name] = state[name][clients.argsort()]
    return kept


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith("seconds")}


@pytest.fixture(scope="module")
def sites() -> type:
    engine, use, *_ = _blocks("extending.md")
    kind: type = _executed("extending.md", engine, use)["Sites"]
    return kind


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (Ditto(lr=0.1, local_steps=2), Settings(rounds=2, participation=0.6, local_buffers=("BatchNorm1d",))),
        (FedAvgFT(lr=0.1, local_steps=2, fine_tune_epochs=1), Settings(rounds=1, evaluate_train=True)),
        (FedBuff(lr=0.1, local_steps=2), Settings(rounds=3, participation=0.6, clock="log-normal")),
        (SCD(lr=0.1, local_steps=2), Settings(rounds=2, protocol="until-arrival", clock="log-normal")),
    ],
    ids=lambda given: getattr(given, "name", ""),
)
def test_the_example_engine_gives_the_bits_of_this_process(sites: type, method: Method, settings: Settings) -> None:
    digits, partition, network = _small_run()
    found = []
    for engine in (InProcess(), sites(3)):
        run = Federation(method, network, digits, partition, settings, engine=engine)
        found.append((run, [_plain(record) for record in run.run()]))
    (ours, records), (theirs, others) = found
    assert records == others
    assert all(torch.equal(ours.server[name], theirs.server[name]) for name in ours.server)
    kept, also = _in_order(ours.engine.state()), _in_order(theirs.engine.state())
    assert kept.keys() == also.keys() and all(torch.equal(kept[name], also[name]) for name in kept)


def test_the_example_engine_goes_on_from_a_checkpoint_of_another(sites: type, tmp_path: Path) -> None:
    digits, partition, network = _small_run()

    def run(rounds: int, engine: Engine, **more: Any) -> Federation:
        method = Ditto(lr=0.1, local_steps=2)
        return Federation(method, network, digits, partition, Settings(rounds=rounds), engine=engine, **more)

    whole = run(3, InProcess())
    whole.run()
    run(1, InProcess(), folder=tmp_path).run()
    run(2, sites(2), folder=tmp_path, resume=True).run()
    resumed = run(3, sites(3), folder=tmp_path, resume=True)
    assert resumed.round == 2
    resumed.run()
    assert torch.equal(whole.server["model"], resumed.server["model"])
    kept, also = _in_order(whole.engine.state()), _in_order(resumed.engine.state())
    assert all(torch.equal(kept[name], also[name]) for name in kept)


def test_the_example_engine_has_each_site_the_samples_and_vectors_of_its_own_clients_only(sites: type) -> None:
    digits, partition, network = _small_run()
    engine = sites(2)
    Federation(Ditto(local_steps=1), network, digits, partition, Settings(rounds=1), engine=engine).run()
    assert [list(runtime.plan.rows) for runtime in engine._runtimes] == [[0, 2, 4], [1, 3]]
    written = [runtime.store.tensors()["personal/clients"].tolist() for runtime in engine._runtimes]
    assert written == [[0, 2, 4], [1, 3]]
    first, second = (runtime.model.module for runtime in engine._runtimes)
    assert first is not second


def test_the_example_engine_runs_turns_with_the_threads_of_the_settings(sites: type) -> None:
    class Counting(FedAvg):
        def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client.report["threads"] = torch.get_num_threads()
            return super().train(client, received)

    digits, partition, network = _small_run()
    before = torch.get_num_threads()
    settings = Settings(rounds=1, threads=before + 1)
    (record,) = Federation(Counting(local_steps=1), network, digits, partition, settings, engine=sites(2)).run()
    assert record["training"]["threads"] == before + 1 and torch.get_num_threads() == before


def _small_run() -> tuple[Dataset, Partition, nn.Module]:
    """Five clients, and a network that draws from torch's generator and has buffers."""
    digits = load("digits")
    partition = PARTITIONERS["dirichlet"](digits, 5, generator=stream(0, "partition"), alpha=0.5)
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 10))
    return digits, partition, nn.Sequential(*layers)


def test_the_example_option_is_everywhere_that_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    (tmp_path / "careful.py").write_text(_blocks("extending.md")[2], encoding="utf-8")
    (config,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    (tmp_path / "careful.toml").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])

    refusal = re.search(r'is refused: "(.*?)"', page)
    assert refusal is not None
    assert main(["run", "careful.py:Careful", "--share", "2"]) != 0
    assert refusal[1].replace("share is", "--share is") in capsys.readouterr().err

    with pytest.raises(SystemExit):
        main(["run", "careful.py:Careful", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    stated = re.search(r"in its help \| `(.*?)`", page)
    assert stated is not None and " ".join(stated[1].split()) in shown

    quiet = ["--quiet", "--no-plots", "--local-steps", "2", "--trust-code"]
    assert main(["run", "--config", "careful.toml", "--output", "one", *quiet]) == 0
    assert read_config(Path("one"))["method"]["share"] == 0.5
    resumed = ["run", "--config", "careful.toml", "--output", "one", "--rounds", "2", "--resume", *quiet]
    assert main([*resumed, "--share", "1"]) != 0
    assert "\n  --share: 0.5 there, 1.0 here\n" in capsys.readouterr().err
    assert main(resumed) == 0

    Path("misspelt.toml").write_text(config.replace("share =", "shares ="), encoding="utf-8")
    assert main(["run", "--config", "misspelt.toml", "--output", "two", *quiet]) != 0
    assert "did you mean share?" in capsys.readouterr().err

    varied = ["sweep", "careful.py:Careful", "--vary", "method.share=0.5,1", "--rounds", "1", "--output", "swept"]
    assert main([*varied, "--quiet", "--no-plots", "--local-steps", "2"]) == 0
    assert "share" in capsys.readouterr().out


def test_the_example_loss_is_stepped_natively_and_its_teacher_matters() -> None:
    taught = _executed("extending.md", _blocks("extending.md")[3])["Taught"]
    data = load("digits")
    partition = PARTITIONERS["dirichlet"](data, 3, generator=stream(0, "partition"), alpha=0.5)
    models = []
    for imitation, fused in ((0.0, True), (0.5, True), (0.5, False)):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        method = taught(lr=0.1, imitation=imitation)
        run = Federation(method, network, data, partition, Settings(rounds=3, fused_steps=fused))
        run.run()
        models.append(run.server["model"])
    alone, native, plain = models
    assert (alone - native).abs().max() > 1e-3
    torch.testing.assert_close(native, plain, rtol=0, atol=1e-5)
    assert not torch.equal(native, plain)  # the sums have another order


@pytest.mark.parametrize("page", ["architecture.md", "extending.md", "glossary.md", "methods.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    linked = [DOCS / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
    named = re.findall(r"`((?:pfl_ext|csrc|benchmarks|python_tests)/[\w./]*)`", text)
    assert linked
    assert [str(path) for path in (*linked, *(DOCS.parent / name for name in named)) if not path.exists()] == []


@pytest.mark.parametrize("page", ["engines.md", "flower.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+?)(?:_\.\.\.)?(?:\[\w+\])?`", (DOCS / page).read_text(encoding="utf-8"))
    assert named and [name for name in named if f"\ndef {name}" not in code] == []


LONGEST = 650  # characters; a reader loses the thread of more, which are to be a list or a table
PAGES = sorted(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)


@pytest.mark.parametrize(
    "page", [*PAGES, *(DOCS.parent / name for name in ("README.md", "CONTRIBUTING.md"))], ids=lambda path: path.stem
)
def test_no_paragraph_is_too_long_to_be_read(page: Path) -> None:
    text = re.sub(r"<!-- benchmark:.*?:end -->", "", page.read_text(encoding="utf-8"), flags=re.S)
    assert [part[:60] for part in _paragraphs(text) if len(part) > LONGEST] == []


def test_no_paragraph_of_the_benchmarks_is_too_long_to_be_read() -> None:
    results = DOCS.parent / "benchmarks" / "results"
    made = {
        **{
            name: report.markdown(family, report.read_csv(results / f"{name}.csv")) for name, family in FAMILIES.items()
        },
        "federation": federation.markdown(report.read_csv(results / "federation.csv")),
        "federation.memory": many_clients.markdown(report.read_csv(results / "federation.memory.csv")),
    }
    assert {name: part[:60] for name, text in made.items() for part in _paragraphs(text) if len(part) > LONGEST} == {}


def _paragraphs(text: str) -> list[str]:
    """Paragraphs and items of lists; no code, no tables."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [" ".join(part.split()) for part in parts if not part.lstrip().startswith(("|", "#", "<"))]


def _first_column(page: str, heading: str) -> list[str]:
    """The first cells of the table after a line that begins so."""
    after = (DOCS / page).read_text(encoding="utf-8").partition(f"\n{heading}")[2]
    table = re.search(r"(?:^\|.*\n)+", after, re.M)
    assert table is not None
    return [line.split("|")[1].strip() for line in table[0].splitlines()[2:]]


def test_the_table_of_methods_has_them_all() -> None:
    names = re.findall(r"^\| `(\w+)` \| `([\w-]+)` \|", (DOCS / "methods.md").read_text(encoding="utf-8"), re.M)
    assert {name: kind for kind, name in names} == {name: kind.__name__ for name, kind in PACKAGED.items()}


def test_the_table_of_hooks_has_them_all() -> None:
    functions = {name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")}
    hooks = [re.sub(r"`(\w+)\(.*", r"\1", cell) for cell in _first_column("methods.md", "The hooks")]
    assert set(hooks) == functions and len(hooks) == len(functions)
    properties = {name for name, value in vars(Method).items() if isinstance(value, property)}
    said = {re.sub(r"\W.*", "", cell.strip("`")) for cell in _first_column("methods.md", "And what a method says")}
    assert said == properties | {"private", "needs", "needs_validation", "several_networks", "public", "refuses"}


def test_the_glossary_has_the_stages_and_protocols_of_the_code() -> None:
    lines = (DOCS / "glossary.md").read_text(encoding="utf-8").splitlines()
    (stages,) = [line for line in lines if line.startswith("| stage |")]
    (protocols,) = [line for line in lines if line.startswith("| protocol |")]
    assert tuple(re.findall(r"`([\w-]+)`", stages)) == get_args(Stage)
    assert tuple(re.findall(r"`([\w-]+)`", protocols)) == ("compute-and-wait", "wait-free", "until-arrival")
    assert set(re.findall(r"`([\w-]+)`", protocols)) == set(PROTOCOLS)


def test_the_table_of_an_engine_has_all_that_it_must() -> None:
    told = {name for cell in _first_column("extending.md", "to the bit.") for name in re.findall(r"`(\w+)[(`]", cell)}
    assert told == {name for name in dir(Engine) if not name.startswith("_")}


def test_what_the_page_on_checkpoints_says_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Kept():
        names = follow(DOCS / "checkpoints.md")
    said = capsys.readouterr().out
    assert "8 rounds" in said and names["newest"].name == "checkpoint-00000008.safetensors"
    assert len(list(Path("results/long/checkpoints").iterdir())) == 2
    assert {name.partition("/")[0] for name in names["shapes"]} >= {"server", "clients"}


def test_the_page_on_checkpoints_names_the_options_that_may_change() -> None:
    """In the first column those that are no part of a run's identity, in the second those that are."""
    settings = {field.name: field.metadata["identity"] for kind in (Settings, EngineOptions) for field in fields(kind)}
    rows = re.search(r"\| may change \| stays \|\n.*?\n\n", (DOCS / "checkpoints.md").read_text(encoding="utf-8"), re.S)
    assert rows is not None
    cells = [line.split("|")[1:3] for line in rows[0].strip().splitlines()[2:]]
    for place, part in ((0, False), (1, True)):
        named = {
            name.removeprefix("no-").replace("-", "_")
            for row in cells
            for name in re.findall(r"`--([\w-]+)`", row[place])
        }
        assert named & settings.keys() and {settings[name] for name in named & settings.keys()} == {part}


def test_the_example_task_learns_a_quantile_of_named_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    _executed("tasks.md", *_blocks("tasks.md"))
    assert 0.3 < float(capsys.readouterr().out) < 0.7  # of half of the samples more was predicted


def test_the_table_of_tasks_has_them_all() -> None:
    assert [cell.strip("`") for cell in _first_column("tasks.md", "A task says")] == list(TASKS)


def test_the_code_of_the_page_on_data_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    large = _executed("data.md", *_blocks("data.md"))["large"]
    assert len(large) == 2000 and large.nbytes < 20_000 and (tmp_path / "cache").is_dir()
