"""Random histories over HTTP: written and read through the routes, and compared with the model."""

from typing import Any

import orjson
from hypothesis import given
from tarn.datasets.registry import Dataset
from tarn.model.ftm.entity import Exploder
from tarn.model.ftm.statement import statement_id

from tests.in_process_api import InProcessApi
from tests.pipeline.kernels import DirectKernels
from tests.query.flushed_history import HistoryPlayer
from tests.query.model import NAMES, Event, Model, Step, added, erased, histories, iso, shown
from tests.query.test_histories import fewer_histories

NDJSON = {"Content-Type": "application/x-ndjson"}


class HttpPlayer(HistoryPlayer):
    """Plays a history over HTTP."""

    def commit(self, *events: Event) -> None:
        match events:
            case ():
                return
            case ({"kind": 3, "entity_id": None, "origin": origin},):
                self.delete(f"/origins/{origin}", events[0])
            case ({"kind": 3, "entity_id": entity, "origin": origin},):
                self.delete(f"/entities/{entity}", events[0])
            case ({"kind": 2},):
                event = events[0]
                statement = statement_id(self.dataset.name, event["entity_id"], event["prop"], event["value"])
                self.delete(f"/statements/{statement.hex()}", event | {"id": statement})
            case ({"kind": 3, "entity_id": entity, "origin": origin}, *adds):
                self.put(entity, origin, adds)
            case _:
                body = b"\n".join(orjson.dumps(_as_sent(event)) for event in events)
                self.send("POST", "/statements", content=body, headers=NDJSON)
                self.expect(events)

    def put(self, entity: str, origin: str, statements: list[Event]) -> None:
        names = [event["value"] for event in statements if event["prop"] == "name"]
        moment = statements[0]["first_seen"]
        data = {"id": entity, "schema": "Person", "properties": {"name": names}, "first_seen": iso(moment)}
        self.send("PUT", f"/entities/{entity}", json=data, params={"origin": origin})
        exploded = Exploder().explode(self.dataset.name, data)
        facts = zip(exploded.props, exploded.values, strict=True)
        base_and_names = (added(entity, origin, ("Person", prop, value), None, moment, moment) for prop, value in facts)
        self.expect((erased(entity, origin), *base_and_names))

    def delete(self, path: str, event: Event) -> None:
        """Delete, and check that the returned count is the number of statements that are gone."""
        before = len(self.model.rows)
        options = {} if event["origin"] is None or event["entity_id"] is None else {"origin": event["origin"]}
        counted = self.send("DELETE", path, params=options)["tombstones"]
        self.expect((event,))
        assert counted == before - len(self.model.rows)

    def send(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self.api.admin(method, f"/v1/datasets/{self.dataset.name}{path}", **options)
        assert answer.status_code == 200, answer.text
        return answer.json()


def _as_sent(event: Event) -> dict[str, Any]:
    moments = {name: iso(event[name]) for name in ("first_seen", "last_seen")}
    return {name: value for name, value in event.items() if name != "kind"} | moments


def check(api: InProcessApi, dataset: Dataset, model: Model, **state: str) -> None:
    """Compare each entity by each id, the list and both streams with the model."""
    base = f"/v1/datasets/{dataset.name}"
    for name in NAMES:
        answer, line = api.admin.get(f"{base}/entities/{name}", params=state), model.one(name)
        status = 404 if line is None else 422 if b"$invalid" in line else 200
        assert answer.status_code == status, answer.text
        assert status != 200 or answer.content == line.strip()
    lines = [orjson.loads(line) for line in model.lines()]
    listed = api.admin.get(f"{base}/entities", params=state).json()
    assert listed["results"] == [line for line in lines if "$invalid" not in line]
    assert listed["invalid"] == [line["$invalid"] for line in lines if "$invalid" in line]
    streamed = api.admin.get(f"{base}/entities/stream", params={"end": "true", **state}).content.splitlines()
    assert [orjson.loads(line) for line in streamed[:-1]] == lines
    rows = api.admin.get(f"{base}/statements/stream", params=state, headers={"Accept": "application/x-ndjson"})
    assert [orjson.loads(line) for line in rows.content.splitlines()] == [shown(row) for row in model.rows]


@fewer_histories
@given(history=histories)
def test_history_over_http_is_reported_and_shown_as_in_the_model(
    api: InProcessApi, kernels: DirectKernels, history: list[Step]
):
    player = HttpPlayer.begin(api, kernels)
    for _ in player.play(history):
        check(api, player.dataset, player.model)
    check(api, player.dataset, player.head, fresh="snapshot")
    player.flush()
    for snapshot, model in player.past:
        check(api, player.dataset, model, at=str(snapshot.seq))
        named = api.admin.put(f"/v1/datasets/{player.dataset.name}/refs/kept", {"snapshot": snapshot.id})
        assert named.status_code in (200, 201), named.text
        check(api, player.dataset, model, at="kept")
