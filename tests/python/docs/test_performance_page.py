"""docs/performance.md has the results between its markers, and nothing else of it is touched."""

import json
import os
import re
import sys
from collections import Counter
from itertools import pairwise, permutations
from xml.etree import ElementTree

import pytest

from ckptfs.bench.schedule import take_turns
from program import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import bench.machine
from bench import fixtures, render_docs
from bench import results as bench_results
from bench.render_docs import Refused
from bench.tables import TABLES

MACHINE = {"cores": 2, "memory_gb": 16, "kernel": "6.1.0", "filesystem": "ext4", "versions": {"ckptfs": "0.1.0"}}

SAVING = [
    {"row": ["ckptfs, `save_sharded`"], "runs": [
        {"seconds": 3.0, "cpu": 0.5, "peak": 0.01}, {"seconds": 1.0, "cpu": 0.75, "peak": 0.01},
        {"seconds": 2.0, "cpu": 0.25, "peak": 0.01},
    ]},
    {"row": ["the <other> & more"], "runs": [{"seconds": 4.0, "cpu": 1.0, "peak": 0.0}] * 3},
]  # fmt: skip

SAVING_LINES = """\
`RUNS=3 scripts/bench/run saving`, 3 runs; 2 cores, 16 GB, ext4, Linux 6.1.0; ckptfs 0.1.0.

| saving 2.1 GB in 4 shards | seconds (least to most) | CPU seconds | peak memory above them |
|---|---|---|---|
| ckptfs, `save_sharded` | 2.00 (1.00 to 3.00) | 0.50 | 0.01 |
| the <other> & more | 4.00 (4.00 to 4.00) | 1.00 | 0.00 |

![saving: seconds](performance/saving.svg)"""


def results(part, **tables):
    return {"command": f"RUNS=3 scripts/bench/run {part}", "machine": MACHINE, "tables": tables}


def place(name, text="| as it was |"):
    return f"Before {name}.\n\n<!-- table {name} -->\n{text}\n<!-- end -->\n\nBehind {name}.\n"


@pytest.fixture
def page(tmp_path):
    """A page with a place for every table, and a folder with the results of one."""
    folder = tmp_path / "performance"
    folder.mkdir()
    (folder / "saving.json").write_text(bench_results.to_text(results("saving", saving=SAVING)))
    page = tmp_path / "performance.md"
    page.write_text("\n".join(map(place, TABLES)))
    return page


def folder_of(page):
    return page.with_suffix("")


def add(page, found):
    (folder_of(page) / f"{found['command'].split()[-1]}.json").write_text(bench_results.to_text(found))


def test_only_tables_with_results_are_replaced(page):
    before = page.read_text()
    render_docs.write(page, folder_of(page))
    assert page.read_text() == before.replace(place("saving"), place("saving", SAVING_LINES))
    assert sorted(path.name for path in folder_of(page).iterdir()) == ["saving.json", "saving.svg"]


def test_rendering_again_changes_nothing_and_new_results_do(page):
    folder = folder_of(page)
    assert render_docs.changed_files(page, folder) == [page, folder / "saving.svg"]
    render_docs.write(page, folder)
    files = {path: path.read_bytes() for path in (page, *folder.iterdir())}
    assert not render_docs.changed_files(page, folder)
    render_docs.write(page, folder)
    assert files == {path: path.read_bytes() for path in (page, *folder.iterdir())}
    add(page, results("saving", saving=SAVING[:1]))
    assert render_docs.changed_files(page, folder) == [page, folder / "saving.svg"]
    render_docs.write(page, folder)
    assert "the <other>" not in page.read_text() + (folder / "saving.svg").read_text()


