"""Reports from invented results. Every number here is made up and lives in tmp_path only."""

import copy
import functools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors as mcolors
from matplotlib.image import imread

from sidestream.evaluation.stats import wilson
from sidestream.experiments.report.page import write_report
from sidestream.experiments.report.tables import markdown_table, pivot, update_readme
from sidestream.experiments.results import load_results, merge_seeds
from sidestream.experiments.table import GREEN, GREY, SPARE, listed, load
from sidestream.papers.lsar.recall import past_window

W = 128
DISTANCES = (64, 128, 160, 256, 2048)
LADDER = ["baseline", "static_faithful", "text_masked", "static"]


interval = functools.cache(wilson)


def cell(arm, metric, h, k, n=500, paper=None):
    where, ci = {"H": h, "W": W}, list(interval(k, n))
    return {"arm": arm, "where": where, "metric": metric, "value": k / n, "n": n, "ci": ci, "paper": paper}


def invented(arms=("baseline", "static_faithful", "static"), seed=0, shift=0):
    """A results file: past the window 40 items by chance and no code; `static` keeps 490 - shift codes."""
    cells = []
    for arm in arms:
        for h in DISTANCES:
            past = h > W
            items = 40 if past and arm == "baseline" else 500
            codes = {"static": 490 - shift, "text_masked": 155}.get(arm, 0) if past else 500
            cells.append(cell(arm, "item_exact", h, items))
            cells.append(cell(arm, "code_exact", h, codes))
            paper = 0.844 if (arm, h) == ("static", 256) else None
            cells.append(cell(arm, "code_token", h, codes, paper=paper))
    return {
        "table": "lsar.table1",
        "scale": "cpu",
        "seed": seed,
        "command": f"sidestream run lsar.table1 --scale cpu --seed {seed}",
        "commit": "feedbeef00112233",
        "dirty": False,
        "versions": {"python": "3.11.0", "torch": "2.99.0"},
        "machine": {"cpu": "Invented CPU", "cores": 2},
        "wall_s": 754.2,
        "data_hash": "sha256:abc123",
        "settings": {"train": {"learning_rate": 0.000123, "seed": seed}, "haystack": None},
        "cells": cells,
        "notes": ["Half a prompt <b>is</b> in view & counts."],
    }


def write(path: Path, results) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


