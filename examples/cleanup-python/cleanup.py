#!/usr/bin/env python3
"""Deletes expired idempotency keys every so many seconds: a thread and one CALL.

    ./cleanup.py --every 300

The connection is what PGHOST, PGDATABASE and the like say, as a role that has
idem_grant(role, admin => true).  Any number of processes may do this at once:
their sweeps take nothing from each other and wait for nobody.

Works with psycopg 3 and psycopg2.
"""
import argparse
import logging
import signal
import threading

try:
    import psycopg
except ImportError:
    import psycopg2 as psycopg

log = logging.getLogger("cleanup")


def hear_notices(connection):
    """Logs what the server says at once, where the driver can do that (psycopg 3)."""
    if hasattr(connection, "add_notice_handler"):
        connection.add_notice_handler(lambda notice: log_notice(
            notice.severity_nonlocalized or notice.severity,
            notice.message_primary, notice.message_detail, notice.message_hint))


def log_heard(connection):
    """Logs what the server has said, where the driver keeps it (psycopg2)."""
    for notice in getattr(connection, "notices", []):
        severity, _, text = notice.partition(":  ")
        log_notice(severity, *text.splitlines())


def log_notice(severity, *lines):
    """A WARNING is about rows that could not be deleted, a NOTICE how far it is."""
    log.log(logging.INFO if severity == "NOTICE" else logging.WARNING,
            "%s", " ".join(line for line in lines if line))


class Cleanup:
    def __init__(self, conninfo="", every=300.0):
        self.conninfo = f"{conninfo} application_name=cleanup"
        self.every = every
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._connection = None

    def sweep(self):
        """One sweep, on a connection of its own."""
        connection = psycopg.connect(self.conninfo)
        try:
            # The CALL commits after each batch, so it must not be in a
            # transaction, which a driver begins by itself unless told not to.
            connection.autocommit = True
            hear_notices(connection)
            with self._lock:
                if self._stopping.is_set():
                    return
                self._connection = connection
            connection.cursor().execute("CALL idem_sweep_all()")
        finally:
            with self._lock:
                self._connection = None
            log_heard(connection)
            connection.close()

    def run(self):
        """Sweeps until stop().  A run that fails is logged; the next one does its work."""
        while True:
            try:
                self.sweep()
            except psycopg.Error as error:
                if not self._stopping.is_set():
                    log.error("%s", str(error).strip())
            if self._stopping.wait(self.every):
                return

    def stop(self):
        """Ends run(), and the sweep it is at: what its batches have deleted stays deleted."""
        with self._lock:
            self._stopping.set()
            if self._connection is not None:
                self._connection.cancel()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=float, default=300.0, metavar="SECONDS")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(name)s: %(levelname)s: %(message)s")
    cleanup = Cleanup(every=arguments.every)
    # The sweep blocks its thread; this one is free to hear signals.
    thread = threading.Thread(target=cleanup.run)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: threading.Thread(target=cleanup.stop).start())
    thread.start()
    while thread.is_alive():
        thread.join(0.5)


if __name__ == "__main__":
    main()
