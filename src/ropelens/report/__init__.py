"""Saved results as offline HTML pages."""

from ropelens.report.lesions import write_lesions
from ropelens.report.page import write_page
from ropelens.report.summary import HeadSummary, Repeat, choose_head, choose_repeat, lowest_heads

__all__ = [
    "HeadSummary",
    "Repeat",
    "choose_head",
    "choose_repeat",
    "lowest_heads",
    "write_lesions",
    "write_page",
]
