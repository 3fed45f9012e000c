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


@pytest.mark.parametrize("page", ["README.md", "docs/measurements.md"])
def test_tables_come_from_results(page: str, tmp_path: Path) -> None:
    """Rewriting the tables from `results/` changes nothing; a changed number would be put right."""
    from sidestream.experiments.report.tables import update_readme

    copy, text = tmp_path / "page.md", (ROOT / page).read_text(encoding="utf-8")
    shutil.copy(ROOT / page, copy)
    assert not update_readme(copy, ROOT / "results"), "run `make readme` and commit"
    place = text.index("<!-- results:")
    assert "100.0" in text[place:], "the tables have no numbers"
    copy.write_text(text[:place] + text[place:].replace("100.0", "99.9", 1), encoding="utf-8")
    assert update_readme(copy, ROOT / "results")
    assert copy.read_text(encoding="utf-8") == text


def test_files_named_in_readme_exist() -> None:
    for name in re.findall(r"\]\(([\w./]+\.(?:py|md|png))\)", README):
        assert (ROOT / name).exists(), name
