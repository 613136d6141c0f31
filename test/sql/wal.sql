--
-- wal: what is answered without writing writes nothing at all
--
-- Each measurement is the least of several, since others write WAL too.  Each
-- is made right after a checkpoint, on a row that nobody has read before: the
-- first change to a page, were it but a hint bit, would log the whole page.
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY terse

CREATE FUNCTION pg_temp.noise(bytes int) RETURNS bytea LANGUAGE sql IMMUTABLE AS
$$ SELECT substr(decode(string_agg(md5(i::text), ''), 'hex'), 1, bytes) FROM generate_series(0, bytes / 16) i $$;
CREATE PROCEDURE pg_temp.measure(name text, command text) LANGUAGE plpgsql AS $$
DECLARE
    least bigint;
    lsn pg_lsn;
    xid xid8;
    drawn bigint;
BEGIN
    SELECT last_value INTO drawn FROM idempotency_keys_token_seq;
    FOR i IN 1 .. 8 LOOP
        EXECUTE 'CHECKPOINT';
        COMMIT;
        lsn := pg_current_wal_insert_lsn();
        EXECUTE replace(command, '#', i::text);
        xid := coalesce(xid, pg_current_xact_id_if_assigned());
        COMMIT;
        least := LEAST(least, pg_current_wal_insert_lsn() - lsn);
    END LOOP;
    RAISE INFO '%: %, %, %', name, CASE least WHEN 0 THEN '0 bytes' ELSE 'WAL' END, CASE WHEN xid IS NULL THEN 'no transaction id' ELSE 'a transaction id' END,
        CASE WHEN last_value = drawn THEN 'no token' ELSE 'tokens' END FROM idempotency_keys_token_seq;
END $$;

