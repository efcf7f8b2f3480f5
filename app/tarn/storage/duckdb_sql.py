"""Text of DuckDB queries: string literals, placeholders and scans of Parquet files."""

from collections.abc import Collection, Iterable


def quote_literal(text: str) -> str:
    """Return trusted text, such as a path in the lake, as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def placeholders(values: Collection[object]) -> str:
    """Return a list of placeholders, one for each value."""
    return ", ".join("?" * len(values))


def scan_parquet(urls: Iterable[str], *, filename: bool = False) -> str:
    """Return the table function that reads these Parquet files; with `filename`, each row names its file."""
    listed = ", ".join(map(quote_literal, urls))
    return f"read_parquet([{listed}], hive_partitioning = false{', filename = true' if filename else ''})"
