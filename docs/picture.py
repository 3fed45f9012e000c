"""Draw README's picture from a run of examples/pinned.py: docs/pinned-light.svg and docs/pinned-dark.svg.

python docs/picture.py
"""

import io
import runpy
import textwrap
from contextlib import redirect_stdout
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "gone": "#8c959f", "edge": "#d1d9e0"}
LIGHT |= {"view": "#0969da", "view_fill": "#eef6ff", "held": "#8250df", "held_fill": "#f6f0ff"}
LIGHT |= {"good": "#1a7f37", "bad": "#cf222e"}
DARK = {"paper": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "gone": "#767e88", "edge": "#3d444d"}
DARK |= {"view": "#4493f8", "view_fill": "#121d2f", "held": "#ab7df8", "held_fill": "#1e1633"}
DARK |= {"good": "#3fb950", "bad": "#f85149"}


def words(x: float, y: float, text: str, color: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{color}" {more}>{escape(text)}</text>'


def box(x: float, y: float, wide: float, high: float, edge: str, fill: str, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="8" fill="{fill}" stroke="{edge}" {more}/>'


def picture(gone: str, count: int, seen: str, answers: list[tuple[str, str]], c: dict[str, str]) -> str:
    """The text that has left the window, the last 64 tokens, and what the model says with nothing, the goal and another
    goal held beside them."""
    said = f"The goal was said first. {count} tokens later the model sees the last 64."
    told = "; ".join(f"held {held if held != 'None' else 'nothing'}: answers {answer}" for held, answer in answers)
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 400" font-family="system-ui, sans-serif"'
        f' font-size="14" role="img" aria-label="{escape(said + " With " + told)}">',
        f'<rect width="860" height="400" fill="{c["paper"]}"/>',
        words(20, 30, said, c["ink"], 'font-weight="600" font-size="16"'),
        box(20, 48, 400, 150, c["edge"], c["paper"], 'stroke-dasharray="5 4"'),
        words(34, 70, f"out of the window: {count} tokens", c["soft"], 'font-size="12"'),
        box(440, 48, 400, 150, c["view"], c["view_fill"]),
        words(454, 70, "in the window: the last 64 tokens", c["view"], 'font-size="12"'),
    ]
    goal, story = gone.split("\n\n", 1)
    out.append(words(34, 92, goal, c["gone"], 'text-decoration="line-through"'))
    lines = textwrap.wrap(" ".join(story.split()), 62)
    for row, line in enumerate([*lines[:3], "...", lines[-1]]):
        out.append(words(34, 111 + 19 * row, line, c["gone"], 'font-size="12.5"'))
    lines = [line for part in seen.split("\n") for line in textwrap.wrap(part, 60)]
    for row, line in enumerate(lines[-6:] if len(lines) <= 6 else ["... " + lines[-5], *lines[-4:]]):
        out.append(words(454, 92 + 20 * row, line, c["ink"], 'font-size="13"'))
    titles = ("window only", "the same model, goal pinned", "another goal pinned")
    for row, ((held, answer), title) in enumerate(zip(answers, titles, strict=True)):
        y = 236 + 54 * row
        out.append(words(20, y, title, c["ink"], 'font-weight="600"'))
        if held == "None":
            out += [box(222, y - 25, 288, 38, c["edge"], c["paper"], 'stroke-dasharray="5 4"')]
            out += [words(236, y, "nothing held", c["soft"])]
        else:
            out += [box(222, y - 25, 288, 38, c["held"], c["held_fill"]), words(236, y, held, c["held"])]
        out.append(words(528, y, "says", c["soft"]))
        right = held != "None" and answer.rstrip(".") in held
        out.append(words(572, y, answer, c["good"] if right else c["bad"], 'font-weight="600" font-size="16"'))
    out.append(
        words(20, 388, "SmolLM2-135M-Instruct, frozen, untrained; examples/pinned.py", c["soft"], 'font-size="12"')
    )
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    heard = io.StringIO()
    with redirect_stdout(heard):
        run = runpy.run_path(str(HERE.parent / "examples" / "pinned.py"))
    answers = [(line.split(" -> ")[0], line.split(" -> ")[1]) for line in heard.getvalue().splitlines()]
    ids, decode = run["prompt"].input_ids[0], run["tokenizer"].decode
    gone, seen = decode(ids[:-64]), decode(ids[-64:])
    for name, colors in (("light", LIGHT), ("dark", DARK)):
        drawn = picture(gone, len(ids) - 64, seen, answers, colors)
        (HERE / f"pinned-{name}.svg").write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