def test_hand_edits_and_empty_charts_are_found(page):
    folder = folder_of(page)
    render_docs.write(page, folder)
    page.write_text(page.read_text().replace("2.00 (1.00", "1.90 (1.00"))
    assert render_docs.changed_files(page, folder) == [page]
    with pytest.raises(SystemExit, match="performance.md is not what the results give: run scripts/bench/run docs"):
        render_docs.main("--check", page=page, folder=folder)
    render_docs.main(page=page, folder=folder)
    (folder / "old.svg").write_text("<svg/>")
    assert render_docs.changed_files(page, folder) == [folder / "old.svg"]
    render_docs.main(page=page, folder=folder)
    render_docs.main("--check", page=page, folder=folder)
    assert not (folder / "old.svg").exists()


def test_a_chart_has_a_bar_and_a_spread_for_each_row(page):
    render_docs.write(page, folder_of(page))
    drawn = ElementTree.parse(folder_of(page) / "saving.svg").getroot()
    kinds = [each.get("class") for each in drawn.iter()]
    assert kinds.count("ours") == 2 and kinds.count("spread") == 2
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["saving: seconds", "ckptfs, save_sharded", "2.00", "the <other> & more", "4.00"]
    first, second = (float(each.get("width")) for each in drawn.iter("{http://www.w3.org/2000/svg}rect"))
    assert second == 2 * first
    assert "prefers-color-scheme:dark" in (folder_of(page) / "saving.svg").read_text()


def test_targets_that_are_missed_say_so(page):
    rows = [
        {"row": ["load_file"], "runs": [{"mount": 1.0, "ext4": 2.0}, {"mount": 1.5, "ext4": 1.0}]},
        {"row": ["random order"], "runs": [{"mount": 1.0, "ext4": 1.0}]},
        {"row": ["owned, cold"], "runs": [
            {"ckptfs": 1.0, "safetensors": 5.0, "fastsafetensors": 2.0, "runai-model-streamer": 3.0, "ideal": 1.0},
            {"ckptfs": 1.0, "safetensors": 1.0, "fastsafetensors": 2.5, "runai-model-streamer": 3.0, "ideal": 1.0},
            {"ckptfs": 1.0, "safetensors": 5.0, "fastsafetensors": 2.5, "runai-model-streamer": 3.0, "ideal": 0.5},
        ]},
        {"row": ["first byte"], "runs": [{"mount": 0.6}]},
        {"row": ["daemon memory"], "runs": [{"peak": 10_000_000, "budget": 5_000_000}] * 2
         + [{"peak": 100_000_000, "budget": 5_000_000}]},
    ]  # fmt: skip
    add(page, results("targets", targets=rows))
    render_docs.write(page, folder_of(page))
    for line in [
        "| load_file | mount 1.25 s | ext4 1.50 s | 1.00 (0.50 to 1.50) |  |  | 0.9, missed | 0.7 |",
        "| random order | mount 1.00 s | ext4 1.00 s | 1.00 (1.00 to 1.00) |  |  | 1 | 0.8 |",
        # The best by median, not the fastest of one run.
        "| owned, cold | ckptfs 1.00 s | fastsafetensors 2.50 s | 0.40 (0.40 to 0.50) |  | 0.40 | 0.95 | 0.7 |",
        "| first byte |  |  | 600 (600 to 600) ms |  |  | 500 ms, missed | 200 ms |",
        "| daemon memory | peak 0.01 GB | budget 0.01 GB | 5 (5 to 95) MB |  |  | 64 MB, missed |  |",
    ]:
        assert line in page.read_text().splitlines(), line
    text = page.read_text()
    reached = text[text.index("<!-- table targets -->") : text.index("<!-- table targets-missed -->")]
    assert ["| random order" in reached, "| owned, cold" in reached, ", missed" in reached] == [True, True, False]
    drawn = (folder_of(page) / "targets.svg").read_text()
    assert "random order" in drawn and "load_file" not in drawn and 'class="mark"' in drawn
    drawn = (folder_of(page) / "targets-missed.svg").read_text()
    assert "load_file" in drawn and "first byte" not in drawn
    add(page, results("targets", targets=rows[1:2]))
    render_docs.write(page, folder_of(page))
    assert "<!-- table targets-missed -->\nNone.\n<!-- end -->" in page.read_text()
    assert not (folder_of(page) / "targets-missed.svg").exists()


