"""What goes wrong when the lab itself cannot be built, started or stopped."""


class LabError(Exception):
    """The lab is broken or cannot run here; says nothing about the code under test."""
