"""Documents to token windows: files, hub datasets or strings, with a cursor to resume from."""

from ropelens.data.cutting import Counts, Cursor, Fit, Window, Windows, document_numbers, windows

__all__ = ["Counts", "Cursor", "Fit", "Window", "Windows", "document_numbers", "windows"]