def test_the_chart_of_the_readme_has_each_side_of_the_measured_targets(page):
    others = {"safetensors": 3.0, "fastsafetensors": 2.0, "runai-model-streamer": 1.5}
    rows = [
        {"row": ["from_pretrained"], "runs": [{"mount": 1.25, "ext4": 2.5}]},
        {"row": ["random order"], "runs": [{"mount": 9.0, "ext4": 9.0}]},
        {"row": ["owned, cold"], "runs": [{"ckptfs": 1.0, **others}]},
    ]
    add(page, results("targets", targets=rows))
    render_docs.write(page, folder_of(page))
    drawn = ElementTree.parse(folder_of(page) / "overview.svg").getroot()
    _, *texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert dict(zip(texts[::2], texts[1::2], strict=True)) == {
        "transformers, cold, the directory itself": "2.50", "transformers, cold, the mount": "1.25",
        "load_file, copied, cold, ckptfs": "1.00", "load_file, copied, cold, Run:ai": "1.50",
        "load_file, copied, cold, fastsafetensors": "2.00", "load_file, copied, cold, safetensors": "3.00",
    }  # fmt: skip
    assert [each.get("class") for each in drawn.iter("{http://www.w3.org/2000/svg}rect")] == [
        "other", "ours", "ours", "other", "other", "other",
    ]  # fmt: skip


def test_times_are_ratios_to_the_first_row_of_the_same_state(page):
    def row(name, state, *seconds):
        return {"row": [name, state], "runs": [{"seconds": each, "cpu": 1.0, "peak": 1.0} for each in seconds]}

    rows = [row("ckptfs", "cold", 1.0, 2.0, 4.0), row("other", "cold", 3.0, 3.0, 4.0),
            row("ckptfs", "cached", 0.5, 0.5, 0.5), row("other", "cached", 1.0, 1.0, 1.0)]  # fmt: skip
    add(page, results("loader", owned=rows))
    render_docs.write(page, folder_of(page))
    assert "| other | cold | 3.00 | 1.00 | 1.00 | 1.50 (1.00 to 3.00) |" in page.read_text()
    assert "| other | cached | 1.00 | 1.00 | 1.00 | 2.00 (2.00 to 2.00) |" in page.read_text()


@pytest.mark.parametrize(
    "broken, said",
    [
        (lambda text: text.replace(place("saving"), ""), "no place for table 'saving'"),
        (lambda text: text + place("saving"), "table 'saving' stands twice"),
        (lambda text: text + place("speed"), "a marker for a table 'speed': no bench measures it"),
        (lambda text: text.replace("it was |\n<!-- end -->", "", 1), f"table '{[*TABLES][0]}' has no end"),
        (lambda text: text[: text.rindex("<!-- end -->")], f"table '{[*TABLES][-1]}' has no end"),
        (lambda text: "<!-- end -->" + text, "has <!-- end --> where nothing began"),
        (lambda text: text + "<!-- end -->", "has <!-- end --> where nothing began"),
    ],
)
def test_markers_that_do_not_fit_are_refused_and_nothing_is_written(page, broken, said):
    text = broken(page.read_text())
    page.write_text(text)
    with pytest.raises(Refused, match=re.escape(said)):
        render_docs.write(page, folder_of(page))
    assert page.read_text() == text and not list(folder_of(page).glob("*.svg"))


def test_results_of_no_table_are_refused(page):
    add(page, results("saving", speed=SAVING))
    with pytest.raises(Refused, match="saving.json has a table 'speed'"):
        render_docs.write(page, folder_of(page))


