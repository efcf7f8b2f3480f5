"""Character encodings of text files, by their Python names."""

import codecs

NO_FILES = frozenset({"idna", "punycode", "undefined", "unicode_escape", "raw_unicode_escape"})
"""Python codecs of text that no file is encoded with."""


def known_encoding(name: str) -> str:
    """Return Python's canonical name of a text encoding. Raises ValueError for an unknown one."""
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):
        raise ValueError(f"{name!r} is not a known encoding") from None
    if not codec._is_text_encoding or codec.name.replace("-", "_") in NO_FILES:
        raise ValueError(f"{name!r} is not an encoding of text files")
    return codec.name
