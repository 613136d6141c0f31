--
-- health: what is in the table, and what an administrator should see to
--
-- What needs the counters, and the worker's log lines: test/t/015_stats.pl.
--
TRUNCATE idempotency_keys;
\pset null -
LOAD 'idempotency';

CREATE FUNCTION add_rows(prefix text, n int, expired interval, status idem_status DEFAULT 'completed', lease interval DEFAULT NULL)
RETURNS void LANGUAGE sql AS $$
    INSERT INTO idempotency_keys (created_at, claimed_at, token, due_at, ttl, attempt, takeover, scope, key, operation, status, lease_until, expires_at, response)
        SELECT t, t, 1, t - expired, '1 d', 1, true, '', prefix || i, '', status, t - lease, t - expired, to_jsonb(repeat('x', 200))
          FROM generate_series(1, n) i, clock_timestamp() t $$;
CREATE FUNCTION health(what text) RETURNS TABLE (level text, value numeric, threshold numeric, message text) LANGUAGE sql AS $$
    SELECT level, value, threshold, message FROM idem_health() WHERE item = what $$;
CREATE FUNCTION summary() RETURNS TABLE (processing bigint, completed bigint, failed bigint, retryable bigint, unknown bigint, expired bigint) LANGUAGE sql AS $$
    SELECT processing, completed, failed, retryable, unknown, expired FROM idempotency_summary $$;

-- An empty table is well.
SELECT * FROM summary();
SELECT oldest_expired_age, table_bytes = pg_table_size('idempotency_keys') AS table, index_bytes = pg_indexes_size('idempotency_keys') AS indexes,
       total_bytes = pg_total_relation_size('idempotency_keys') AS total FROM idempotency_summary;
SELECT item FROM idem_health() WHERE item NOT IN ('sweep_failing', 'ttl_too_short') AND level <> 'ok';
SELECT array_agg(item) FROM idem_health();

-- The status that counts is the one it has now; what has expired counts apart.
SELECT outcome FROM idem_claim('processing');
SELECT outcome FROM idem_claim('lease ended', lease => '1 ms');
SELECT outcome FROM idem_claim('held', lease => '1 ms', takeover => false);
SELECT outcome FROM idem_claim('not held', takeover => false);
SELECT pg_sleep(0.01);
SELECT idem_complete(key, token => token) FROM (SELECT 'c' AS key, token FROM idem_claim('c')) c;
SELECT idem_fail(key, token => token) FROM (SELECT 'f' AS key, token FROM idem_claim('f')) c;
SELECT idem_fail(key, token => token, disposition => 'retry') FROM (SELECT 'r' AS key, token FROM idem_claim('r')) c;
SELECT idem_fail(key, token => token, disposition => 'unknown') FROM (SELECT 'u' AS key, token FROM idem_claim('u')) c;
SELECT idem_once('o');
SELECT add_rows('x', 3, '1 h');
SELECT add_rows('xx', 1, '2 h', 'processing', '3 h');
SELECT * FROM summary();
SELECT oldest_expired_age BETWEEN '2 h' AND '3 h' AS oldest FROM idempotency_summary;
-- What this transaction has done is there, what it has rolled back is not.
BEGIN;
SAVEPOINT s;
SELECT idem_once('o2');
SELECT completed FROM summary();
ROLLBACK TO s;
SELECT completed FROM summary();
COMMIT;

-- Backlog: above the threshold, not at it
SELECT * FROM health('backlog');
SET idempotency.health_backlog = 4;
SELECT * FROM health('backlog');
SET idempotency.health_backlog = 3;
SELECT * FROM health('backlog');
SET idempotency.health_backlog = -1;
SELECT * FROM health('backlog');
RESET idempotency.health_backlog;
SELECT idem_sweep();
SELECT * FROM health('backlog');
-- Rows that are swept and not vacuumed are none of it.
SET idempotency.health_backlog = 0;
SELECT level, value FROM health('backlog');
RESET idempotency.health_backlog;

