--
-- stats: what is counted, when, and what is not
--
-- Counters need the library to be preloaded; stats_1.out is without.
--
TRUNCATE idempotency_keys;
\pset null -
SELECT 'idempotency' <> ALL (string_to_array(replace(current_setting('shared_preload_libraries'), ' ', ''), ',')) AS absent \gset
\if :absent
SELECT claims FROM idempotency_stats;
SELECT idem_stats_reset();
SELECT outcome FROM idem_claim('works all the same');
SELECT completed + processing AS rows FROM idempotency_summary;
\quit
\endif

-- What was counted since the last call: the counters that are not zero
CREATE FUNCTION counted() RETURNS TABLE (counter text, n text) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
    SELECT key, value FROM idempotency_stats s, jsonb_each_text(to_jsonb(s))
     WHERE value <> '0' AND key NOT IN ('last_sweep_at', 'last_sweep_duration', 'stats_reset') ORDER BY key COLLATE "C";
    PERFORM idem_stats_reset();
END $$;
SELECT idem_stats_reset();

-- Nothing yet
SELECT * FROM counted();
SELECT last_sweep_at, last_sweep_duration, last_sweep_rows, last_sweep_error, stats_reset > clock_timestamp() - interval '1 h' AS reset
  FROM idempotency_stats;

-- A claim, and a completion; a second completion that is the same says false.
SELECT outcome, token AS t FROM idem_claim('k', '{"a": 1}') \gset
SELECT idem_complete('k', '1', token => :t);
SELECT idem_complete('k', '1', token => :t);
SELECT * FROM counted();

-- Replays of a success, mismatches
SELECT outcome FROM idem_claim('k', '{"a": 1}');
SELECT outcome FROM idem_claim('k');
SELECT outcome FROM idem_claim('k', '{"a": 2}');
SELECT * FROM counted();

-- Each disposition is a failure, and only the final one is replayed.
SELECT token AS t FROM idem_claim('final') \gset
SELECT idem_fail('final', token => :t);
SELECT outcome FROM idem_claim('final');
SELECT token AS t FROM idem_claim('unknown') \gset
SELECT idem_fail('unknown', token => :t, disposition => 'unknown');
SELECT outcome FROM idem_claim('unknown');
SELECT token AS t FROM idem_claim('retry') \gset
SELECT idem_fail('retry', token => :t, disposition => 'retry', retry_after => '1 h');
SELECT outcome FROM idem_claim('retry');
SELECT * FROM counted();

-- What an administrator settles is not counted.
SELECT idem_resolve('unknown', 'completed');
SELECT idem_resolve('retry', 'retryable');
SELECT idem_forget('k');
SELECT * FROM counted();

-- A take-over is a claim too, be it of a retryable key or of an ended lease.
SELECT outcome, attempt FROM idem_claim('retry');
SELECT outcome FROM idem_claim('lease', lease => '1 ms');
SELECT pg_sleep(0.01);
SELECT outcome, attempt FROM idem_claim('lease');
SELECT * FROM counted();

-- Processing: one a call, however long it waits and however often it looks
SELECT outcome FROM idem_claim('lease');
SELECT outcome FROM idem_claim('lease', wait => '100 ms');
SELECT * FROM counted();

-- Lost: also of the calls that raise it in a transaction, which then is aborted
SELECT token AS t FROM idem_claim('mine') \gset
SELECT * FROM counted();
\set VERBOSITY sqlstate
SELECT idem_complete('mine', token => :t + 1);
SELECT idem_fail('mine', token => :t + 1);
SELECT idem_renew('mine', :t + 1);
SELECT idem_checkpoint('mine', :t + 1, 'x');
SELECT idem_complete('mine');
SELECT idem_complete_many('{mine,lease}', ARRAY[:t + 1, 0]);
BEGIN;
SELECT outcome FROM idem_claim('with the loss');
SELECT idem_complete('mine', token => :t + 1);
ROLLBACK;
BEGIN;
SAVEPOINT s;
SELECT idem_complete('mine', token => :t + 1);
ROLLBACK TO s;
COMMIT;
-- Other errors are none of it.
SELECT idem_complete('never', token => 1);
SELECT idem_complete('final', '"x"', token => 1);
\set VERBOSITY default
SELECT * FROM counted();

-- At commit, and not before
BEGIN;
SELECT outcome FROM idem_claim('in a transaction');
SELECT outcome FROM idem_claim('final');
SELECT claims, replays FROM idempotency_stats;
SELECT idem_complete('in a transaction');
COMMIT;
SELECT * FROM counted();

-- Nothing of what was rolled back, answers that wrote nothing included
BEGIN;
SELECT outcome FROM idem_claim('rolled back');
SELECT outcome FROM idem_claim('final');
SELECT outcome FROM idem_claim('final', operation => 'other');
SELECT idem_once('once rolled back'), idem_once('final');
SELECT idem_sweep() >= 0 AS swept;
ROLLBACK;
SELECT * FROM counted();

