"""The report of a run directory."""

from sidestream.experiments.report.page import write_report

__all__ = ["write_report"]
