"""Lets the docs read our `Example:` sections as Google's `Examples:`."""

import re

import griffe

SECTION = re.compile(r"^(\s*)Example:$", flags=re.MULTILINE)


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = SECTION.sub(r"\1Examples:", obj.docstring.value)
