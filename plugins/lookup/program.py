"""A package's directory as the text of one program, for a host's interpreter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase

from pivot.program import program

DOCUMENTATION = """
name: program
short_description: A script or package as the text of one program
description: For the standard input of an interpreter (`python -I - ARGUMENTS`); it runs the package's `__main__`.
author: Pivot contributors
options:
  _terms:
    description: Scripts, or directories of packages, below the role's C(files).
    type: list
    elements: path
    required: true
"""


class LookupModule(LookupBase):
    """One text per package."""

    def run(self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """Pack every package; an AnsibleError names what is missing."""
        texts = []
        for term in terms:
            found = self.find_file_in_search_path(variables, "files", term)
            try:
                texts.append(program(Path(found or term)))
            except OSError as error:
                raise AnsibleError(f"the package {term} cannot be packed: {error}") from error
        return texts