-- Overdue: as long as something waits
SET idempotency.health_sweep_overdue = 0;
SELECT * FROM health('sweep_overdue');
SELECT add_rows('x', 1, '1 h');
SELECT pg_sleep(1.1);
SELECT level, value BETWEEN 1 AND 7200 AS value, threshold FROM health('sweep_overdue');
RESET idempotency.health_sweep_overdue;
SELECT level, threshold FROM health('sweep_overdue');
SET idempotency.health_sweep_overdue = '2 d';
SELECT level, threshold FROM health('sweep_overdue');
SET idempotency.health_sweep_overdue = -1;
SELECT level, threshold FROM health('sweep_overdue');
SET idempotency.health_sweep_overdue = 0;
SELECT idem_sweep();
SELECT * FROM health('sweep_overdue');
RESET idempotency.health_sweep_overdue;

-- Stuck claims: neither those whose lease runs, nor held or expired ones
SET idempotency.health_stuck_claims = 0;
SELECT * FROM health('stuck_claims');
SET idempotency.health_stuck_after = 0;
SELECT * FROM health('stuck_claims');
SELECT add_rows('s', 2, '-1 d', 'processing', '11 min');
SELECT * FROM health('stuck_claims');
RESET idempotency.health_stuck_after;
SELECT * FROM health('stuck_claims');
RESET idempotency.health_stuck_claims;
SELECT level FROM health('stuck_claims');

-- Held keys: settled as unknown, or a lease that ended with takeover => false
SELECT * FROM health('held_unknown');
SELECT idem_resolve('held', 'completed');
SELECT * FROM health('held_unknown');
SET idempotency.health_held_unknown = 1;
SELECT level, value, threshold FROM health('held_unknown');
RESET idempotency.health_held_unknown;
SELECT idem_resolve('u', 'failed');
SELECT * FROM health('held_unknown');

-- Age, against the server's limit, or the table's own that is lower
SELECT level, value < 1000000 AS value, threshold = 1.5 * current_setting('autovacuum_freeze_max_age')::int AS threshold FROM health('wraparound');
ALTER TABLE idempotency_keys SET (autovacuum_freeze_max_age = 100000);
SELECT level, threshold FROM health('wraparound');
ALTER TABLE idempotency_keys RESET (autovacuum_freeze_max_age);
SET idempotency.health_wraparound = 0;
SELECT idem_once('takes a transaction id');
SELECT level, value > 0 AS value, threshold FROM health('wraparound');
SET idempotency.health_wraparound = -1;
SELECT level, threshold FROM health('wraparound');
RESET idempotency.health_wraparound;

-- No window, no limit
SELECT * FROM health('window');

-- A large table is judged by a sample of its pages.
SELECT add_rows('l', 60000, '-1 d', 'processing', '1 h');
SELECT add_rows('e', 20000, '1 h');
SELECT level, value BETWEEN 50000 AND 70000 AS value, message ~ '^about ' AS about FROM health('stuck_claims');
SELECT level, value BETWEEN 15000 AND 25000 AS value, message ~ '^about ' AS about FROM health('backlog');
SET idempotency.health_backlog = 100;
SELECT level, value BETWEEN 15000 AND 25000 AS value, message ~ '^about ' AS about FROM health('backlog');
RESET idempotency.health_backlog;
-- The summary is exact.
SELECT processing, expired, (SELECT stuck FROM idempotency_summary) FROM summary();
SET idempotency.health_stuck_after = '100 d';
SELECT stuck FROM idempotency_summary;
RESET idempotency.health_stuck_after;

-- Growth: table and indexes against the rows in them, from a certain size on
SELECT level, value, threshold FROM health('growth');
SET idempotency.health_growth_from = '16MB';
SELECT level, value BETWEEN 100 AND 200 AS value, threshold FROM health('growth');
DELETE FROM idempotency_keys WHERE key LIKE 'l%' AND key NOT LIKE 'l%7';
DELETE FROM idempotency_keys WHERE key LIKE 'e%';
SELECT level, value > 400 AS value, threshold FROM health('growth');
-- The sample is another one each time.
SELECT count(DISTINCT value) > 1 AS varies FROM (SELECT value FROM health('stuck_claims') UNION SELECT value FROM health('stuck_claims')
    UNION SELECT value FROM health('stuck_claims') UNION SELECT value FROM health('stuck_claims') UNION SELECT value FROM health('stuck_claims')) s;