class Page(HTMLParser):
    """Text, tags with attributes, and every table row as a list of cell texts."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.rows, self.words, self.open = [], [], [], []
        self.feed(self.source)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.words.append(data)
        if self.rows and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += data + " "


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(folder / "results.json", invented(LADDER))
    for arm in LADDER:
        lines = [{"step": s, "loss": 5 / s, "arm": arm, "stage": stage} for stage in ("1", "3") for s in range(1, 50)]
        text = "\n".join(map(json.dumps, lines)) + '\n{"step": 50, "lo'
        (folder / arm / "stage1").mkdir(parents=True)
        (folder / arm / "stage1" / "metrics.jsonl").write_text(text)
    xy = np.random.default_rng(0).normal(size=(24, 2)).tolist()
    label = [f"item {i % 12}" for i in range(24)]
    arms = {arm: {"xy": xy, "label": label, "silhouette": 0.25} for arm in ("baseline", "static")}
    write(folder / "tsne.json", {"H": 256, "W": W, "perplexity": 7, "arms": arms})
    assert write_report(folder) == folder / "report.html"
    return folder


@pytest.fixture(scope="module")
def page(run_dir):
    return Page(run_dir / "report.html")


def test_page_is_whole_and_self_contained(page):
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "base"}
    links = [
        value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href", "srcset", "data")
    ]
    assert len(links) == 4
    assert all(link.startswith("data:image/png;base64,") for link in links)
    without_pictures = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page.source)
    assert not re.search(r"https?:|//\w|url\(|@import", without_pictures)
    assert "prefers-color-scheme: dark" in page.source


def test_page_says_where_the_numbers_come_from(page):
    run = ("sidestream run lsar.table1 --scale cpu --seed 0", "feedbeef00112233", "sha256:abc123", "12 min 34 s")
    for fact in (*run, "one seed (0)", "Invented CPU", "2.99.0"):
        assert fact in page.text
    assert ["train.learning_rate", "0.000123"] in [[c.strip() for c in row] for row in page.rows]
    assert "Half a prompt <b>is</b> in view & counts." in page.text
    assert "<b>is</b>" not in page.source
    assert "not for quoting" not in page.text


def test_table_puts_each_value_under_its_distance(page):
    rows = [[" ".join(c.split()) for c in row] for row in page.rows]
    heads = rows[0]
    assert heads[1:] == ["H = 64 0.5 W", "H = 128 1 W", "H = 160 1.25 W", "H = 256 2 W", "H = 2048 16 W"]
    at = heads.index("H = 256 2 W")
    token = rows.index(["Passcode, by sub-word token n = 500 a cell", ""])
    ours = next(row for row in rows[token:] if row[0] == "LS-AR Static (ours)")
    assert ours[at] == "98.0 [96.4, 98.9] paper 84.4"
    assert ours[1] == "100.0 [99.2, 100.0]"
    baseline = next(row for row in rows if row[0] == "AR baseline")
    assert baseline[at] == "8.0 [5.9, 10.7]"
    edges = [i for i, (tag, attrs) in enumerate(t for t in page.tags if t[0] == "th") if attrs.get("class") == "edge"]
    assert edges == [heads.index("H = 160 1.25 W")]


def test_ladder_keeps_the_order_of_the_cells_and_says_the_change(page):
    rows = [[" ".join(c.split()) for c in row] for row in page.rows]
    start = rows.index(["", "Item, exact match", "change", "Passcode, whole code", "change"])
    ladder = rows[start + 1 : start + 5]
    assert [row[0] for row in ladder] == [
        "AR baseline",
        "LS-AR Static (faithful)",
        "text masked",
        "LS-AR Static (ours)",
    ]
    assert [row[4] for row in ladder] == ["", "+0.0", "+31.0", "+67.0"]
    assert "All arms at H = 256 (2 W)" in page.text


def has_color(image: np.ndarray, color: str) -> bool:
    return bool((np.abs(image[..., :3] - np.array(mcolors.to_rgb(color))).max(-1) < 0.01).sum() > 20)


def test_pictures_are_drawn_in_the_arms_colours(run_dir):
    assert {path.name for path in run_dir.glob("*.png")} == {"recall.png", "ablation.png", "tsne.png", "loss.png"}
    looks = load("lsar.table1").looks(LADDER)
    for name in ("recall", "ablation", "loss", "tsne"):
        image = imread(run_dir / f"{name}.png")[::2, ::2]
        assert 0.01 < (image[..., :3].min(-1) < 0.9).mean() < 0.7, f"{name} is blank or flooded"
        if name in ("recall", "ablation"):
            assert all(has_color(image, looks[arm].color) for arm in LADDER)
            assert not has_color(image, GREEN)


def test_colours_are_fixed_and_apart():
    for name in listed():
        table = load(name)
        looks = table.looks([*table.arms, "x"])
        assert list(looks) == [*table.arms, "x"]
        seen = [(look.color, look.dashed) for look in looks.values()]
        assert len(set(seen)) == len(seen), name
        assert len({look.name for look in table.arms.values()}) == len(table.arms)
    apart = load("other").looks([f"arm {i}" for i in range(len(SPARE))])
    assert len({look.color for look in apart.values()}) == len(SPARE)
    grey = load("lsar.table1").looks(["baseline"])["baseline"].color
    red, green, blue = mcolors.to_rgb(grey)
    assert grey == GREY and red == green == blue


def test_an_arm_is_named_by_its_table():
    assert load("lsar.table1").arm("static") == "LS-AR Static (ours)"
    assert load("lsar.table3").arm("static") == "LS-AR Static"
    assert load("lsar.table1").arm("text_masked") == "text masked" and load("other").arm("static") == "static"


def planning_cells(arms=("baseline", "dynamic"), extra=((0, 6), (0, 7))):
    """Table 3's cells: K = 0, 1, 2 at N = 5, and `extra`, at two windows."""
    places = [*((k, 5) for k in range(3)), *extra]
    return [
        cell(arm, "success", 0, 400 - 100 * k - 10 * n) | {"where": {"K": k, "N": n, "W": w}}
        for arm in arms
        for k, n in places
        for w in (0, 16)
    ]


