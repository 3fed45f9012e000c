"""Blocksworld in closed loop, batched: one token a row and step, forced by the simulator or chosen by the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM
from sidestream.lm.decoding.cache import LatentCache, Window
from sidestream.lm.texts.text import WordVocabulary
from sidestream.tasks.blocksworld import Action, Problem, legal_actions, satisfies, trace
from sidestream.tasks.blocksworld_data import END, TRIGGER, action_text, on_table, plan_text, standard_names
from sidestream.tasks.blocksworld_loop import (
    Episode,
    PlanScore,
    Rollout,
    emit,
    forced_action,
    make_episode,
    perturb,
    score_plan,
    score_rollout,
    start,
)

LONGEST_ACTION = 4
"""Words of the longest action and its comma; a model that has said more without one has failed."""


class _Row:
    """One rollout and the words in the air: forced ones still to be fed, or the model's since the last comma."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.rollout: Rollout = start(episode)
        self.forcing: list[str] = []
        self.said: list[str] = []

    def next_word(self, choice: str) -> str:
        """The word fed next: the simulator's while it forces an action, otherwise the model's `choice`."""
        if not self.forcing and not self.said:
            action = forced_action(self.episode, self.rollout)
            if action is not None:
                names = self.episode.problem.names
                self.forcing = [*action_text(action, names).split(), TRIGGER]
                self.rollout = perturb(self.episode, self.rollout, action)
        if self.forcing:
            return self.forcing.pop(0)
        self.said.append(choice)
        if choice in (TRIGGER, END) or len(self.said) >= LONGEST_ACTION:
            words = self.said if choice == END and len(self.said) == 1 else [w for w in self.said if w != TRIGGER]
            self.rollout = emit(self.episode, self.rollout, words)
            self.said = []
        return choice

    def legal_words(self) -> set[str]:
        """Words that go on to spell a legal action; `end` is none, as a rollout ends by itself at the goal."""
        said = len(self.said)
        words = set()
        for action in legal_actions(self.rollout.state):
            spelt = [*action_text(action, self.episode.problem.names).split(), TRIGGER]
            if spelt[:said] == self.said:
                words.add(spelt[said])
        return words

    @property
    def done(self) -> bool:
        """Nothing more to ask or to feed."""
        return self.rollout.done and not self.forcing


def run_episodes(
    model: AttachedLM,
    episodes: Sequence[Episode],
    vocabulary: WordVocabulary,
    *,
    window: int,
    goals: LatentState | None = None,
    batch_size: int = 250,
) -> list[PlanScore]:
    """Score a model's closed-loop plans; the arguments are those of `finish_episodes`."""
    ends = finish_episodes(model, episodes, vocabulary, window=window, goals=goals, batch_size=batch_size)
    return [score_rollout(episode, end) for episode, end in zip(episodes, ends, strict=True)]


def best_plans(
    model: AttachedLM,
    problems: Sequence[Problem],
    vocabulary: WordVocabulary,
    *,
    steered: bool,
    full: bool,
    window: int = 0,
    tries: int = 1,
) -> list[tuple[PlanScore, tuple[Action, ...]]]:
    """Plans for problems from elsewhere, in closed loop without perturbations.

    Args:
        model: an attached model trained on plans.
        problems: blocks are renamed to the vocabulary's names; actions hold block numbers, so they fit the originals.
        steered: False leaves the channel closed.
        full: the model knows full goals only, so it is asked to put on the table what a goal puts nowhere.
        window: W; 0 for everything in view.
        tries: rollouts a problem. The first is greedy; further ones are drawn at temperature 1 from the words that
            spell legal actions, and the shortest plan that reaches the goal is kept.

    Raises:
        ValueError: a problem has more blocks than there are names.
    """
    asked = [standard_names(problem) for problem in problems]
    tests = [make_episode(on_table(problem) if full else problem, perturbations=0, seed=0) for problem in asked]
    best: list[tuple[PlanScore, tuple[Action, ...]] | None] = [None] * len(tests)
    for attempt in range(tries):
        goals = model.encode_goal([vocabulary.encode(test.prompt) for test in tests]) if steered else None
        draw = torch.Generator().manual_seed(attempt) if attempt else None
        ends = finish_episodes(model, tests, vocabulary, window=window, goals=goals, draw=draw)
        for place, (problem, test, end) in enumerate(zip(asked, tests, ends, strict=True)):
            states = trace(problem.init, end.actions)
            # What was asked may hold before the full goal does, or before a mistake.
            steps = next((i for i, state in enumerate(states) if satisfies(state, problem.goal)), None)
            actions = end.actions[:steps]
            score = score_rollout(test, end)
            if steps is not None:
                score = score_plan(problem, plan_text(actions, problem.names).split())
            held = best[place]
            if held is None or (score.success and (not held[0].success or score.steps < held[0].steps)):
                best[place] = (score, actions)
    return [found for found in best if found is not None]


