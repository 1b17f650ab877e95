"""What a chat client keeps between calls and runs: replies by content, and what was spent, in one SQLite file."""

import pathlib
import sqlite3
import threading

SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS spending (id INTEGER PRIMARY KEY, usd REAL NOT NULL);
"""
BUSY_S = 30.0  # how long a process waits for another one's transaction


class ChatStore:
    """Safe for threads, and on disk for processes: a reservation is one transaction, so that two runs cannot both take the last cent.

    Args:
      path: the file; None keeps everything in memory.
    """

    def __init__(self, path: str | pathlib.Path | None):
        if path is not None:
            pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(":memory:" if path is None else path, BUSY_S, isolation_level=None, check_same_thread=False)
        self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + SCHEMA)
        self._lock = threading.Lock()

    def reply(self, key: str) -> str | None:
        """The reply under a key, or None."""
        with self._lock:
            row = self._connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def keep(self, key: str, reply: str) -> None:
        """Keeps a reply; the first one under a key stays."""
        with self._lock:
            self._connection.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, reply))

    def spent(self) -> float:
        """USD spent and reserved."""
        with self._lock:
            return self._spent()

    def reserve(self, usd: float, cap_usd: float | None) -> int | None:
        """Sets money aside for a call; None if that would pass the cap. A run that is killed leaves its reservations as spent."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if cap_usd is not None and self._spent() + usd > cap_usd:
                    return None
                return self._connection.execute("INSERT INTO spending (usd) VALUES (?)", (usd,)).lastrowid
            finally:
                self._connection.execute("COMMIT")

    def settle(self, reservation: int, usd: float) -> None:
        """Replaces a reservation by what the call cost."""
        with self._lock:
            self._connection.execute("UPDATE spending SET usd = ? WHERE id = ?", (usd, reservation))

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._connection.close()

    def _spent(self) -> float:
        return float(self._connection.execute("SELECT COALESCE(SUM(usd), 0.0) FROM spending").fetchone()[0])
