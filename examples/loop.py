"""Attach a goal channel, train it, generate past the window: one flat script with a hand-written loop, offline.

The prompt names an item and a passcode, then come distractors until the prompt has left the window, then the question.
The text in view does not hold the answer. The channel does.

    python examples/loop.py            # under a minute on one core
"""

import argparse
import copy
import random
import tempfile
import time

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import sidestream
from sidestream.channels import mean_pool
from sidestream.lm.texts.text import Vocabulary
from sidestream.tasks import treasure

WINDOW = 24  # W: what the text channel sees
HORIZON = 96  # H: distractor tokens between prompt and question at test time, 4 W
BATCH = 32


def left_padded(rows, pad):
    """(B, T) ids and mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def recall(model, problems, vocabulary, **goal):
    """How many items are named right after H distractors."""
    text, mask = left_padded([problem.forced_ids for problem in problems], vocabulary.pad_id)
    sampling = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": vocabulary.pad_id}
    out = model.generate(text, attention_mask=mask, window=WINDOW, **sampling, **goal)
    answers = out[:, text.shape[1] :].tolist()
    scores = [treasure.score(p, ids, vocabulary.decode).values for p, ids in zip(problems, answers, strict=True)]
    return sum(int(score["item_exact"]) for score in scores)


def main(steps, test_problems):
    start = time.monotonic()
    torch.manual_seed(0)
    rng = random.Random(0)
    vocabulary = Vocabulary.subset(treasure.vocabulary_texts())
    train = treasure.problems("train", 5000, range(WINDOW, 2 * WINDOW), 0, vocabulary.encode)
    test = treasure.problems("test", test_problems, [HORIZON], 0, vocabulary.encode)
    texts = [problem.forced_ids + problem.answer_ids for problem in train]

    config = GPT2Config(
        vocab_size=vocabulary.size,
        n_positions=WINDOW,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=vocabulary.pad_id,
    )
    lm = GPT2LMHeadModel(config)

    # A language model first: next-token prediction on windows from anywhere in the text.
    optimiser = torch.optim.AdamW(lm.parameters(), lr=2e-3)
    for _ in range(steps // 2):
        rows = []
        for text in rng.choices(texts, k=BATCH):
            first = rng.randrange(len(text) - WINDOW)
            rows.append(text[first : first + WINDOW])
        rows = torch.tensor(rows)
        logits = lm(input_ids=rows).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()

    # A frozen copy of it reads the goals: each one once, as neither ever changes.
    encoder = copy.deepcopy(lm)
    model = sidestream.attach(lm, goal=sidestream.GoalConfig(width=64, pool_layer=1), encoder=encoder)
    ids, mask = left_padded([problem.goal_ids for problem in train], vocabulary.pad_id)
    pooled = mean_pool(model.goal_hidden(ids, mask), mask.bool())
    model.channel.encoder.calibrate(pooled)

    # The channel and the model: a token of the answer, from a window that no longer holds the prompt.
    model.train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1, 0, total_iters=steps)
    for step in range(1, steps + 1):
        rows, wanted, batch = [], [], rng.sample(range(len(train)), BATCH)
        for index in batch:
            at = len(texts[index]) - 1 - rng.randrange(len(train[index].answer_ids))
            rows.append(texts[index][at - WINDOW : at])
            wanted.append(texts[index][at])
        goal = sidestream.LatentState(goal=model.channel.encoder.predict(pooled[batch]))
        logits = model(torch.tensor(rows), goal=goal, logits_to_keep=1).logits[:, -1]
        loss = F.cross_entropy(logits, torch.tensor(wanted))
        loss.backward()
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if step % 100 == 0 or step == steps:
            print(f"step {step:5d}  loss {loss.item():.3f}  {time.monotonic() - start:.0f} s")

    model.eval()
    goals = [list(problem.goal_ids) for problem in test]
    n, chance = len(test), 1 / len(treasure.ITEMS)
    opened, closed = recall(model, test, vocabulary, goal=goals), recall(model, test, vocabulary)
    print(f"item named right at H = {HORIZON}, W = {WINDOW}, n = {n}:")
    print(f"  channel open   {opened} ({opened / n:.1%})")
    print(f"  channel closed {closed} ({closed / n:.1%}), chance {chance:.1%}")

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)  # the channel alone
        base = model.detach()  # the language model, as if nothing had ever been attached
        again = sidestream.load(directory, base, encoder=encoder)
        print(f"  saved, detached and loaded: {recall(again, test, vocabulary, goal=goals)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="steps of the channel's training (default: %(default)s)")
    parser.add_argument("--test-problems", type=int, default=240, help="default: %(default)s")
    given = parser.parse_args()
    main(given.steps, given.test_problems)
