"""README's Python runs as written, and its tables say what the committed results files say."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


PAGES = [page for page in sorted(ROOT.glob("docs/**/*.md")) if "<!-- results:" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_come_from_results(page: Path, tmp_path: Path) -> None:
    """Rewriting the tables from `results/` changes nothing; a changed number would be put right."""
    from sidestream.experiments.report.tables import update_readme

    copy, text = tmp_path / "page.md", page.read_text(encoding="utf-8")
    shutil.copy(page, copy)
    assert not update_readme(copy, ROOT / "results"), "run `make readme` and commit"
    place = text.index("\n|", text.index("|---", text.index("<!-- results:")))
    number = re.search(r"\d+\.\d+", text[place:])
    assert number, "the table has no numbers"
    at = place + number.start()
    copy.write_text(text[:at] + "7777.7" + text[at + len(number.group()) :], encoding="utf-8")
    assert update_readme(copy, ROOT / "results")
    assert copy.read_text(encoding="utf-8") == text


def test_every_results_file_has_a_page() -> None:
    """And is filled in there, or linked to."""
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/**/*.md"))
    for folder in sorted({path.parent.name for path in (ROOT / "results").glob("*/*.json")}):
        assert f"results:{folder}:" in pages or f"results/{folder}" in pages, folder


def test_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for name in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / name).exists(), f"{page.name}: {name}"
