"""Saved results as offline HTML pages."""

from ropelens.report.page import write_page
from ropelens.report.summary import HeadSummary, choose_head, choose_query, lowest_heads

__all__ = ["HeadSummary", "choose_head", "choose_query", "lowest_heads", "write_page"]
