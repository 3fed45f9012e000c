"""The format of a results file, field by field; `description` says in words what a field must be."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

Text = Annotated[str, Field(min_length=1, description="a non-empty string")]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Cell(BaseModel, strict=True):
    """One number. Further fields are what a table adds."""

    arm: Text
    where: dict[str, Number | str] = Field(description="an object of numbers or strings")
    metric: Text
    value: Number = Field(description="a finite number")
    n: int = Field(gt=0, description="a whole number > 0")
    ci: list[Number] | None = Field(min_length=2, max_length=2, description="null or [low, high] around the value")
    paper: Number | None = Field(description="a number or null")


class Results(BaseModel, strict=True):
    """One experiment, scale and seed, or, with `seeds`, several seeds together."""

    table: Text
    scale: Literal["smoke", "cpu", "paper"] = Field(description="smoke, cpu or paper")
    seed: int = Field(ge=0, description="a whole number >= 0")
    seeds: list[int] = Field(default=[], description="a list of whole numbers")
    command: Text
    commit: Text
    dirty: bool = Field(description="true or false")
    versions: dict[str, Any] = Field(description="an object")
    machine: str | dict[str, Any] = Field(description="a string or an object")
    wall_s: Number = Field(ge=0, description="seconds >= 0")
    data_hash: Text
    settings: dict[str, Any] = Field(description="an object")
    notes: list[str] = Field(default=[], description="a list of strings")
    cells: list[Cell] = Field(min_length=1, description="a non-empty list")


FIELDS = {**Results.model_fields, **Cell.model_fields}
