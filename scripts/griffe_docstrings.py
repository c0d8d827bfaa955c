"""Adapt docstrings and annotations to the API reference (an extension of griffe, which mkdocstrings uses).

- A doctest (`>>> …`) outside an `Examples:` section becomes a fenced block; Markdown would show it as a quotation.
- `Annotated[T, …]` is shown as `T`: the metadata belongs to the command line.
"""

import re
from typing import Any

import griffe

# From a line with a prompt to the next blank line or the end.
_DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)


def fence_doctests(text: str) -> str:
    """Return a docstring with its doctests in fences; those in an `Examples:` section are left as they are."""
    before, examples, after = text.partition("\nExamples:\n")
    return _DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", before) + examples + after


class ApiReference(griffe.Extension):
    """Apply both rules to every object that griffe loads."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: D102
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:  # noqa: D102
        annotation = attr.annotation
        if isinstance(annotation, griffe.ExprSubscript) and annotation.canonical_name == "Annotated":
            inner = annotation.slice
            attr.annotation = inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner
