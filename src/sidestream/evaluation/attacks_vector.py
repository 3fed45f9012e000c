"""Attacks on the vector channel: swap, interpolation, PGD in an L2 ball, an unbounded one, and controls.

Each takes the honest vectors, (B, G), and gives vectors for which the model should say the objective's targets. On a
dynamic channel the vector is the one that the tracker starts from, and its updates come on top; how tokens forced into
the tracker's input move it, `attacks_text.search_tokens` searches.

An objective with `defence=GoalCodes(...)` makes every attack here adaptive: its forwards see the code that the vector
is snapped to, and its gradient is the one at that code, handed on as if snapping were the identity. Within a cell that
gradient does not change, so PGD walks straight until it crosses a face. Where the model's gradient at a code does not
point at the code wanted, `cross_codes` still does: it needs no gradient.

Against an `Arbiter` the attack that knows it is PGD around the text's own vector with the threshold for radius, as
these are the vectors that it lets pass; or any attack with its `penalty`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sidestream.channels.ball import ball_step, direction_of, into_ball, on_sphere
from sidestream.channels.codes import GoalCodes
from sidestream.evaluation.attacks import Cost, Measured, Objective, Texts


class VectorAttack(NamedTuple):
    """What became of each vector."""

    vectors: Tensor
    """(B, G) the attacked vectors, before any defence."""
    loss: Tensor
    """(B,) of the objective."""
    hit: Tensor
    """(B,) whether greedy decoding says the attacker's target, unnoticed."""
    cost: Cost
    """What it took."""


