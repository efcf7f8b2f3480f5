"""The child process that appends chunks to a SQLite journal: `python -m tarn.journal.sqlite_loader_process PATH`.

It reads a header and an Arrow stream from standard input, writes them in one transaction, and says how that went, until
its input ends. It opens the database by ADBC alone (see `tarn.journal.bulk`), and logs nothing.
"""

import signal
import sys

import orjson
import pyarrow as pa
from adbc_driver_manager import dbapi
from adbc_driver_sqlite import dbapi as sqlite

from tarn.db.engine import CHECKPOINT_PAGES
from tarn.journal.bulk import Appender, inserted, receive, send

BUSY_MILLISECONDS = 20_000

RENEW = (
    "UPDATE journal_batches SET expires = strftime('%Y-%m-%d %H:%M:%f000', ?, 'unixepoch') "
    "WHERE id = ? AND state = 'open' RETURNING id"
)


def prepared(connection: dbapi.Connection) -> dbapi.Connection:
    """A connection that waits for other writers and reaches the disk with each commit."""
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
    # Ctrl-C reaches the whole group of processes; this one ends when its parent closes the pipe, and not before.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    appender = Appender(prepared(sqlite.connect(f"file:{path}", autocommit=True)), RENEW, inserted)
    while True:
        try:
            header, rows = orjson.loads(receive(sys.stdin.buffer)), receive(sys.stdin.buffer)
        except EOFError:
            break
        try:
            (chunk,) = pa.ipc.open_stream(rows)
            answer: dict[str, object] = {"written": appender.append(header["batch"], header["expires"], chunk)}
        except dbapi.Error as error:
            answer = {"error": str(error)}
        send(sys.stdout.buffer, orjson.dumps(answer))
        sys.stdout.buffer.flush()
    appender.close()


if __name__ == "__main__":
    main(sys.argv[1])
