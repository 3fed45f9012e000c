"""L2 balls around goal vectors: steps inside them, random directions, and the worst vector for a loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def ball_step(
    vectors: Float[Tensor, "B G"],
    gradient: Float[Tensor, "B G"],
    centre: Float[Tensor, "B G"],
    *,
    radius: float,
    size: float,
) -> Float[Tensor, "B G"]:
    """One step of projected gradient ascent: up the normalised gradient, then back into the ball around `centre`.

    Args:
        radius, size: of the ball and of the step, both in units of the norm of each row's `centre`.
    """
    scale = centre.norm(dim=1, keepdim=True)
    return into_ball(vectors + size * scale * direction_of(gradient), centre, radius=radius)


def direction_of(vectors: Float[Tensor, "B G"]) -> Float[Tensor, "B G"]:
    """Vectors scaled to norm 1; zeros stay zeros."""
    length = vectors.norm(dim=1, keepdim=True)
    return torch.where(length > 0, vectors / length.clamp(min=torch.finfo(vectors.dtype).tiny), 0.0)


def into_ball(vectors: Float[Tensor, "B G"], centre: Float[Tensor, "B G"], *, radius: float) -> Float[Tensor, "B G"]:
    """The nearest vectors with a distance from `centre` of at most `radius` times its norm."""
    away = vectors - centre
    length = away.norm(dim=1, keepdim=True)
    limit = radius * centre.norm(dim=1, keepdim=True)
    # A hair inside, so that rounding does not leave the ball.
    shrink = limit * (1 - 1e-6) / length.clamp(min=torch.finfo(away.dtype).tiny)
    return torch.where(length > limit, centre + away * shrink, vectors)


def on_sphere(centre: Float[Tensor, "B G"], *, radius: float, generator: torch.Generator) -> Float[Tensor, "B G"]:
    """Random vectors at a distance from `centre` of `radius` times its norm, every direction as likely."""
    noise = torch.randn(centre.shape, generator=generator, device=generator.device).to(centre)
    return ball_step(centre, noise, centre, radius=radius, size=radius)


def worst_vectors(
    loss: Callable[[Tensor], Tensor],
    vectors: Float[Tensor, "B G"],
    *,
    radius: float,
    steps: int = 3,
    size: float | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "B G"]:
    """The vectors in an L2 ball around given ones for which a loss is highest: the inner half of adversarial training.

    Few-step PGD (Madry et al., 2018), to be called in a training objective:

        goal = channel.encoder.predict(pooled)
        worst = worst_vectors(lambda goal: row_losses(goal), goal, radius=0.1)
        loss = row_losses(goal + (worst - goal.detach())).mean()

    A dynamic channel adds its updates to the vector it starts from, so a perturbed start is a perturbation of every
    P_t: let `loss` run the tracker.

    Args:
        loss: (B, G) vectors to (B,) losses, one a row; differentiable. No parameter's `.grad` is touched.
        vectors: (B, G) the centres.
        radius: of the ball, in units of each vector's own norm.
        steps: gradient steps, each a forward and a backward of the batch; one forward more to compare the last.
        size: of a step, in the same units; None for 2.5 x radius / steps, which reaches the edge from anywhere.
        generator: starts at a random point on the ball's edge; None at its centre.

    Returns:
        (B, G), detached: of all points visited the worst of each row, so never better than the start.

    Raises:
        ValueError: a negative radius or no step, or a loss that is not one number a row.
    """
    if radius < 0 or steps < 1:
        raise ValueError(f"radius is {radius}, steps {steps}: give a radius of at least 0 and at least 1 step")
    size = 2.5 * radius / steps if size is None else size
    centre = vectors.detach()
    point = centre if generator is None else on_sphere(centre, radius=radius, generator=generator)
    worst, highest = point, torch.full_like(centre[:, 0], -torch.inf)
    for step in range(steps + 1):
        point = point.detach().requires_grad_(step < steps)
        with torch.set_grad_enabled(step < steps):
            losses = loss(point)
        if losses.shape != highest.shape:
            raise ValueError(f"loss gave {tuple(losses.shape)} for {len(centre)} rows; give one number a row")
        higher = losses.detach() > highest
        worst = torch.where(higher.unsqueeze(1), point.detach(), worst)
        highest = torch.where(higher, losses.detach().to(highest.dtype), highest)
        if step < steps:
            (gradient,) = torch.autograd.grad(losses.sum(), point)
            point = ball_step(point.detach(), gradient, centre, radius=radius, size=size)
    return worst