@dataclass(frozen=True, kw_only=True)
class PGDConfig:
    """Projected gradient descent on the vector."""

    radius: float
    """Of the L2 ball, in units of the norm of each row's honest vector."""
    steps: int = 20
    """Gradient steps of each start."""
    size: float | None = None
    """Of the first step, in the same units; the others shrink linearly to 0. None for 8 x radius / steps, which crosses
    the ball twice."""
    momentum: float = 0.75
    """Share of the last direction that is kept (Dong et al., 2018). 0 is plain PGD, which gets caught more often."""
    starts: int = 1
    """The first start is the honest vector, the others are random points on the ball's edge."""
    seed: int = 0
    """Of the random starts."""

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise ValueError(f"PGDConfig.radius is {self.radius}; it is a share of the vector's norm, at least 0")
        for name in ("steps", "starts"):
            if getattr(self, name) < 1:
                raise ValueError(f"PGDConfig.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"PGDConfig.momentum is {self.momentum}; it is a share, at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """The unbounded attack."""

    steps: int = 100
    """Steps of Adam."""
    learning_rate: float = 0.1
    """In units of the root mean square of each honest vector's entries."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.learning_rate <= 0:
            raise ValueError(f"EmbeddingConfig has {self.steps} steps, rate {self.learning_rate}; both must be above 0")


def interpolate(objective: Objective, texts: Texts, vectors: Tensor, others: Tensor, t: float) -> VectorAttack:
    """The vector a share `t` of the way to another goal's: 0 leaves it, 1 is the swap. One forward.

    Raises:
        ValueError: `t` outside 0 to 1.
    """
    if not 0 <= t <= 1:
        raise ValueError(f"t is {t}; it is a share of the way, 0 to 1")
    moved = others.clone() if t == 1 else vectors + t * (others - vectors)
    return _attempt(objective, texts, moved)


def swap(objective: Objective, texts: Texts, others: Tensor) -> VectorAttack:
    """Another goal's vector in place of the honest one. One forward. `swap_order` deals others out."""
    return _attempt(objective, texts, others.clone())


def swap_order(count: int, seed: int) -> list[int]:
    """A random order in which no row keeps its place: whose vector, and whose answer, each row gets.

    Raises:
        ValueError: fewer than 2 rows.
    """
    if count < 2:
        raise ValueError(f"{count} row cannot swap with another; give at least 2")
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    after = dict(zip(shuffled, [*shuffled[1:], shuffled[0]], strict=True))  # one cycle through all rows
    return [after[row] for row in range(count)]


def noise_like(vectors: Tensor, seed: int) -> Tensor:
    """Gaussian noise with the mean and deviation of these vectors, (B, G), in each dimension: LS-AR's Random FiLM."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(vectors.shape, generator=generator).to(vectors)
    return vectors.mean(dim=0) + vectors.std(dim=0) * noise


def random_directions(
    objective: Objective, texts: Texts, vectors: Tensor, *, radius: float, tries: int = 1, seed: int = 0
) -> VectorAttack:
    """The control of PGD: random directions of the same norm, the best of `tries`, a forward each.

    With `tries` at PGD's forwards, what PGD has over this is its gradient.

    Raises:
        ValueError: a negative radius or no try.
    """
    if radius < 0 or tries < 1:
        raise ValueError(f"radius is {radius}, tries {tries}: give a radius of at least 0 and at least 1 try")
    generator = torch.Generator().manual_seed(seed)
    found = _Best(objective, texts)
    for _ in range(tries):
        found.take(on_sphere(vectors, radius=radius, generator=generator))
    return found.attack(tries)


def pgd(
    objective: Objective, texts: Texts, vectors: Tensor, config: PGDConfig, *, towards: Tensor | None = None
) -> VectorAttack:
    """PGD in an L2 ball towards the target (Madry et al., 2018): the best point visited, a hit before any other.

    `steps` + 1 forwards and `steps` backwards a start.

    Args:
        towards: (B, G) vectors of the goals wanted, for an attacker who has the encoder: one start more, at the point
            of the ball nearest to each. A swap beyond the ball is then where the search begins.
    """
    size = 8 * config.radius / config.steps if config.size is None else config.size
    generator = torch.Generator().manual_seed(config.seed)
    starts = [vectors]
    if towards is not None:
        starts.append(into_ball(towards, vectors, radius=config.radius))
    starts += [on_sphere(vectors, radius=config.radius, generator=generator) for _ in range(config.starts - 1)]
    found = _Best(objective, texts)
    for point in starts:
        velocity = torch.zeros_like(vectors)
        for step in range(config.steps):
            velocity = config.momentum * velocity - direction_of(found.take_with_gradient(point))
            shrunk = size * (1 - step / config.steps)
            point = ball_step(point, velocity, vectors, radius=config.radius, size=shrunk)
        found.take(point)
    return found.attack(config.steps * len(starts))


def embedding_attack(
    objective: Objective, texts: Texts, vectors: Tensor, config: EmbeddingConfig | None = None
) -> VectorAttack:
    """The unbounded attack: Adam on the vector, from the honest one, wherever that leads. The best point visited.

    What it reaches says whether the channel can say a target at all; what PGD reaches, how near that is.
    """
    config = EmbeddingConfig() if config is None else config
    scale = vectors.square().mean(dim=1, keepdim=True).sqrt()
    moved = torch.zeros_like(vectors, requires_grad=True)
    optimiser = torch.optim.Adam([moved], lr=config.learning_rate)
    found = _Best(objective, texts)
    for _ in range(config.steps):
        gradient = found.take_with_gradient((vectors + scale * moved).detach())
        moved.grad = gradient * scale  # the chain rule; Adam then makes steps of one length in units of `scale`
        optimiser.step()
    found.take((vectors + scale * moved).detach())
    return found.attack(config.steps)


def cross_codes(
    objective: Objective, texts: Texts, vectors: Tensor, codes: GoalCodes, wanted: Tensor, *, radius: float
) -> VectorAttack:
    """The attack on snapping that knows the codes: from the honest vector straight at a code wanted, to the ball's
    edge or, if that is nearer, to the code; and in the direction from its own code to that one. Two forwards, no
    gradient.

    Args:
        wanted: (B,) index of the code wanted for each row.
        radius: of the ball, in units of the norm of each row's vector.
    """
    # The second meets the face between the two codes soonest; the first is sure to arrive if the ball is large enough.
    aim = codes.codes[wanted.to(codes.codes.device)].to(vectors)
    own = codes.codes[codes.nearest(vectors)].to(vectors)
    found = _Best(objective, texts)
    found.take(into_ball(aim, vectors, radius=radius))
    found.take(into_ball(vectors + (aim - own), vectors, radius=radius))
    return found.attack(2)


def relative_distance(vectors: Tensor, honest: Tensor) -> Tensor:
    """(B,) how far vectors are from honest ones, in units of the norm of these."""
    return (vectors - honest).norm(dim=1) / honest.norm(dim=1)


class _Best:
    """The best vector of each row among those tried."""

    def __init__(self, objective: Objective, texts: Texts) -> None:
        self.objective = objective
        self.texts = texts
        self.counts = objective.counts()
        self.vectors: Tensor | None = None
        self.standing: Measured | None = None

    def take(self, vectors: Tensor) -> None:
        self._keep(vectors, self.objective.measure(self.texts, vectors))

    def take_with_gradient(self, vectors: Tensor) -> Tensor:
        measured, gradient = self.objective.vector_gradient(self.texts, vectors)
        self._keep(vectors, measured)
        return gradient

    def _keep(self, vectors: Tensor, measured: Measured) -> None:
        if self.vectors is None or self.standing is None:
            self.vectors, self.standing = vectors.detach().clone(), measured
            return
        better = measured.better_than(self.standing)
        self.vectors = torch.where(better.unsqueeze(1), vectors.detach(), self.vectors)
        self.standing = Measured(
            torch.where(better, measured.loss, self.standing.loss), torch.where(better, measured.hit, self.standing.hit)
        )

    def attack(self, steps: int) -> VectorAttack:
        assert self.vectors is not None and self.standing is not None
        spent = self.objective.spent(self.counts, steps)
        return VectorAttack(self.vectors, self.standing.loss, self.standing.hit, spent)


def _attempt(objective: Objective, texts: Texts, vectors: Tensor) -> VectorAttack:
    found = _Best(objective, texts)
    found.take(vectors)
    return found.attack(1)
