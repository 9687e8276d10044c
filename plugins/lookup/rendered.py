"""A template's text on the controller. Unlike the built-in lookup it copies no variables, which costs seconds here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase
from ansible.template import trust_as_template

DOCUMENTATION = """
name: rendered
short_description: Text of a template, rendered on the controller
description: Renders as the template module does. Keyword arguments are variables on top of the host's.
author: Pivot contributors
options:
  _terms: {description: Absolute paths of templates., type: list, elements: path, required: true}
"""


class LookupModule(LookupBase):
    """One text per path."""

    def run(self, terms: Sequence[str], variables: Mapping[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """Render every path; an AnsibleError names the one that cannot be read."""
        templar = self._templar.copy_with_new_env(available_variables={**(variables or {}), **kwargs})
        texts = []
        for term in terms:
            try:
                source = Path(term).read_text()
            except OSError as error:
                raise AnsibleError(f"the template {term} cannot be read: {error.strerror}") from error
            text = templar.template(
                trust_as_template(source), escape_backslashes=False, overrides={"trim_blocks": True}
            )
            texts.append(text)
        return texts
