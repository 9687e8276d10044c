"""The one exception that reaches a person."""


class LabError(Exception):
    """Something a person can act on; its text is one sentence that says what, where, and what would be right."""
