"""Child process that appends chunks to a SQLite journal: `tarn.journal.sqlite_loader_process PATH`.

Until its connection is closed, it receives messages with an Arrow stream, writes the rows in one transaction, and
reports the result. It opens the database only through ADBC (see `tarn.journal.bulk`), and logs nothing.
"""

import sys
from typing import TYPE_CHECKING

import pyarrow as pa
from adbc_driver_manager import Error as DriverError

from tarn.child_process import connect_to_parent
from tarn.db.engine import CHECKPOINT_PAGES
from tarn.journal.bulk import Appender, insert_rows

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi

BUSY_MILLISECONDS = 20_000

RENEW = (
    "UPDATE journal_batches SET expires = strftime('%Y-%m-%d %H:%M:%f000', ?, 'unixepoch') "
    "WHERE id = ? AND state = 'open' RETURNING id"
)


def configure(connection: "dbapi.Connection") -> "dbapi.Connection":
    """Configure a connection to wait for other writers and to sync each commit to disk; return it."""
    with connection.cursor() as cursor:
        for pragma in (
            f"busy_timeout={BUSY_MILLISECONDS}",
            "synchronous=FULL",
            f"wal_autocheckpoint={CHECKPOINT_PAGES}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
            cursor.fetchall()
    connection.adbc_connection.set_autocommit(False)
    return connection


def main(path: str) -> None:
    from adbc_driver_sqlite import dbapi as sqlite

    parent = connect_to_parent()
    appender = Appender(configure(sqlite.connect(f"file:{path}", autocommit=True)), RENEW, insert_rows)
    while True:
        try:
            header, rows = parent.receive()
        except (EOFError, OSError):  # the parent closed the connection or died
            break
        try:
            (chunk,) = pa.ipc.open_stream(rows)
            response: dict[str, object] = {"written": appender.append(header["batch"], header["expires"], chunk)}
        except DriverError as error:
            response = {"error": str(error)}
        parent.send(response)
    appender.close()


if __name__ == "__main__":
    main(sys.argv[1])