@torch.no_grad()
def finish_episodes(
    model: AttachedLM,
    episodes: Sequence[Episode],
    vocabulary: WordVocabulary,
    *,
    window: int,
    goals: LatentState | None = None,
    batch_size: int = 250,
    draw: torch.Generator | None = None,
) -> list[Rollout]:
    """Play episodes to their end in closed loop.

    Args:
        model: an attached model; with `goals` None its channel stays closed (a plain AR decoder).
        episodes: what to solve and where to perturb (see `Episode` for the protocol).
        window: W under `reindex`; 0 for everything in view.
        goals: one latent state per episode.
        batch_size: episodes at a time.
        draw: None takes the model's first choice, legal or not: what evaluation does. With a generator (on the CPU)
            words are drawn at temperature 1 from those that spell legal actions: for looking for a plan, not for
            measuring a model.
    """
    ends: list[Rollout] = []
    for first in range(0, len(episodes), batch_size):
        rows = [_Row(episode) for episode in episodes[first : first + batch_size]]
        part = None
        if goals is not None:
            part = goals.select(torch.arange(first, first + len(rows), device=goals.device))
        _finish(model, rows, vocabulary, window, part, draw)
        ends += [row.rollout for row in rows]
    return ends


def _finish(
    model: AttachedLM,
    rows: list[_Row],
    vocabulary: WordVocabulary,
    window: int,
    goals: LatentState | None,
    draw: torch.Generator | None,
) -> None:
    prompts = [vocabulary.encode(row.episode.prompt) for row in rows]
    width = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[vocabulary.pad_id] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    # Not the policy that fits the model: under `rolling` a rotary decoder would keep traces of the evicted prompt.
    cache: LatentCache = model.new_cache(window=Window(size=window, policy="reindex") if window else None)
    cache.latent = goals
    active = list(rows)
    while active:
        logits: Tensor = model(input_ids=ids, attention_mask=mask, cache=cache, logits_to_keep=1).logits[:, -1]
        chosen = logits.argmax(dim=-1) if draw is None else _drawn(logits, active, vocabulary, draw)
        choices = vocabulary_words(vocabulary, chosen.tolist())
        words = [END if row.done else row.next_word(choice) for row, choice in zip(active, choices, strict=True)]
        going = [index for index, row in enumerate(active) if not row.done]
        ids = torch.tensor([vocabulary.encode(word) for word in words], device=device)  # (B, 1)
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
        # Finished rows ride along until they are a quarter of the batch: dropping rows copies the whole cache.
        if len(going) <= 0.75 * len(active):
            keep = torch.tensor(going, dtype=torch.long, device=device)
            active = [active[index] for index in going]
            if active:
                cache.batch_select_indices(keep)
                ids, mask = ids[keep], mask[keep]


def _drawn(logits: Tensor, rows: Sequence[_Row], vocabulary: WordVocabulary, draw: torch.Generator) -> Tensor:
    """(B,) words drawn among the legal ones."""
    legal = torch.zeros(logits.shape, dtype=torch.bool)
    for index, row in enumerate(rows):
        words = {END} if row.done or row.forcing else row.legal_words()
        legal[index, [token for word in words for token in vocabulary.encode(word)]] = True
    weights = logits.float().cpu().masked_fill(~legal, float("-inf")).softmax(dim=-1)
    return torch.multinomial(weights, 1, generator=draw).squeeze(1)


def vocabulary_words(vocabulary: WordVocabulary, ids: Sequence[int]) -> list[str]:
    """Each id's word; ids without one come out as their placeholder, which no simulator accepts."""
    return [vocabulary.decode([token]) or "<pad>" for token in ids]