def test_the_pivot_puts_more_blocks_beside_more_perturbations(tmp_path):
    results = invented() | {"table": "lsar.table3", "cells": planning_cells()}
    table = pivot(merge_seeds([results]), load("lsar.table3"))
    assert table.column == "K and N" and table.columns == ["K = 0", "K = 1", "K = 2", "N = 6", "N = 7"]
    assert [table.title(column) for column in table.columns[2:4]] == [("K = 2", "N = 5"), ("N = 6", "K = 0")]
    assert len(table.rows) == 4 and all(len(row) == 5 for row in table.rows.values())
    row = table.rows["success", "dynamic", "W = 16"]
    assert [row[column].where for column in ("K = 1", "N = 7")] == [
        {"K": 1, "N": 5, "W": 16},
        {"K": 0, "N": 7, "W": 16},
    ]
    lines = markdown_table([write(tmp_path / "cpu-seed0.json", results)]).splitlines()
    assert lines[0] == "| metric | arm | K = 0<br>(N = 5) | K = 1<br>(N = 5) | K = 2<br>(N = 5) | " + (
        "N = 6<br>(K = 0) | N = 7<br>(K = 0) |"
    )
    assert any(line.startswith("|  | LS-AR Dynamic, W = 16 | 70.0<br>") for line in lines)
    # N = 6 at two values of K has no single place beside them: N stays in the rows.
    crossed = pivot(merge_seeds([results | {"cells": planning_cells(extra=((0, 6), (1, 6)))}]), load("lsar.table3"))
    assert crossed.column == "K" and crossed.columns == [0, 1, 2] and len(crossed.rows) == 8


def test_report_counts_torn_log_lines(page, tmp_path):
    assert "Left out: 4 lines" in page.text
    write(tmp_path / "results.json", invented() | {"table": "other"})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN, "arm": "baseline", "stage": "1"}\n{"step": 2}\n')
    text = Page(write_report(tmp_path)).text
    assert "Left out" not in text and "Training loss" in text


def test_small_report_has_no_empty_sections_and_warns(tmp_path):
    results = invented() | {"dirty": True, "scale": "smoke", "machine": "one line"}
    del results["notes"]
    write(tmp_path / "results.json", results)
    text = Page(write_report(tmp_path)).text
    for absent in ("t-SNE", "What bought what", "Training loss", "Read with care"):
        assert absent not in text
    assert "not for quoting: the working tree had uncommitted changes; a smoke run shows" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"recall.png"}


def test_any_other_table_gets_a_pivot(tmp_path):
    results = invented() | {"table": "lsar.table3"}
    results["cells"] = [
        cell(arm, "success", 1, 400 - 100 * k, paper=0.71 if k == 1 else None) | {"where": {"K": k, "N": 5, "W": w}}
        for arm in ("baseline", "dynamic")
        for w in (0, 16)
        for k in (2, 0, 1)
    ]
    write(tmp_path / "results.json", results)
    rows = [[" ".join(c.split()) for c in row] for row in Page(write_report(tmp_path)).rows]
    assert rows[0] == ["", "K = 0", "K = 1", "K = 2"]
    seen, narrow = "everything in view", "W = 16"
    arms = [f"{arm} {window}" for arm in ("AR baseline", "LS-AR Dynamic") for window in (seen, narrow)]
    assert [row[0] for row in rows[2:6]] == arms
    assert rows[2][2] == "60.0 [55.6, 64.2] paper 71.0"


def test_bad_tsne_is_one_line(tmp_path):
    write(tmp_path / "results.json", invented())
    write(tmp_path / "tsne.json", {"arms": {"static": {"xy": [[0, 0]], "label": ["a", "b"]}}})
    with pytest.raises(ValueError, match=r"tsne.json: not a t-SNE file \(arm static needs one \[x, y\]"):
        write_report(tmp_path)


