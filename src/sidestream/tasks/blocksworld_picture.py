"""One rollout in motion: a problem played by several players side by side, as SVG that moves by CSS alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from sidestream.tasks.blocksworld import HELD, Action, Fact, Problem, State, optimal_length, trace
from sidestream.tasks.blocksworld_data import action_text

FRAME, REST = 0.9, 3.6
"""Seconds an action takes, and the end is held."""
CELL, BLOCK, HEIGHT = 46, 38, 28
"""Width of a column, width and height of a block, in the picture's units."""
RAIL = 46
"""From the rail the hand hangs from down to the top of a block it holds up."""
PASTEL = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#ffe97f", "#f4a6b7", "#c9c9c9")
RED, GREEN, INK, SOFT = "#c1121f", "#1a7f37", "#1d2125", "#5c6670"

Path = list[tuple[float, float, float]]
"""(seconds, x, y), ascending: where something is; in between it moves in a straight line."""


class Look(Protocol):
    """How a player appears."""

    @property
    def name(self) -> str: ...
    @property
    def color(self) -> str: ...
    @property
    def dashed(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Show:
    """One arm's rollout, laid out in time: frame 0 the start, then one frame an action, then the verdict."""

    states: list[State]
    actions: list[Action]
    forced: list[int]
    success: bool
    reason: str
    left: list[int]
    """Actions of a shortest plan from each state to the goal."""

    @property
    def end(self) -> float:
        """Seconds until the verdict."""
        return FRAME * len(self.states)


def rollouts_record(
    problem: Problem, played: Mapping[str, Mapping[str, Any]], where: Mapping[str, int]
) -> dict[str, Any]:
    """The content of `rollouts.json` (`rollout_svg`): one problem, and what became of it in several hands.

    Args:
        played: arm -> actions, forced, success, failure and reason, and anything else, which is left out.
        where: K, N and W.
    """
    shown = ("actions", "forced", "success", "failure", "reason")
    return {
        **where,
        "names": problem.names,
        "init": problem.init,
        "goal": sorted([fact.predicate, fact.blocks] for fact in problem.goal),
        "arms": {arm: {name: rollout[name] for name in shown} for arm, rollout in played.items()},
    }


def read_show(rollouts: Mapping[str, Any], arm: str) -> Show:
    """One arm of `rollouts.json`. Raises ValueError for an illegal action, KeyError or TypeError for a wrong shape."""
    names, init, rollout = rollouts["names"], tuple(rollouts["init"]), rollouts["arms"][arm]
    actions = [Action(name, tuple(blocks)) for name, blocks in rollout["actions"]]
    states = trace(init, actions, names)
    goal = frozenset(_goal(rollouts))
    return Show(
        states=states,
        actions=actions,
        forced=list(rollout["forced"]),
        success=bool(rollout["success"]),
        reason=str(rollout["reason"] or rollout["failure"] or ""),
        left=[optimal_length(state, goal) for state in states],
    )


def rollout_svg(rollouts: Mapping[str, Any], looks: Mapping[str, Look]) -> str:
    """One problem played by several arms side by side, as SVG that moves by CSS alone and loops.

    Where nothing moves (print, a viewer without CSS, a reader who asked for less motion) the last frame stands. For a
    file of its own give it a namespace: `standalone`.

    `rollouts`: the content of `rollouts.json`:

        {"K": 1, "N": 5, "W": 16, "names": ["a", ...], "init": [what each block stands on, -1 the table],
         "goal": [["on", [0, 1]], ...],
         "arms": {arm: {"actions": [["pickup", [0]], ...], "forced": [steps], "success": bool,
                        "failure": kind or null, "reason": "in words"}}}

    Raises:
        ValueError: an illegal action; KeyError, TypeError, IndexError: a wrong shape.
    """
    names = list(map(str, rollouts["names"]))
    shows = {arm: read_show(rollouts, arm) for arm in rollouts["arms"]}
    cycle = max(show.end for show in shows.values()) + REST
    columns = len(names)
    wide, high = max(CELL * columns + 24, 296), RAIL + HEIGHT * columns + 6
    gap, top = 28, 40 + 20 * _tallest(_goal(rollouts)) + 26
    width = 20 + (wide + gap) * len(shows) - gap + 20
    total = top + high + 98
    rules, body = [_RULES.format(cycle=cycle)], [_goal_picture(_goal(rollouts), names, width / 2)]
    for number, (arm, show) in enumerate(shows.items()):
        panel = _Panel(number, show, names, wide, high, cycle)
        body.append(f'<g transform="translate({20 + number * (wide + gap)} {top})">{panel.draw(looks[arm])}</g>')
        rules += panel.rules
    words = "; ".join(f"{looks[arm].name}: {_verdict(show)[0]}" for arm, show in shows.items())
    label = f"Animation of one Blocksworld problem. {words}"
    return (
        f'<svg class="bw" viewBox="0 0 {width} {total}" width="{width}" height="{total}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="13">'
        f'<style>{"".join(rules)}</style><rect width="{width}" height="{total}" fill="#fff"/>{"".join(body)}</svg>'
    )


def standalone(svg: str) -> str:
    """The same picture as a file of its own."""
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def plan_lines(rollouts: Mapping[str, Any], looks: Mapping[str, Look]) -> dict[str, list[tuple[str, bool]]]:
    """The rollouts in words: an arm's name -> each action with whether it was forced, the verdict last."""
    lines = {}
    for arm in rollouts["arms"]:
        show = read_show(rollouts, arm)
        said = [(action_text(a, rollouts["names"]), step in show.forced) for step, a in enumerate(show.actions)]
        lines[looks[arm].name] = [*said, (". ".join(filter(None, _verdict(show))), False)]
    return lines


_RULES = """
.bw * {{ animation-duration: {cycle:g}s; animation-iteration-count: infinite; animation-timing-function: linear; }}
.bw .flash {{ animation-timing-function: step-end; }}
@media print {{ .bw * {{ animation: none !important; }} }}
@media (prefers-reduced-motion: reduce) {{ .bw * {{ animation: none !important; }} }}
"""


def _goal(rollouts: Mapping[str, Any]) -> list[Fact]:
    return [Fact(predicate, tuple(blocks)) for predicate, blocks in rollouts["goal"]]


def _verdict(show: Show) -> tuple[str, str]:
    """What became of it, and why."""
    steps = len(show.actions)
    if show.success:
        return f"goal reached after {steps} actions", ""
    return f"failed at step {steps + 1}", show.reason


class _Panel:
    """One arm's world: towers on fixed columns (a tower stands in the column of its lowest block), a hand, its words.

    `rules` collects the keyframes of whatever `draw` makes move.
    """

    def __init__(self, number: int, show: Show, names: Sequence[str], wide: float, high: float, cycle: float) -> None:
        self.number, self.show, self.names, self.cycle = number, show, names, cycle
        self.wide, self.high = wide, high
        self.rules: list[str] = []
        self.margin = (wide - CELL * len(names)) / 2

    def draw(self, look: Look) -> str:
        """The panel's elements, its left top corner at the origin."""
        ground = self.high
        hand, blocks = self._paths()
        flash = self._flash([(FRAME * (step + 1), FRAME * (step + 2)) for step in self.show.forced])
        grip = _hand(SOFT) + f"<g {flash}>{_hand(RED)}</g>"
        size = f'width="{self.wide - 1}" height="{ground + 9}" rx="6"'
        parts = [
            f'<text x="0" y="-10" font-weight="600" font-size="14">{_title(look)}</text>',
            f'<g fill="none" transform="translate(0.5 0.5)"><rect {size} fill="#fafafa" stroke="#d9dcdf"/>'
            f'<rect {flash} {size} stroke="{RED}" stroke-width="2.5"/></g>',
            f'<path d="M10 12H{self.wide - 10}" stroke="#9aa4ae" stroke-width="3" stroke-linecap="round"/>',
            f'<path d="M10 {ground + 1.5}H{self.wide - 10}" stroke="{INK}" stroke-width="3" stroke-linecap="round"/>',
            # A nested picture cuts the hand's cord off at the rail.
            f'<svg x="0" y="12" width="{self.wide}" height="{ground - 12}" overflow="hidden">'
            f'<g transform="translate(0 -12)">{self._moving(hand, "h", grip)}',
            *(self._moving(path, f"b{x}", _block(self.names[x], x, BLOCK, HEIGHT)) for x, path in enumerate(blocks)),
            "</g></svg>",
            self._words(ground + 34),
        ]
        return "".join(parts)

    def _paths(self) -> tuple[Path, list[Path]]:
        """Where the hand (the point it grips at) and each block (its top middle) are over time."""
        show, up = self.show, RAIL
        spots = self._spots()
        hand: Path = [(0.0, self._x(0), up)]
        blocks: list[Path] = [[(0.0, *spot)] for spot in spots[0]]
        for step, action in enumerate(show.actions):
            at, block = FRAME * (step + 1), action.blocks[0]
            (x0, y0), (x1, y1) = spots[step][block], spots[step + 1][block]
            if show.states[step + 1][block] == HELD:
                grip = [(at, *hand[-1][1:]), (at + 0.2, x0, up), (at + 0.4, x0, y0), (at + 0.7, x0, up)]
                blocks[block] += [(at + 0.4, x0, y0), (at + 0.7, x1, y1)]
            else:
                grip = [(at, x0, up), (at + 0.25, x1, up), (at + 0.5, x1, y1), (at + 0.7, x1, up)]
                blocks[block] += [(at, x0, y0), (at + 0.25, x1, up), (at + 0.5, x1, y1)]
            hand += grip
        return hand, blocks

    def _x(self, column: int) -> float:
        return self.margin + CELL * (column + 0.5)

    def _spots(self) -> list[list[tuple[float, float]]]:
        """Top middle of each block in each state; a held one hangs over the column it was taken from."""
        spots: list[list[tuple[float, float]]] = []
        for state in self.show.states:
            here = []
            for x, on in enumerate(state):
                if on == HELD:
                    here.append((spots[-1][x][0] if spots else self._x(x), RAIL))
                    continue
                base, level = x, 0
                while state[base] >= 0:
                    base, level = state[base], level + 1
                here.append((self._x(base), self.high - HEIGHT * (level + 1)))
            spots.append(here)
        return spots

    def _words(self, y: float) -> str:
        """The action and how far the goal is, then the verdict; below a dot an action."""
        show, out = self.show, []

        def line(text: str, color: str, weight: int, left: str, seen: str) -> str:
            main = f'<text x="2" y="{y}" font-size="15" font-weight="{weight}" fill="{color}">{escape(text)}</text>'
            side = f'<text x="{self.wide - 2}" y="{y}" text-anchor="end" fill="{SOFT}">{left}</text>'
            return f"<g {seen}>{main}{side}</g>"

        for frame, left in enumerate(show.left):
            forced = frame - 1 in show.forced
            text = "start" if frame == 0 else f"{frame}. {action_text(show.actions[frame - 1], self.names)}"
            look = (f"{text} (forced)", RED, 700) if forced else (text, INK, 400)
            out.append(line(*look, f"{left} to the goal", self._flash([(FRAME * frame, FRAME * (frame + 1))])))
        head, why = _verdict(show)
        color, mark = (GREEN, "✓") if show.success else (RED, "✗")
        last = self._flash([(show.end, self.cycle)], still=True)
        out.append(line(f"{mark} {head}", color, 700, "" if show.success else f"{show.left[-1]} to the goal", last))
        out.append(f'<g {last}><text x="2" y="{y + 46}" fill="{SOFT}">{escape(_short(why))}</text></g>')
        pitch = min(16.0, (self.wide - 24) / (len(show.states) + 1))
        for frame in range(len(show.states)):
            fill = RED if frame - 1 in show.forced else "#9aa4ae" if frame else "none"
            out.append(f'<circle cx="{8 + pitch * frame:.1f}" cy="{y + 20}" r="4" fill="{fill}"/>')
        stop = 8 + pitch * len(show.states)
        end = f'x="{stop:.1f}" y="{y + 25}" text-anchor="middle" font-weight="700" fill="{color}"'
        out.append(f"<text {end}>{mark}</text>")
        cursor: Path = []
        for frame in range(len(show.states) + 1):
            place = 8 + pitch * frame
            cursor += [(FRAME * frame, place, y + 20), (FRAME * (frame + 1) - 0.01, place, y + 20)]
        ring = f'<circle r="6.5" fill="none" stroke="{INK}" stroke-width="1.6"/>'
        return "".join(out) + self._moving(cursor, "c", ring)

    def _moving(self, path: Path, what: str, inner: str) -> str:
        """A group that follows the path; without animation it stands at the path's end."""
        _, x, y = path[-1]
        name = f"bw{self.number}{what}"
        steps = [(at, f"transform:translate({px:g}px,{py:g}px)") for at, px, py in path]
        self._keyframes(name, [*steps, (self.cycle, steps[-1][1])])
        return f'<g transform="translate({x:g} {y:g})" style="animation-name:{name}">{inner}</g>'

    def _flash(self, spans: Iterable[tuple[float, float]], *, still: bool = False) -> str:
        """Attributes of an element seen in these spans only; without animation seen where `still`."""
        spans = list(spans)
        name = f"bw{self.number}f{len(self.rules)}"
        steps: dict[float, str] = {0.0: "opacity:0"}
        for start, end in spans:
            # Where one span ends the next may begin.
            steps[end] = "opacity:0"
            steps[start] = "opacity:1"
        self._keyframes(name, sorted(steps.items()))
        return f'class="flash" opacity="{int(still)}" style="animation-name:{name}"'

    def _keyframes(self, name: str, steps: Iterable[tuple[float, str]]) -> None:
        rules = "".join(f"{100 * at / self.cycle:.2f}%{{{rule}}}" for at, rule in steps)
        self.rules.append(f"@keyframes {name}{{{rules}}}")


def _tallest(goal: Sequence[Fact]) -> int:
    """Blocks in the tallest tower of a goal."""
    return max((len(tower) for tower in _towers(goal)), default=0)


def _towers(goal: Sequence[Fact]) -> list[list[int]]:
    """The goal's towers, each from its lowest block up; blocks it says nothing about are left out."""
    below = {fact.blocks[0]: fact.blocks[1] for fact in goal if fact.predicate == "on"}
    above = {y: x for x, y in below.items()}
    named = sorted({x for fact in goal for x in fact.blocks})
    towers = []
    for x in (x for x in named if x not in below):
        tower = [x]
        while tower[-1] in above:
            tower.append(above[tower[-1]])
        towers.append(tower)
    return towers


def _goal_picture(goal: Sequence[Fact], names: Sequence[str], middle: float) -> str:
    """The goal's towers, small; the ground is dashed under one whose place the goal leaves open."""
    towers, placed = _towers(goal), {fact.blocks[0] for fact in goal if fact.predicate == "ontable"}
    ground, left = 34 + 20 * _tallest(goal), middle - 17 * len(towers)
    parts = [f'<text x="{middle}" y="20" text-anchor="middle" font-weight="600" font-size="14">goal</text>']
    for place, tower in enumerate(towers):
        x = left + 34 * place + 17
        for level, block in enumerate(tower):
            inner = _block(names[block], block, 27, 20)
            parts.append(f'<g transform="translate({x:g} {ground - 20 * (level + 1)})">{inner}</g>')
        dash = "" if tower[0] in placed else ' stroke-dasharray="3 3"'
        parts.append(f'<path d="M{x - 17:g} {ground + 1}h34" stroke="{INK}" stroke-width="2"{dash}/>')
    return "".join(parts)


def _block(name: str, index: int, width: float, height: float) -> str:
    """A block hung from its top middle."""
    size = 14 if height > 24 else 11
    return (
        f'<rect x="{-width / 2:g}" y="1" width="{width:g}" height="{height - 1:g}" rx="3" '
        f'fill="{PASTEL[index % len(PASTEL)]}" stroke="#444" stroke-width="1"/><text y="{height / 2 + size * 0.36:g}" '
        f'text-anchor="middle" font-size="{size}" fill="{INK}">{escape(name)}</text>'
    )


def _hand(color: str) -> str:
    """A gripper around the top middle of a block, on a cord longer than any picture is high."""
    return (
        f'<path d="M0 -600V-12M-16 8V-6Q-16 -12 -10 -12H10Q16 -12 16 -6V8" fill="none" stroke="{color}" '
        'stroke-width="3" stroke-linecap="round"/>'
    )


def _title(look: Look) -> str:
    """An arm's mark and name, without what follows a colon: panels are narrow."""
    return f'<tspan fill="{look.color}">{"○" if look.dashed else "●"}</tspan> {escape(look.name.split(":")[0])}'


def _short(text: str, most: int = 48) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