SELECT count(*) FROM generate_series(1, 8) i,
    LATERAL (SELECT idem_complete('w-done-' || i, '{"n": 1}', token, http_status => 201, headers => '[["A","1"]]', body => 'body') FROM idem_claim('w-done-' || i, '{"n": 1}')) a,
    LATERAL (SELECT idem_complete('w-4 kB-' || i, to_jsonb(encode(pg_temp.noise(2048), 'hex')), token) FROM idem_claim('w-4 kB-' || i)) b,
    LATERAL (SELECT idem_complete('w-100 kB-' || i, token => token, body => pg_temp.noise(102400)) FROM idem_claim('w-100 kB-' || i)) c,
    LATERAL (SELECT idem_fail('w-failed-' || i, '1', token) FROM idem_claim('w-failed-' || i)) d,
    LATERAL (SELECT idem_fail('w-unknown-' || i, '1', token, disposition => 'unknown') FROM idem_claim('w-unknown-' || i)) e,
    LATERAL (SELECT idem_fail('w-retryable-' || i, '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('w-retryable-' || i)) f,
    LATERAL (SELECT outcome FROM idem_claim('w-open-' || i, '{"n": 1}')) g,
    LATERAL (SELECT idem_renew('w-held-' || i, token, '1 ms') FROM idem_claim('w-held-' || i, takeover => false)) h;
DO $$ BEGIN PERFORM pg_sleep(0.01); END $$;
-- Long results that share a page of the TOAST table with some that have gone
SELECT count(idem_complete(k, token => token, body => pg_temp.noise(3992))) FROM generate_series(1, 9) i, unnest(ARRAY['w-gone-' || i, 'w-stays-' || i]) k, idem_claim(k);
SELECT count(idem_forget('w-gone-' || i)) FROM generate_series(1, 9) i;

-- What idem_execute, idem_once and the batches are asked for again
SELECT count(*) FROM generate_series(1, 8) i, idem_execute('w-executed-' || i, 'SELECT pg_temp.noise(2048)', '{"n": 1}') a, idem_execute('w-raised-' || i, 'SELECT 1/0') b,
    LATERAL (SELECT idem_once('w-once-' || i)) c, LATERAL (SELECT idem_complete_many(array_agg(key ORDER BY ordinal), NULL, '{1,"\"two\""}') FROM idem_claim_many(ARRAY['w-batch-' || i, 'w-batch-too-' || i])) d;

-- That it would be noticed
CALL pg_temp.measure('a claim', $$SELECT idem_claim('w-new-#')$$);
CALL pg_temp.measure('once', $$SELECT idem_once('w-new-once-#')$$);
CALL pg_temp.measure('a batch with a new one', $$SELECT count(*) FROM idem_claim_many('{w-executed-#,w-new-batch-#}')$$);
CALL pg_temp.measure('a command', $$SELECT idem_execute('w-new-executed-#', 'SELECT 1')$$);

CALL pg_temp.measure('replay', $$SELECT idem_claim('w-done-#', '{"n": 1}')$$);
CALL pg_temp.measure('replay of 4 kB', $$SELECT idem_claim('w-4 kB-#')$$);
CALL pg_temp.measure('replay of 100 kB', $$SELECT idem_claim('w-100 kB-#')$$);
CALL pg_temp.measure('replay of 4 kB beside what has gone', $$SELECT idem_claim('w-stays-#')$$);
CALL pg_temp.measure('failed', $$SELECT idem_claim('w-failed-#')$$);
CALL pg_temp.measure('unknown', $$SELECT idem_claim('w-unknown-#')$$);
CALL pg_temp.measure('held', $$SELECT idem_claim('w-held-#')$$);
CALL pg_temp.measure('retryable', $$SELECT idem_claim('w-retryable-#')$$);
CALL pg_temp.measure('processing', $$SELECT idem_claim('w-open-#', '{"n": 1}')$$);
CALL pg_temp.measure('processing, after a wait', $$SELECT idem_claim('w-open-#', '{"n": 1}', wait => '20 ms')$$);
CALL pg_temp.measure('mismatch', $$SELECT idem_claim('w-done-#', '{"n": 2}')$$);
CALL pg_temp.measure('mismatch with an open claim', $$SELECT idem_claim('w-open-#', '{"n": 2}', wait => '1 hour')$$);
CALL pg_temp.measure('a command''s replay', $$SELECT idem_execute('w-executed-#', 'SELECT 1', '{"n": 1}')$$);
CALL pg_temp.measure('a failed command''s replay', $$SELECT idem_execute('w-raised-#', 'SELECT 1')$$);
CALL pg_temp.measure('mismatch of a command', $$SELECT idem_execute('w-executed-#', 'SELECT 1', '{"n": 2}')$$);
CALL pg_temp.measure('a command on an open claim', $$SELECT idem_execute('w-open-#', 'SELECT 1', '{"n": 1}', wait => '0')$$);
CALL pg_temp.measure('once more', $$SELECT idem_once('w-once-#')$$);
CALL pg_temp.measure('once more, in a batch', $$SELECT count(*) FROM idem_once_many('{w-once-#,w-open-#,w-once-#}')$$);
CALL pg_temp.measure('a batch of replays', $$SELECT count(*) FROM idem_claim_many('{w-batch-too-#,w-open-#,w-batch-#,w-unknown-#,w-retryable-#,w-batch-#}')$$);
CALL pg_temp.measure('a batch of mismatches', $$SELECT count(*) FROM idem_claim_many('{w-batch-too-#,w-open-#,w-batch-#}', operation => 'other')$$);
CALL pg_temp.measure('idem_get', $$SELECT idem_get('w-done-#')$$);
CALL pg_temp.measure('idem_get of none', $$SELECT idem_get('w-none-#')$$);
CALL pg_temp.measure('idem_fingerprint', $$SELECT idem_fingerprint('{"n": #}')$$);

-- The same seen from the rows: none of them has moved or been locked, and the
-- sequence stands still, however often they are asked for.
CREATE TEMP TABLE rows_before AS SELECT key AS name, concat_ws(' ', ctid, xmin, xmax, k) AS version FROM idempotency_keys k WHERE key LIKE 'w-%';
SELECT last_value, is_called FROM idempotency_keys_token_seq \gset
SELECT outcome, count(*) FROM generate_series(1, 100) i, rows_before, idem_claim(name) WHERE name NOT LIKE 'w-new-%' GROUP BY outcome ORDER BY outcome;
SELECT outcome, count(*) FROM generate_series(1, 100) i, rows_before, idem_claim(name, operation => 'other') GROUP BY outcome;
SELECT outcome, count(*) FROM generate_series(1, 100) i, idem_claim_many((SELECT array_agg(name ORDER BY name DESC) FROM rows_before WHERE name NOT LIKE 'w-new-%')) GROUP BY outcome ORDER BY outcome;
SELECT outcome, replayed, count(*) FROM rows_before, idem_execute(name, 'SELECT 1/0', wait => '0') WHERE name NOT LIKE 'w-new-%' GROUP BY outcome, replayed ORDER BY outcome;
SELECT count(*) FROM idem_once_many((SELECT array_agg(name) FROM rows_before));
SELECT count(*) = (SELECT count(*) FROM rows_before) AS same_rows, bool_and(concat_ws(' ', k.ctid, k.xmin, k.xmax, k) = version) AS untouched
    FROM rows_before JOIN idempotency_keys k ON key = name;
SELECT last_value = :last_value AS no_token, is_called = :'is_called' AS as_before FROM idempotency_keys_token_seq;

-- Nor is a lock left, in a transaction that goes on.
BEGIN;
SELECT outcome FROM idem_claim('w-done-1', '{"n": 1}');
SELECT outcome FROM idem_claim('w-done-1', '{"n": 2}');
SELECT outcome FROM idem_claim('w-open-1', '{"n": 1}');
SELECT outcome FROM idem_execute('w-executed-1', 'SELECT 1', '{"n": 1}');
SELECT idem_once('w-once-1');
SELECT outcome FROM idem_claim_many('{w-open-1,w-batch-1}');
SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype IN ('advisory', 'tuple', 'transactionid') OR relation IN ('idempotency_keys'::regclass, 'idempotency_keys_pkey'::regclass));
SELECT pg_current_xact_id_if_assigned() AS xid;
COMMIT;

-- A completion that is told once more changes nothing either.
SELECT idem_complete('w-done-1', '{"n": 1}', token, http_status => 201, headers => '[["A","1"]]', body => 'body') FROM idempotency_keys WHERE key = 'w-done-1';
SELECT idem_complete_many('{w-batch-too-1,w-batch-1}', array_agg(token ORDER BY key DESC), '{"\"two\"",1}') FROM idempotency_keys WHERE key IN ('w-batch-1', 'w-batch-too-1');
SELECT bool_and(concat_ws(' ', k.ctid, k.xmin, k.xmax, k) = version) AS untouched FROM rows_before JOIN idempotency_keys k ON key = name;
