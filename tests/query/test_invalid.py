"""Detection of invalid entities: SQL and FollowTheMoney's model agree."""

from itertools import combinations
from random import Random

import duckdb
import pyarrow as pa
from followthemoney.model import Model
from tarn.lake.live import invalid_sql
from tarn.query.output.ftm_model import resolved_schema

UNKNOWN = ["Nonsense", "Person'; --"]


def invalid_sets(sets: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the sets of schemata that SQL reports as invalid, each that of one entity in a relation."""
    rows = [(str(number), schema) for number, schemata in enumerate(sets) for schema in schemata]
    table = pa.table({"canonical_id": [row[0] for row in rows], "schema": [row[1] for row in rows]})
    with duckdb.connect() as duck:
        duck.register("entities", table)
        invalid = duck.execute(invalid_sql.invalid("entities", "canonical_id")).fetchall()
    return [sets[number] for number in sorted(int(name) for (name,) in invalid)]


def test_every_pair_of_schemata_is_judged_like_the_model():
    names = [*sorted(Model.instance().schemata), *UNKNOWN]
    sets = [*((name,) for name in names), *combinations(names, 2)]

    expected = [one for one in sets if resolved_schema(frozenset(one)) is None]

    assert invalid_sets(sets) == expected
    assert ("LegalEntity", "Vessel") in expected
    assert ("LegalEntity", "Person") not in expected


def test_larger_sets_of_schemata_are_judged_like_the_model():
    random = Random(18)
    names = [*sorted(Model.instance().schemata), *UNKNOWN]
    related = [name for name in names if name not in UNKNOWN and Model.instance()[name].is_a("LegalEntity")]
    sets = [
        tuple(random.sample(pool, random.randint(3, min(5, len(pool)))))
        for _ in range(2_000)
        for pool in (names, [*related, "Thing", *UNKNOWN])
    ]

    invalid = invalid_sets(sets)

    assert invalid == [one for one in sets if resolved_schema(frozenset(one)) is None]
    assert 0 < len(invalid) < len(sets)