-- Savepoints, at several levels: of these claims 1, 3, 4 and 7 stay.
BEGIN;
SELECT outcome FROM idem_claim('s1');
SAVEPOINT a;
SELECT outcome FROM idem_claim('s2');
ROLLBACK TO a;
SAVEPOINT b;
SELECT outcome FROM idem_claim('s3');
SAVEPOINT c;
SAVEPOINT d;
SELECT outcome FROM idem_claim('s4');
RELEASE d;
SAVEPOINT e;
SELECT outcome FROM idem_claim('s5');
SAVEPOINT f;
SELECT outcome FROM idem_claim('s6');
RELEASE f;
ROLLBACK TO e;
RELEASE c;
RELEASE b;
SAVEPOINT g;
SELECT outcome FROM idem_claim('s7');
COMMIT;
SELECT * FROM counted();
-- A savepoint whose parent has counted nothing, and then is rolled back
BEGIN;
SAVEPOINT a;
SAVEPOINT b;
SAVEPOINT c;
SELECT outcome FROM idem_claim('s8');
RELEASE c;
RELEASE b;
ROLLBACK TO a;
SELECT outcome FROM idem_claim('s9');
COMMIT;
SELECT * FROM counted();

-- idem_execute: a claim and a completion, or a failure; then replays
SELECT outcome, replayed FROM idem_execute('e', 'SELECT 1');
SELECT outcome, replayed FROM idem_execute('e', 'SELECT 1');
SELECT outcome, replayed FROM idem_execute('f', 'SELECT 1/0');
SELECT outcome, replayed FROM idem_execute('f', 'SELECT 1/0');
-- What a failed command has counted is undone with it.
SELECT outcome FROM idem_execute('g', $$SELECT outcome FROM idem_claim('within g'); SELECT 1/0$$);
SELECT * FROM counted();

-- idem_once: the first and the others, which are neither claims nor replays
SELECT idem_once('o1'), idem_once('o1'), idem_once('final');
SELECT * FROM idem_once_many('{o1,o2,o3,o2}');
SELECT * FROM counted();

-- Batches count a key each.
SELECT key, outcome FROM idem_claim_many('{m1,m2,m1,final,o1}');
SELECT * FROM counted();
SELECT idem_complete_many(array_agg(key), array_agg(token)) FROM idem_claim_many('{m3,m4}');
SELECT * FROM counted();

-- Reused soon after: an expired row claimed anew within its ttl from its expiry
INSERT INTO idempotency_keys (created_at, claimed_at, token, due_at, ttl, attempt, takeover, scope, key, operation, status, expires_at)
    SELECT t, t, 1, t, ttl, 1, true, '', k, '', 'completed', t
      FROM (VALUES ('soon', interval '10 min', clock_timestamp() - interval '9 min'),
                   ('soon once', '10 min', clock_timestamp() - interval '9 min'),
                   ('late', '10 min', clock_timestamp() - interval '11 min')) v(k, ttl, t);
SELECT outcome, attempt FROM idem_claim('soon');
SELECT idem_once('soon once');
SELECT outcome, attempt FROM idem_claim('late');
SELECT * FROM counted();

-- Sweeps by hand
CREATE FUNCTION add_expired(prefix text, n int) RETURNS void LANGUAGE sql AS $$
    INSERT INTO idempotency_keys (created_at, claimed_at, token, due_at, ttl, attempt, takeover, scope, key, operation, status, expires_at)
        SELECT t, t, 1, t, '1 s', 1, true, '', prefix || i, '', 'completed', t
          FROM generate_series(1, n) i, (SELECT clock_timestamp() - interval '1 d') v(t) $$;
SELECT idem_sweep() >= 0 AS swept;
SELECT idem_stats_reset();
SELECT add_expired('x', 25);
SELECT idem_sweep(10);
SELECT last_sweep_at > clock_timestamp() - interval '1 min' AS at, last_sweep_duration >= '0' AND last_sweep_duration < '1 min' AS duration
  FROM idempotency_stats;
SELECT * FROM counted();
CALL idem_sweep_all(batch_size => 4);
SELECT * FROM counted();
CALL idem_sweep_all();
SELECT * FROM counted();
-- in a savepoint that is rolled back
SELECT add_expired('x', 3);
BEGIN;
SAVEPOINT s;
SELECT idem_sweep();
ROLLBACK TO s;
SELECT idem_sweep(2);
COMMIT;
SELECT * FROM counted();

-- Rows that can't be deleted
CREATE TABLE refers (scope text DEFAULT '', key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
SELECT add_expired('y', 3);
INSERT INTO refers (key) VALUES ('y2'), ('y3');
\set VERBOSITY terse
SELECT idem_sweep();
SELECT * FROM counted();
CALL idem_sweep_all();
\set VERBOSITY default
SELECT * FROM counted();
DROP TABLE refers;
SELECT idem_sweep();
SELECT * FROM counted();

-- A run that an error ends is counted, with what it has done until then.
SELECT add_expired('z', 4);
SET statement_timeout = '1 s';
CALL idem_sweep_all(batch_size => 1, pause => '10 s');
RESET statement_timeout;
SELECT * FROM counted();

-- A reset at once, whatever becomes of the transaction
SELECT outcome FROM idem_claim('before');
BEGIN;
SELECT idem_stats_reset();
ROLLBACK;
SELECT claims, stats_reset > clock_timestamp() - interval '1 min' AS reset FROM idempotency_stats;

-- Read-only transactions count their answers too.
BEGIN READ ONLY;
SELECT outcome FROM idem_claim('final');
COMMIT;
SELECT * FROM counted();

-- A procedure that commits
DO $$
BEGIN
    PERFORM idem_claim('p1');
    COMMIT;
    PERFORM idem_claim('p2');
    ROLLBACK;
    PERFORM idem_claim('p3');
END $$;
SELECT * FROM counted();

DROP FUNCTION counted();
DROP FUNCTION add_expired(text, int);
TRUNCATE idempotency_keys;
