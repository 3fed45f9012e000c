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


def test_tables_come_from_results(tmp_path: Path) -> None:
    """Rewriting the tables from `results/` changes nothing; a changed number would be put right."""
    from sidestream.papers.results import update_readme

    copy = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", copy)
    assert not update_readme(copy, ROOT / "results"), "run `make readme` and commit"
    assert re.search(r"\b100\.0\b", README), "the table has no numbers"
    copy.write_text(README.replace("100.0", "99.9", 1), encoding="utf-8")
    assert update_readme(copy, ROOT / "results")
    assert copy.read_text(encoding="utf-8") == README


def test_files_named_in_readme_exist() -> None:
    for name in re.findall(r"\]\(([\w./]+\.(?:py|md|png))\)", README):
        assert (ROOT / name).exists(), name