def damaged(path, value):
    """Invented results with one field changed; `path` leads to it, `...` as value removes it."""
    results = copy.deepcopy(invented())
    at = results
    for key in path[:-1]:
        at = at[key]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return results


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["commit"], ..., "commit is missing"),
        (["scale"], "tiny", "scale must be smoke, cpu or paper, got 'tiny'"),
        (["seed"], True, "seed must be a whole number"),
        (["dirty"], "no", "dirty must be true or false"),
        (["wall_s"], math.inf, "wall_s must be seconds"),
        (["versions"], [], "versions must be an object"),
        (["notes"], "one", "notes must be a list"),
        (["cells"], [], "cells must be a non-empty list"),
        (["cells", 3, "paper"], ..., r"cells\[3\].paper is missing"),
        (["cells", 3, "value"], math.nan, r"cells\[3\].value must be a finite number"),
        (["cells", 3, "n"], 0, r"cells\[3\].n must be"),
        (["cells", 3, "paper"], 84.4, r"cells\[3\].paper must be a fraction in 0..1, never percent, got 84.4"),
        (["cells", 3, "ci"], [0.2, 0.1], r"cells\[3\].ci must be null or \[low, high\] around"),
        (["cells", 3, "where"], {"H": None}, r"cells\[3\].where must be"),
        (["cells", 3], cell("baseline", "item_exact", 64, 9), r"cells\[3\] repeats .* cells\[0\]"),
    ],
)
def test_a_wrong_field_is_named_in_one_line(tmp_path, path, value, said):
    file = write(tmp_path / "cpu-seed0.json", damaged(path, value))
    with pytest.raises(ValueError, match=said) as caught:
        load_results(file)
    assert str(caught.value).startswith(str(file)) and "\n" not in str(caught.value)


def test_a_right_file_loads_and_a_missing_or_torn_one_is_named(tmp_path):
    file = write(tmp_path / "cpu-seed0.json", invented())
    assert load_results(file) == invented()
    file.write_text(file.read_text()[:-40])
    with pytest.raises(ValueError, match="cpu-seed0.json: not valid JSON"):
        load_results(file)
    with pytest.raises(ValueError, match="nowhere.json: no such results file"):
        load_results(tmp_path / "nowhere.json")


def test_seeds_give_mean_sem_and_the_pooled_interval():
    three = [invented(seed=seed, shift=10 * seed) for seed in range(3)]
    entry = next(e for e in merge_seeds(three) if (e.arm, e.metric, e.where["H"]) == ("static", "code_exact", 256))
    assert entry.value == pytest.approx(0.96) and entry.n == 1500
    assert entry.spread == pytest.approx(0.02 / math.sqrt(3))
    assert entry.ci == wilson(1440, 1500)
    alone = next(e for e in merge_seeds(three[:1]) if e.where["H"] == 256)
    assert alone.spread is None
    for result in three:
        for each in result["cells"]:
            each["value"] = min(each["value"], 499.5 / 500)  # half a token: no count of successes
    ours = next(e for e in merge_seeds(three) if (e.arm, e.where["H"]) == ("static", 64))
    assert ours.ci is None
    del three[1]["cells"][4]
    with pytest.raises(ValueError, match="seeds 0 and 1 hold different cells"):
        merge_seeds(three)


def test_past_window_is_the_place_nearest_two_windows_that_all_arms_share():
    entries = merge_seeds([invented()])
    assert past_window(entries) == (256, W)
    partly = [e for e in entries if (e.arm, e.where["H"]) != ("baseline", 256)]
    assert past_window(partly) == (160, W)
    assert past_window([e for e in entries if e.where["H"] <= W]) is None


def test_markdown_table_of_one_and_of_three_seeds(tmp_path):
    files = [write(tmp_path / f"cpu-seed{k}.json", invented(seed=k, shift=10 * k)) for k in range(3)]
    one = markdown_table(files[:1]).splitlines()
    assert one[0].count("|") == one[1].count("|") == one[2].count("|") == 8
    row = next(line for line in one if "Passcode, by sub-word" in line)
    ours = one[one.index(row) + 2]
    assert "| LS-AR Static (ours) |" in ours and "98.0<br>[96.4, 98.9]<br>paper 84.4" in ours
    assert "W = 128, n = 500 a cell, seed 0, commit `feedbeef00`" in one[-1] and "--seed 0`" in one[-1]
    three = markdown_table(files)
    assert "96.0 ± 1.2<br>[94.9, 96.9]<br>paper 84.4" in three
    assert "mean ± SEM over 3 seeds" in three and "n = 1500 a cell, seeds 0, 1, 2" in three
    assert three == markdown_table([str(file) for file in files])
    chosen = markdown_table(files, ["code_token"])
    assert row.split("|")[1] in chosen and set(chosen.splitlines()) < set(three.splitlines())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dirty": True}, "dirty working tree"),
        ({"scale": "smoke"}, "smoke run"),
        ({"seed": 0}, "one seed is given twice"),
        ({"table": "lsar.table2"}, "table differs"),
        ({"settings": {"train": {"learning_rate": 1.0, "seed": 1}, "haystack": None}}, "settings differs"),
    ],
)
def test_markdown_table_refuses(tmp_path, change, said):
    good = write(tmp_path / "cpu-seed0.json", invented())
    other = invented(seed=1)
    assert markdown_table([good, write(tmp_path / "cpu-seed1.json", other)])
    with pytest.raises(ValueError, match=said):
        markdown_table([good, write(tmp_path / "cpu-seed1.json", other | change)])


