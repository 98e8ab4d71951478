"""Saved results as offline HTML pages."""

from ropelens.report.attention import AttentionGrid, attention_grid, choose_heads
from ropelens.report.finding import Results, find_results
from ropelens.report.lesions import write_lesions
from ropelens.report.measuring import complete
from ropelens.report.pages import write_report
from ropelens.report.summary import HeadSummary, Repeat, choose_head, choose_repeat, lowest_heads

__all__ = [
    "AttentionGrid",
    "HeadSummary",
    "Repeat",
    "Results",
    "attention_grid",
    "choose_head",
    "choose_heads",
    "choose_repeat",
    "complete",
    "find_results",
    "lowest_heads",
    "write_lesions",
    "write_report",
]
