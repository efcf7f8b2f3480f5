"""Encodings of text files, by the names that Python has for them."""

import codecs

NO_FILES = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})
"""What Python takes for encodings of text, and no file is written in."""


def known_encoding(name: str) -> str:
    """Python's own name of an encoding of text. Raises ValueError for one that it does not know."""
    try:
        found = codecs.lookup(name)
    except (LookupError, ValueError):
        raise ValueError(f"{name!r} is no encoding that is known here") from None
    if not found._is_text_encoding or found.name.replace("-", "_") in NO_FILES:
        raise ValueError(f"{name!r} is no encoding of text files")
    return found.name