README = "# Title\n\nbefore\n<!-- results:lsar.table1:cpu -->\nstale\n<!-- /results -->\nafter\n"


def test_update_readme_rewrites_the_block_only_and_once(tmp_path):
    readme, root = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(README)
    file = write(root / "lsar.table1" / "cpu-seed0.json", invented())
    assert update_readme(readme, root)
    text = readme.read_text()
    assert text == README.replace("stale", markdown_table([file]))
    assert not update_readme(readme, root)
    assert readme.read_text() == text
    write(root / "lsar.table1" / "cpu-seed10.json", invented(seed=10))
    write(root / "lsar.table1" / "cpu-seed2.json", invented(seed=2))
    assert update_readme(readme, root)
    assert "seeds 0, 2, 10" in readme.read_text()
    assert readme.read_text().startswith("# Title\n\nbefore\n") and readme.read_text().endswith("-->\nafter\n")


def test_a_block_may_ask_for_metrics_and_arms(tmp_path):
    file = write(tmp_path / "cpu-seed0.json", invented())
    whole, arms = markdown_table([file]), {cell["arm"] for cell in invented()["cells"]}
    metrics = {cell["metric"] for cell in invented()["cells"]}
    assert len(arms) > 1 and len(metrics) > 1
    arm, metric = sorted(arms)[0], sorted(metrics)[0]

    def rows(text):
        return [line.split(" | ", 1)[1] for line in text.splitlines() if line.startswith("| ")][1:]

    of_arm, of_metric = rows(markdown_table([file], [arm])), rows(markdown_table([file], [metric]))
    both = rows(markdown_table([file], [metric, arm]))
    assert both and set(both) < set(of_arm) < set(rows(whole)) and set(both) < set(of_metric) < set(rows(whole))
    with pytest.raises(ValueError, match="has neither a metric nor an arm basline"):
        markdown_table([file], ["basline"])


@pytest.mark.parametrize(
    ("text", "results", "said"),
    [
        ("# Title\n", invented(), "no block"),
        (README.replace("<!-- /results -->", ""), invented(), "does not end"),
        (README, None, r"no cpu-seed\*.json; run `sidestream run lsar.table1 --scale cpu`"),
        (README, invented(seed=3), "misfiled"),
        (README, invented() | {"dirty": True}, "dirty"),
    ],
)
def test_update_readme_refuses_and_leaves_the_file(tmp_path, text, results, said):
    readme = tmp_path / "README.md"
    readme.write_text(text)
    if results:
        write(tmp_path / "results" / "lsar.table1" / "cpu-seed0.json", results)
    with pytest.raises(ValueError, match=said):
        update_readme(readme, tmp_path / "results")
    assert readme.read_text() == text


def test_an_unended_block_does_not_swallow_the_next(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results:lsar.table1:cpu -->\nprose to keep\n" + README)
    write(tmp_path / "lsar.table1" / "cpu-seed0.json", invented())
    with pytest.raises(ValueError, match="does not end"):
        update_readme(readme, tmp_path)
    assert "prose to keep" in readme.read_text()


def test_pivot_without_conditions_is_one_column():
    bare = invented()
    bare["cells"] = [cell("baseline", "item_exact", 64, 9) | {"where": {}}]
    table = pivot(merge_seeds([bare]), load("lsar.table1"))
    assert table.columns == [None] and len(table.rows) == 1


def test_reports_need_no_torch():
    code = "import sys, sidestream.experiments.report.page as page; "
    code += "print({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
