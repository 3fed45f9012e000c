"""Needle: facts given once as a goal, then pages of other text, then one question about one of the facts.

A record of this task is a line of the JSONL that `sidestream train --data` reads. The goal is not part of the
trajectory: by the time of the question it has left any window, and only a channel can know the answer.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sidestream.tasks.base import Split, read_text, shuffled

VALUES = {
    "name": "Alice Bruno Carla David Elena Frank Grace Henry Irene James Karen Louis Maria Nadia Oscar Paula Ralph "
    "Sarah Tomas Viola Walter Yusuf Anna Boris Clara Diego Emma Felix Greta Hugo",
    "city": "Oslo Lima Cairo Paris Tokyo Delhi Rome Berlin Madrid Dublin Vienna Prague Athens Lisbon Warsaw Moscow "
    "Boston Denver Dallas Miami Seattle Chicago Houston Toronto Sydney Mumbai Seoul Bangkok Havana Geneva",
    "colour": "red blue green yellow white black orange purple pink brown gray silver gold",
    "word": "apple river garden window winter summer bridge castle candle engine forest island jacket kitchen ladder "
    "mirror needle ocean pencil rabbit school ticket valley village whisper anchor basket button carpet desert dragon "
    "feather hammer lemon marble monkey pepper pocket saddle",
}
"""Fact -> the words that it may have as its value."""
FACTS = {
    "name": ("The customer is called {}.", "What is the customer called?", "The customer is called"),
    "city": ("The trip goes to {}.", "Where does the trip go?", "The trip goes to"),
    "colour": ("The suitcase is {}.", "What colour is the suitcase?", "The suitcase is"),
    "word": ("The code word is {}.", "What is the code word?", "The code word is"),
}
"""Fact -> how a goal states it, how it is asked for, how the answer begins."""

FILLER = """The morning train was late again, and nobody on the platform seemed to mind. A man in a long coat read the
same page of his newspaper three times. Two children counted the pigeons under the roof and disagreed about the number.
Somewhere behind the station a dog barked at a van that did not move. The clock over the door had stopped in spring and
was right twice a day. When the rain began, people stepped back from the edge and talked about the harvest. An old
woman shared her bread with a stranger and told him about the flood. The market opened late because the road from the
hills was under water. By noon the sun was out and the stones in front of the town hall were dry. The baker sold his
last loaf to a girl who paid in small coins. In the library someone had left a map open on the table, with a route drawn
in pencil. The librarian folded it and put it back where it belonged. Towards evening the wind turned and brought the
smell of the sea. Fishermen mended their nets and spoke little. The lamps along the harbour came on one by one. A ferry
crossed the bay with its windows lit, and music came over the water. Later it was quiet enough to hear the rigging. The
night watchman walked his round and wrote the time in a book. He had done so for thirty years and had never found
anything to report. Then the church bell rang, and the first carts came down from the farms."""


@dataclass(frozen=True, slots=True)
class Needle:
    """One record, as text."""

    goal: str
    """The facts."""
    trajectory: str
    """Other text, the question, the answer."""
    answer: str
    """The value asked for, the trajectory's end."""
    fact: str
    """Which fact is asked for: a key of `FACTS`."""

    def row(self) -> dict[str, object]:
        """One line of JSONL."""
        return {"goal": self.goal, "trajectory": self.trajectory, "answer": self.answer, "fact": self.fact}


def needles(
    split: Split,
    count: int,
    *,
    seed: int = 0,
    words: Sequence[int] = (20, 60),
    facts: Iterable[str] = tuple(FACTS),
    filler: str | Path | None = None,
) -> list[Needle]:
    """Records whose combinations of values occur in one split only; each single value occurs in all of them.

    Args:
        split: `train`, `valid` or `test`.
        words: fewest and most words of other text before the question.
        facts: which of `FACTS` a goal states; the question asks for one of them.
        filler: a text file to take the other text from, its last tenth for the test only; None for the built-in page.

    Raises:
        ValueError: an unknown fact, a range of words that is none, or a filler that cannot be read or is shorter.
    """
    facts = list(facts)
    unknown = [fact for fact in facts if fact not in FACTS]
    if unknown or not facts:
        raise ValueError(f"facts are {facts}; choose among {', '.join(FACTS)}")
    fewest, most = min(words), max(words)
    page = re.split(r"\s+", (FILLER if filler is None else read_text(filler)).strip())
    if fewest < 1 or count < 1:
        raise ValueError(f"count is {count} and words are {list(words)}; both begin at 1")
    if filler is None and most > len(page):
        page = page * (most // len(page) + 1)
    elif filler is not None:
        tail = len(page) * 9 // 10
        page = page[tail:] if split == "test" else page[:tail]
    if most > len(page):
        raise ValueError(f"{filler} has {len(page)} words for {split}, and {most} are asked for; give a longer text")
    rng = random.Random(f"needle {split} {seed}")
    made = []
    while len(made) < count:
        values = {fact: _one_of(VALUES[fact].split(), rng) for fact in facts}
        if _split_of(values) != split:
            continue
        goal = " ".join(FACTS[fact][0].format(values[fact]) for fact in shuffled(facts, rng))
        asked = _one_of(facts, rng)
        _, question, begin = FACTS[asked]
        length = fewest + int(rng.random() * (most - fewest + 1))
        start = int(rng.random() * (len(page) - length + 1))
        other = " ".join(page[start : start + length])
        text = f"{other}\nQuestion: {question}\nAnswer: {begin} {values[asked]}"
        made.append(Needle(goal=goal, trajectory=text, answer=values[asked], fact=asked))
    return made


def _one_of(values: Sequence[str], rng: random.Random) -> str:
    return values[int(rng.random() * len(values))]


def _split_of(values: dict[str, str]) -> Split:
    # Drawn from the values' names, not from a counter: any number of records from any seed stays in its split.
    place = random.Random("needle split " + " ".join(f"{fact}={values[fact]}" for fact in sorted(values))).random()
    return "test" if place < 0.1 else "valid" if place < 0.2 else "train"
