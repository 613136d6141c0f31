import os
import signal
import subprocess
import sys
import threading
import time
import unittest

from cleanup import Cleanup, log, psycopg

connection = psycopg.connect("")
connection.autocommit = True


def value(sql, *arguments):
    cursor = connection.cursor()
    cursor.execute(sql, arguments or None)
    return cursor.fetchone()[0]


def do(sql):
    connection.cursor().execute(sql)


def count():
    return value("SELECT count(*) FROM idempotency_keys")


def until(what, condition):
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"in vain: {what}")
        time.sleep(0.02)


def fill(expired):
    do("TRUNCATE idempotency_keys")
    value("SELECT count(idem_once('old-' || n, ttl => '1 ms')) FROM generate_series(1, %s) n", expired)
    value("SELECT idem_once('live')")
    value("SELECT outcome FROM idem_claim('leased', ttl => '1 ms')")
    until("they expire", lambda: value("SELECT count(*) = 2 FROM idempotency_keys WHERE expires_at > clock_timestamp()"))


class CleanupTest(unittest.TestCase):
    def start(self, *arguments, **options):
        cleanup = Cleanup(*arguments, **options)
        thread = threading.Thread(target=cleanup.run)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(cleanup.stop)
        return cleanup

    def test_again_and_again(self):
        fill(2500)
        with self.assertNoLogs(log):
            self.start(every=0.1)
            until("it is swept", lambda: count() == 2)
            value("SELECT idem_once('another', ttl => '1 ms')")
            until("the next run sweeps what has expired since", lambda: count() == 2)
        self.assertEqual(value("SELECT string_agg(key, ' ' ORDER BY key) FROM idempotency_keys"), "leased live")

    def test_several_at_once(self):
        fill(5000)
        errors = []

        def sweep():
            try:
                Cleanup().sweep()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=sweep) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        self.assertEqual(count(), 2)

    def test_a_row_that_cannot_be_deleted(self):
        fill(10)
        self.addCleanup(do, "DROP TABLE orders")
        do("""CREATE TABLE orders (scope text, key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
              INSERT INTO orders VALUES ('', 'old-1')""")
        with self.assertLogs(log, "WARNING") as logged:
            Cleanup().sweep()
        self.assertEqual(count(), 3)
        self.assertEqual(len(logged.output), 1, logged.output)
        self.assertRegex(logged.output[0], r"^WARNING:cleanup:could not delete 1 expired idempotency key .*foreign key")
        self.assertEqual(logged.output[0].count("WARNING"), 1)

    def test_in_a_transaction_it_is_refused(self):
        other = psycopg.connect("")
        with self.assertRaises(psycopg.Error) as caught:
            other.cursor().execute("CALL idem_sweep_all()")
        other.close()
        self.assertIn("transaction block", str(caught.exception))

    def test_no_server(self):
        with self.assertLogs(log, "ERROR") as logged:
            self.start("host=/nonexistent", every=0.05)
            until("two runs have failed", lambda: len(logged.output) >= 2)

    def test_connection_dies(self):
        fill(100)
        name = value("SELECT quote_ident(current_database())")
        self.addCleanup(do, f"ALTER DATABASE {name} RESET ALL")
        do(f"ALTER DATABASE {name} SET idempotency.sweep_batch_size = 10")
        do(f"ALTER DATABASE {name} SET idempotency.sweep_pause = '1 h'")
        with self.assertLogs(log, "ERROR"):
            self.start(every=0.05)
            until("it pauses", lambda: count() == 92)
            do(f"ALTER DATABASE {name} RESET idempotency.sweep_pause")
            value("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'cleanup'")
            until("the next run is through", lambda: count() == 2)

    def test_sigterm(self):
        fill(100)
        environment = dict(os.environ, PGOPTIONS="-c idempotency.sweep_batch_size=10 -c idempotency.sweep_pause=1h")
        with subprocess.Popen([sys.executable, "cleanup.py", "--every", "1"], env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
            self.addCleanup(child.kill)
            until("it pauses", lambda: count() == 92)
            child.send_signal(signal.SIGTERM)
            output, _ = child.communicate(timeout=60)
        self.assertEqual((child.returncode, output), (0, ""))
        self.assertEqual(count(), 92)


if __name__ == "__main__":
    print(f"with {psycopg.__name__} {psycopg.__version__}", file=sys.stderr)
    unittest.main()
