"""The worker."""

import threading

from sqlalchemy import func, select

from app.db.tables import workers
from app.errors import Unavailable
from app.worker.loop import Worker
from tests.house import House


def make_worker(house: House, **changes) -> Worker:
    settings = house.services.settings.model_copy(update={"worker_poll": 0.01, "worker_heartbeat": 0.01, **changes})
    return Worker(settings, house.services.database, house.services.store)


def test_worker_runs_what_is_queued_gives_signs_of_life_and_leaves_when_told(house: House):
    house.dataset("donations")
    job = house.admin.delete("/v1/datasets/donations?confirm=donations").json()
    worker = make_worker(house)
    thread = threading.Thread(target=worker.run)
    thread.start()

    done = house.admin.get(f"/v1/jobs/{job['id']}?wait=20").json()
    ready = house.nobody.get("/readyz").json()
    worker.stop()
    thread.join(10)

    assert (done["state"], done["progress"], ready["worker"]) == ("done", None, "ok")
    assert not thread.is_alive()
    with house.services.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(workers)).scalar() == 0


def test_job_that_fails_says_why_and_the_worker_goes_on(house: House, monkeypatch):
    house.dataset("first")
    house.dataset("second")
    jobs = [house.admin.delete(f"/v1/datasets/{name}?confirm={name}").json()["id"] for name in ("first", "second")]
    worker = make_worker(house)
    with monkeypatch.context() as broken:

        def refuse(*_: object) -> None:
            raise Unavailable("the store does not answer")

        broken.setattr(house.services.store, "delete", refuse)
        worker.step()

    worker.step()

    first, second = (house.admin.get(f"/v1/jobs/{job}").json() for job in jobs)
    assert (first["state"], first["problem"]["type"]) == ("failed", "/problems/unavailable")
    assert second["state"] == "done"
    assert house.admin.post("/v1/datasets", {"name": "first"}).status_code == 409


def test_worker_that_must_stop_hands_its_job_back_and_another_finishes_it(house: House):
    house.dataset("donations")
    for number in range(2500):
        house.services.store.put(f"donations/entities/{number:05d}", b"")
    job = house.admin.delete("/v1/datasets/donations?confirm=donations").json()["id"]
    stopped = make_worker(house)
    stopped.stop()

    stopped.step()
    between = house.admin.get(f"/v1/jobs/{job}").json()
    make_worker(house).step()

    after = house.admin.get(f"/v1/jobs/{job}").json()
    assert (between["state"], between["progress"]["done"]) == ("queued", 1000)
    assert (after["state"], after["attempts"]) == ("done", 2)
    assert list(house.services.store.list("donations")) == []
