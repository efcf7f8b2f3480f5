"""A process that runs one round of webhook deliveries on the database with this URL, to be killed during it."""

import sys

from tarn.db.engine import Database
from tarn.settings import load_settings
from tarn.worker.deliveries import Deliveries

if __name__ == "__main__":
    settings = load_settings(database_url=sys.argv[1], fetch_private_hosts=("127.0.0.1",))
    Deliveries(settings, Database(settings.database_url), "doomed").step()
