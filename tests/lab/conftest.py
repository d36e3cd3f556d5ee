"""The lab's own tests are left out, loudly, where there can be no lab."""

from lab.possible import pytest_collection_modifyitems, pytest_terminal_summary

__all__ = ["pytest_collection_modifyitems", "pytest_terminal_summary"]