def test_a_target_must_be_met_with_a_ballast_and_without(page):
    runs = [{"mount": 0.5, "ext4": 1.0, "ideal": 0.25, "ballast": 1}, {"mount": 0.95, "ext4": 1.0, "ideal": 0.9, "ballast": 0}]
    add(page, results("targets", targets=[{"row": ["load_file"], "runs": runs}]))
    render_docs.write(page, folder_of(page))
    line = "| load_file | mount 0.50 s | ext4 1.00 s | 0.50 (0.50 to 0.50) | 0.95 (0.95 to 0.95) | 0.25, 0.90 | 0.9, missed |"
    assert f"{line} 0.7 |" in page.read_text().splitlines()


@pytest.mark.parametrize(("held", "outcome"), [(0.9, "1, out of reach"), (1.3, "1, missed")])
def test_a_target_is_out_of_reach_if_the_ideal_misses_it_wherever_it_is_missed(page, held, outcome):
    """A daemon that answers constant bytes takes half as long with the ballast, and 1.2 times as long without."""
    runs = [{"mount": held, "ext4": 1.0, "constant": 0.5, "ballast": 1}, {"mount": 1.3, "ext4": 1.0, "constant": 1.2, "ballast": 0}]
    add(page, results("targets", targets=[{"row": ["cached, mapped, again"], "runs": runs}]))
    render_docs.write(page, folder_of(page))
    (line,) = [line for line in page.read_text().splitlines() if line.startswith("| cached, mapped, again")]
    assert line.endswith(f"| 0.50, 1.20 | {outcome} |  |")


def test_growth_is_an_exponent_from_the_row_before(page):
    rows = [
        {"row": [f"{count:,}"], "runs": [{"count": count, "seconds": seconds, "cpu": 0.5, "peak": 10_000_000}]}
        for count, seconds in ((10, 1.0), (100, 10.0), (1_000, 1000.0))
    ]
    add(page, results("growth", **{"growth-files": rows}))
    render_docs.write(page, folder_of(page))
    lines = page.read_text().splitlines()
    assert "| 100 | 10.000 (10.000 to 10.000) | 1.00 | 0.50 | 10 | 0.00 |" in lines
    assert "| 1,000 | 1,000.000 (1,000.000 to 1,000.000) | 2.00 | 0.50 | 10 | 0.00 |" in lines
    assert {"growth-files.svg", "growth-files-memory.svg"} <= {path.name for path in folder_of(page).iterdir()}


