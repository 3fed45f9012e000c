"""Text on the command line is text, whatever it looks like to a reader of YAML or of options."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidestream import cli
from sidestream.commands import compile_goal, evaluate, generate, train
from sidestream.commands import solve as solving
from sidestream.commands.options import command_parser, parsed
from sidestream.tasks.base import read_text

OPTIONS = {"goal": (str | None, None, ""), "prompt": (str, "x", ""), "window": (int | None, None, "")}
LOOKS_LIKE = (
    *("null", "~", "123", "1e3", "true", "{a:b}", "[1]", "@nobody", "!!str", "#", '"q"', "'q'", "%x", "&", "*", "$(x)"),
    *(
        "--help",
        "-h",
        "--goal",
        "-x",
        "--",
        "---",
        "-1",
        "--window=8",
        "--no such option",
        "-x=1",
        "--window 8",
        "=",
        "--a=--",
    ),
    *("- x", "a: b\nc: d", "# said", "@nobody says hi", "{a: b}"),
)


PARSER = command_parser(cli._Parser, "sidestream x", "about", OPTIONS)


def read(*words):
    return parsed(PARSER, list(words))


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), st.sampled_from(LOOKS_LIKE)),
    st.booleans(),
)
@example("--help", False)
def test_any_text_is_text(text, apart):
    options = {"-h", "--help", "--goal", "--prompt", "--window"}
    for name in ("goal", "prompt"):
        words = [f"--{name}", text] if apart else [f"--{name}={text}"]
        if apart and text.partition("=")[0] in options:
            with pytest.raises(ValueError, match=f"--{name} has no text: .* write --{name}="):
                read(*words, "--window", "8")
            continue
        given = read(*words, "--window", "8")
        assert given[name] == text and given.window == 8
    # What is no text is read as before.
    assert read("--window", "null").window is None and read().goal is None


@pytest.mark.parametrize("text", LOOKS_LIKE)
def test_what_looks_like_something_else(text):
    assert read(f"--goal={text}").goal == text
    with pytest.raises(ValueError, match="--window must be a whole number or null"):
        read("--window", "x", f"--prompt={text}")


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_an_empty_text_is_none(text):
    for name in ("goal", "prompt"):
        with pytest.raises(ValueError, match=f"--{name} is empty; leave it out"):
            read(f"--{name}", text)


def test_every_commands_text_is_text(monkeypatch):
    """The tables of options that the commands really have."""
    seen = {}

    def stop(parser, words, *needed):
        seen[parser.prog] = parser
        raise ValueError("seen")

    for module in (compile_goal, evaluate, generate, train, solving):
        monkeypatch.setattr(module, "parsed", stop)
    for name in ("train", "eval", "generate", "compile-goal", "solve"):
        assert cli.main([name]) == 2
    assert len(seen) == 5
    for prog, parser in seen.items():
        texts = [name for name, kind in parser.types.items() if kind is str]
        assert not [name for name, kind in parser.types.items() if kind == (str | None)], prog
        file = ["p.pddl"] if prog.endswith("solve") else []
        given = parsed(parser, [word for name in texts for word in (f"--{name}", "null")] + file)
        assert {given[name] for name in texts} == {"null"}, prog


def test_a_prompt_is_text_or_a_file(tmp_path: Path, capsys, monkeypatch):
    told = {}

    def stop(model, base, pinned):
        raise ValueError("the model is asked for")

    monkeypatch.setattr(generate, "load_run", stop)
    monkeypatch.setattr(generate, "read_text", lambda path: told.setdefault("read", str(path)) and read_text(path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("hello")
    for text, note in (("@nobody says hi", False), ("@p.txt", True), ("@", False), ("@" + "n" * 5000, False)):
        assert cli.main(["generate", "--model", "m", "--prompt", text]) == 2
        said = capsys.readouterr().err
        assert ("note: --prompt is taken as text; --prompt_file p.txt reads that file" in said) == note
        assert "the model is asked for" in said and not told
    assert cli.main(["generate", "--model", "m", "--prompt_file", "p.txt"]) == 2
    assert told == {"read": "p.txt"} and "note" not in capsys.readouterr().err
