"""Write goals to train on and goals to test with, as JSONL for `sidestream train --data` and `sidestream eval --data`.

A goal states four facts. Its trajectory is other text and one question about one of them. Test trajectories are longer
than any window they are meant for: what they ask can be known from the channel only.

    python examples/needles.py --out needles        # needles/train.jsonl, needles/test.jsonl
"""

import argparse
from pathlib import Path

from sidestream.tasks.base import Split, write_jsonl
from sidestream.tasks.needle import FACTS, needles


def main(out, count, test, words, test_words, facts, filler, seed):
    out.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[Split, int, list[int]]] = [("train", count, words), ("test", test, test_words)]
    for split, number, lengths in jobs:
        path = out / f"{split}.jsonl"
        write_jsonl(needles(split, number, seed=seed, words=lengths, facts=facts, filler=filler), path)
        print(f"{path}: {number} records, {lengths[0]} to {lengths[1]} words before the question")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("needles"))
    parser.add_argument("--count", type=int, default=2000, help="goals to train on (default: %(default)s)")
    parser.add_argument("--test", type=int, default=200, help="goals to test with (default: %(default)s)")
    parser.add_argument("--words", type=int, nargs=2, default=[4, 12], help="words before the question, in training")
    parser.add_argument("--test-words", type=int, nargs=2, default=[200, 220], help="the same, in the test")
    parser.add_argument("--facts", nargs="+", default=list(FACTS), help="which facts a goal states")
    parser.add_argument("--filler", type=Path, default=None, help="text file to take the other text from")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.out, given.count, given.test, given.words, given.test_words, given.facts, given.filler, given.seed)