SET idempotency.health_growth = 100000;
SELECT level, threshold FROM health('growth');
SET idempotency.health_growth = -1;
SELECT level, threshold FROM health('growth');
RESET idempotency.health_growth;
-- A small table may be as empty as it likes.
DELETE FROM idempotency_keys;
VACUUM FULL idempotency_keys;
SELECT * FROM health('growth');
RESET idempotency.health_growth_from;

-- Without the index on due_at the sample has to do.
SELECT add_rows('x', 3, '1 h');
BEGIN;
DROP INDEX idempotency_keys_due_at_idx;
SET idempotency.health_backlog = 2;
SELECT level, value, threshold FROM health('backlog');
SELECT level FROM health('sweep_overdue');
ROLLBACK;
RESET idempotency.health_backlog;

-- The views are no obstacle to an alteration of the table.
BEGIN;
ALTER TABLE idempotency_keys DROP COLUMN note;
SELECT expired FROM idempotency_summary;
ROLLBACK;
BEGIN;
ALTER TABLE idempotency_keys ALTER COLUMN body TYPE text;
SELECT item FROM idem_health();
ROLLBACK;

-- Read-only transactions, and any isolation level
BEGIN READ ONLY ISOLATION LEVEL SERIALIZABLE;
SELECT expired FROM idempotency_summary;
SELECT level, value FROM health('backlog');
COMMIT;

-- Settings
SELECT name, setting, unit, context, vartype, min_val, max_val FROM pg_settings WHERE name LIKE 'idempotency.health%' ORDER BY name COLLATE "C";

-- For administrators; they see it without rights on the table.
CREATE ROLE regress_idem_health;
SET ROLE regress_idem_health;
\set VERBOSITY terse
SELECT expired FROM idempotency_summary;
SELECT claims >= 0 FROM idempotency_stats;
SELECT count(*) FROM idem_health();
SELECT idem_stats_reset();
RESET ROLE;
SELECT idem_grant('regress_idem_health');
SET ROLE regress_idem_health;
SELECT expired FROM idempotency_summary;
SELECT count(*) FROM idem_health();
RESET ROLE;
SELECT idem_grant('regress_idem_health', admin => true);
SET ROLE regress_idem_health;
SELECT expired FROM idempotency_summary;
SELECT count(*) FROM idem_health();
SELECT count(*) FROM idempotency_keys;
RESET ROLE;
SELECT idem_revoke('regress_idem_health');
SELECT has_table_privilege('regress_idem_health', 'idempotency_summary', 'SELECT') AS summary,
       has_table_privilege('regress_idem_health', 'idempotency_stats', 'SELECT') AS stats;
DROP ROLE regress_idem_health;

-- An instant that somebody wrote by hand is none.
TRUNCATE idempotency_keys;
SELECT add_rows('inf', 1, '1 h');
UPDATE idempotency_keys SET expires_at = '-infinity', due_at = '-infinity';
SELECT expired, oldest_expired_age FROM idempotency_summary;
SELECT level, value FROM health('sweep_overdue');
SELECT idem_sweep();
-- Held keys are counted by the index; without it nobody knows.
SELECT idem_fail('u', token => token, disposition => 'unknown') FROM idem_claim('u');
SELECT level, value FROM health('held_unknown');
DROP INDEX idempotency_keys_due_at_idx;
SELECT * FROM health('held_unknown');
CREATE INDEX idempotency_keys_due_at_idx ON idempotency_keys (due_at);
SELECT level, value FROM health('held_unknown');
DROP FUNCTION add_rows, health, summary;
TRUNCATE idempotency_keys;
