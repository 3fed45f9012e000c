"""What the tables of `legacy.py` call their arms."""

from sidestream.experiments.table import load


def arm_name(arm: str, table: str) -> str:
    """What tables and pictures of `table` call an arm."""
    return load(table).arm(arm)