def test_results_are_kept_row_by_row(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CKPTFS_BENCH_RESULTS", str(tmp_path))
    monkeypatch.setenv("RUNS", "3")
    monkeypatch.delenv("SIZE", raising=False)
    monkeypatch.setattr(bench_results, "machine", lambda: MACHINE)
    kept = bench_results.Results("targets")
    kept.add("targets", ["random order"], [{"mount": 1.0000004, "ext4": 2}])
    found = json.loads((tmp_path / "targets.json").read_text())
    assert found == results("targets", targets=[{"row": ["random order"], "runs": [{"mount": 1.0, "ext4": 2}]}])
    kept = bench_results.Results("targets", ["load_file", "random order"])
    kept.add("targets", ["load_file"], [{"mount": 1.0, "ext4": 2.0}])
    kept.add("targets", ["random order"], [{"mount": 5.0, "ext4": 2.0}])
    rows = json.loads((tmp_path / "targets.json").read_text())["tables"]["targets"]
    assert [(each["row"], each["runs"][0]["mount"]) for each in rows] == [(["load_file"], 1.0), (["random order"], 5.0)]
    assert "| load_file | mount 1.00 s | ext4 2.00 s | 0.50 (0.50 to 0.50) |  |  | 0.9 | 0.7 |" in capsys.readouterr().out
    with monkeypatch.context() as context:
        context.setenv("SIZE", "0.1")
        with pytest.raises(SystemExit, match="results of another command"):
            bench_results.Results("targets", ["load_file"])
    monkeypatch.setattr(bench_results, "machine", lambda: MACHINE | {"cores": 64})
    with pytest.raises(SystemExit, match="results of another machine"):
        bench_results.Results("targets", ["load_file"])
    bench_results.Results("targets").add("targets", ["load_file"], [{"mount": 1.0, "ext4": 2.0}])
    assert len(json.loads((tmp_path / "targets.json").read_text())["tables"]["targets"]) == 1


def test_a_row_that_was_measured_with_more_runs_names_its_command(monkeypatch, page):
    monkeypatch.setenv("CKPTFS_BENCH_RESULTS", str(folder_of(page)))
    monkeypatch.setattr(bench_results, "machine", lambda: MACHINE)
    for setting in ("RUNS", "SIZE"):
        monkeypatch.delenv(setting, raising=False)
    kept = bench_results.Results("targets")
    for row in ("load_file", "random order"):
        kept.add("targets", [row], [{"mount": 1.0, "ext4": 2.0}])
    monkeypatch.setenv("RUNS", "4")
    kept = bench_results.Results("targets", ["random order"])
    kept.add("targets", ["random order"], [{"mount": 1.0, "ext4": 2.0}] * 4)
    render_docs.write(page, folder_of(page))
    text = " ".join(page.read_text().split())
    assert "`scripts/bench/run targets`, 1 to 4 runs" in text
    assert "For *random order*: `RUNS=4 scripts/bench/run targets 'random order'`." in text


def test_compared_programs_take_turns():
    order = []
    runs = fixtures.alternate(["a", "b"], lambda way: order.append(way) or len(order), 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert runs == [{"a": 1, "b": 2}, {"a": 4, "b": 3}, {"a": 5, "b": 6}] and list(runs[1]) == ["a", "b"]


@pytest.mark.parametrize("count", range(2, 8))
def test_each_compared_program_follows_each_other_one_equally_often(count):
    names = [str(number) for number in range(count)]
    runs = count * (1 + count % 2)
    orders = [[] for _ in range(runs)]
    for run, name in take_turns(names, runs):
        orders[run].append(name)
    assert orders[0] == names and all(sorted(order) == names for order in orders)
    assert Counter(order[0] for order in orders) == dict.fromkeys(names, runs // count)
    following = Counter(pair for order in orders for pair in pairwise(order))
    assert following == dict.fromkeys(permutations(names, 2), runs // count)


def test_results_without_a_page_are_not_kept(monkeypatch):
    for name in ("CKPTFS_BENCH_RESULTS", "SIZE", "CKPTFS"):
        monkeypatch.delenv(name, raising=False)
    assert bench_results.results_folder() == REPOSITORY / "docs/performance"
    for name in ("SIZE", "CKPTFS"):
        with monkeypatch.context() as context:
            context.setenv(name, "x")
            assert bench_results.results_folder() is None


def test_the_page_is_what_its_results_give():
    assert not render_docs.changed_files(REPOSITORY / "docs/performance.md", REPOSITORY / "docs/performance")


def test_evicted_files_are_cached_again_before_a_warm_run(tmp_path):
    machine = bench.machine.Machine(tmp_path, ballast=None)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(3 << 20))
    os.sync()
    machine.read(*files)
    with open(files[1], "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert fixtures.in_page_cache([files[1]]) == [0]
    machine.refill()
    assert fixtures.in_page_cache(files) == [3 << 20] * 2


def test_files_that_do_not_stay_cached_are_not_measured(tmp_path, monkeypatch):
    machine = bench.machine.Machine(tmp_path, ballast=None)
    (tmp_path / "a").write_bytes(b"something")
    machine.read(tmp_path / "a")
    monkeypatch.setattr("bench.machine.in_page_cache", lambda paths: [0 for _ in paths])
    with pytest.raises(SystemExit, match="does not keep .*/a"):
        machine.refill()
