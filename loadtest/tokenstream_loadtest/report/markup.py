"""HTML and SVG as text that is escaped unless it was made here: a name from a file or a server stays a name.

It knows tags, attributes and children; it does not know which of them exist, nor what a page looks like.
"""

from __future__ import annotations

from html import escape

Child = str | None  # None is nothing
_VOID = frozenset({"meta", "col"})


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *children: Child, **attributes: str | float | None) -> Markup:
    """One element. Attributes: `class_` is class, `data_tip` is data-tip; None leaves one out, "" gives it no value."""
    written = [name]
    for key, value in attributes.items():
        if value is not None:
            attribute = key.rstrip("_").replace("_", "-")
            written.append(f'{attribute}="{escape(_text(value))}"' if value != "" else attribute)
    opened = f"<{' '.join(written)}>"
    return Markup(opened if name in _VOID else f"{opened}{join(*children)}</{name}>")


def join(*children: Child) -> Markup:
    """Children one after the other, escaped where they are no markup."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children if child))


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
