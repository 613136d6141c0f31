--
-- sweep: what has expired goes, and nothing else
--
TRUNCATE idempotency_keys;
\pset null -
\set SHOW_CONTEXT never
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;
CREATE VIEW pg_temp.left_over AS SELECT coalesce(string_agg(key, ' ' ORDER BY key), '') AS keys FROM idempotency_keys;
-- Sweeps until the keys are gone, as many as there are, whose time may not have come.
CREATE PROCEDURE pg_temp.sweep_until_gone(VARIADIC keys text[]) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. 2000 LOOP
        PERFORM idem_sweep();
        EXIT WHEN NOT EXISTS (SELECT FROM idempotency_keys k WHERE k.key = ANY (keys));
        IF i = 2000 THEN RAISE 'still there'; END IF;
        PERFORM pg_sleep(0.01);
    END LOOP;
END $$;

--
-- Each status, held or live or expired
--
CREATE FUNCTION pg_temp.claim(key text, ttl interval = '1 ms', lease interval = '1 hour', takeover boolean = true) RETURNS bigint LANGUAGE sql
    AS $$ SELECT c.token FROM idem_claim(key, ttl => ttl, lease => lease, takeover => takeover) c $$;
SELECT pg_temp.claim('processing-live', ttl => '1 hour') > 0 AS t, pg_temp.claim('processing-leased') > 0 AS t,
       pg_temp.claim('processing-ended', lease => '1 ms') > 0 AS t, pg_temp.claim('held-lease', lease => '1 ms', takeover => false) > 0 AS t;
SELECT idem_complete('completed-live', NULL, pg_temp.claim('completed-live', '1 hour')), idem_complete('completed', '1', pg_temp.claim('completed'), ttl => '1 ms'),
       idem_fail('failed-live', NULL, pg_temp.claim('failed-live'), ttl => '1 hour'), idem_fail('failed', NULL, pg_temp.claim('failed')),
       idem_fail('retryable-live', NULL, pg_temp.claim('retryable-live'), disposition => 'retry', retry_after => '1 hour'),
       idem_fail('retryable', NULL, pg_temp.claim('retryable'), disposition => 'retry', retry_after => '1 ms'),
       idem_fail('unknown', NULL, pg_temp.claim('unknown'), disposition => 'unknown', ttl => '1 ms'),
       idem_once('once-live', ttl => '1 hour'), idem_once('once', ttl => '1 ms');
SELECT outcome FROM idem_execute('executed', 'SELECT 1', ttl => '1 ms');
SELECT outcome FROM idem_execute('executed-failed', 'SELECT 1/0', ttl => '1 ms');
CALL pg_temp.pause(0.02);
SELECT array_agg(key ORDER BY key) FROM idempotency_keys k WHERE expires_at <= clock_timestamp();
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;
SELECT idem_sweep();
-- What was held is so no longer.
SELECT idem_resolve('unknown', 'completed'), idem_resolve('held-lease', 'failed');
CALL pg_temp.sweep_until_gone('unknown', 'held-lease');
SELECT keys FROM pg_temp.left_over;
-- A swept key is as any absent one.
SELECT outcome, attempt, checkpoint, response FROM idem_claim('completed');
SELECT idem_complete('failed', '1', 1);

--
-- due_at leads to a row in time, whatever has moved its end
--
TRUNCATE idempotency_keys;
CREATE VIEW pg_temp.late AS SELECT key, due_at, expires_at FROM idempotency_keys WHERE due_at > expires_at;
-- later and earlier: by the ttl of a completion or failure, a lease, a checkpoint, a resolution, a new claim
SELECT count(idem_complete('done-' || n, NULL, pg_temp.claim('done-' || n, '1 hour'), ttl => make_interval(secs => n * 0.001))) FROM generate_series(1, 20) n;
SELECT count(idem_complete('done-later-' || n, NULL, pg_temp.claim('done-later-' || n), ttl => make_interval(mins => n * 20))) FROM generate_series(1, 20) n;
SELECT count(idem_fail('failed-' || n, NULL, pg_temp.claim('failed-' || n, '1 hour'), ttl => make_interval(secs => n * 0.001))) FROM generate_series(1, 20) n;
SELECT count(idem_fail('retry-' || n, NULL, pg_temp.claim('retry-' || n), disposition => 'retry', retry_after => make_interval(mins => n * 20))) FROM generate_series(1, 20) n;
SELECT count(idem_fail('held-' || n, NULL, pg_temp.claim('held-' || n), disposition => 'unknown')) FROM generate_series(1, 20) n;
SELECT count(idem_resolve('held-' || n, 'completed')) FROM generate_series(1, 10) n;
SELECT count(idem_renew('renewed-' || n, pg_temp.claim('renewed-' || n, '1 ms'), make_interval(secs => 0.001 * n))) FROM generate_series(1, 20) n;
SELECT count(idem_renew('renewed-later-' || n, pg_temp.claim('renewed-later-' || n, '1 ms'), make_interval(mins => n * 20))) FROM generate_series(1, 20) n;
SELECT count(idem_checkpoint('noted-' || n, pg_temp.claim('noted-' || n, '1 ms'), 'x', lease => make_interval(secs => 0.001 * n))) FROM generate_series(1, 20) n;
SELECT count(idem_complete('no-takeover-' || n, NULL, pg_temp.claim('no-takeover-' || n, takeover => false))) FROM generate_series(1, 10) n;
SELECT count(pg_temp.claim('ancient-' || n, '200000 years')) FROM generate_series(1, 2) n;
CALL pg_temp.pause(0.03);
SELECT count(*) AS claimed_again FROM generate_series(1, 5) n, idem_claim('done-' || n, ttl => '1 day') WHERE outcome = 'claimed';
SELECT count(*) AS claimed_again FROM generate_series(6, 10) n, idem_claim('done-' || n, ttl => '1 ms', lease => '1 ms') WHERE outcome = 'claimed';
SELECT * FROM pg_temp.late;
SELECT count(*) AS early FROM idempotency_keys WHERE due_at < expires_at - interval '61 min' AND expires_at < 'infinity';
CALL pg_temp.pause(0.02);
CREATE TEMP TABLE live AS SELECT key FROM idempotency_keys WHERE expires_at > clock_timestamp() + interval '1 minute';
SELECT regexp_replace(key, '-\d+$', '') COLLATE "C" AS kind, count(*) FROM live GROUP BY 1 ORDER BY kind;
CALL idem_sweep_all();
SELECT count(*) AS wrong FROM live FULL JOIN idempotency_keys k USING (key) WHERE live.key IS NULL OR k.key IS NULL;

-- A completion does not move due_at, so it is a heap-only update.
TRUNCATE idempotency_keys;
CREATE FUNCTION pg_temp.updates(OUT updates bigint, OUT hot bigint) LANGUAGE sql AS
    $$ SELECT pg_stat_get_xact_tuples_updated('idempotency_keys'::regclass), pg_stat_get_xact_tuples_hot_updated('idempotency_keys'::regclass) $$;
BEGIN;
SELECT updates, hot FROM pg_temp.updates() \gset
SELECT count(idem_complete('hot-' || n, '{"n": 1}', c.token, http_status => 201)) FROM generate_series(1, 5) n, idem_claim('hot-' || n) c;
SELECT count(idem_renew('renew-' || n, c.token, '10 min')) FROM generate_series(1, 5) n, idem_claim('renew-' || n) c;
SELECT u.updates - :updates AS updates, u.hot - :hot AS hot FROM pg_temp.updates() u;
COMMIT;

--
-- batch_size
--
TRUNCATE idempotency_keys;
SELECT count(idem_once('b-' || n, ttl => '1 ms')) FROM generate_series(1, 25) n;
SELECT idem_once('stays');
CALL pg_temp.pause(0.02);
SELECT idem_sweep(10), idem_sweep(batch_size => 7);
SELECT idem_sweep(NULL), idem_sweep();
SELECT keys FROM pg_temp.left_over;
SELECT count(idem_once('b-' || n, ttl => '1 ms')) FROM generate_series(1, 25) n;
CALL pg_temp.pause(0.02);
SET idempotency.sweep_batch_size = 10;
SELECT idem_sweep(), idem_sweep(NULL), idem_sweep(1000), idem_sweep();
RESET idempotency.sweep_batch_size;

-- The oldest go first.
SELECT idem_once('x-' || n, ttl => '1 ms') FROM generate_series(3, 1, -1) n, pg_sleep(0.02);
CALL pg_temp.pause(0.02);
SELECT idem_sweep(1);
SELECT keys FROM pg_temp.left_over;

-- What it deleted is back after a rollback; what it finds is seen as it is now.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT keys FROM pg_temp.left_over;
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SAVEPOINT a;
SELECT idem_sweep();
ROLLBACK TO a;
SELECT keys FROM pg_temp.left_over;
SELECT idem_sweep();
COMMIT;
SELECT keys FROM pg_temp.left_over;

-- In its own transaction
BEGIN;
SELECT idem_once('own', ttl => '1 us');
SELECT outcome FROM idem_claim('own-claim', ttl => '1 ms', lease => '1 ms');
CALL pg_temp.pause(0.02);
SELECT idem_sweep();
SELECT outcome, attempt FROM idem_claim('own-claim');
SELECT idem_complete('own-claim');
COMMIT;
SELECT outcome FROM idem_claim('own-claim');

--
-- idem_sweep_all
--
TRUNCATE idempotency_keys;
CREATE FUNCTION pg_temp.fill() RETURNS bigint LANGUAGE sql AS $$ SELECT count(idem_once('b-' || n, ttl => '1 us')) FROM generate_series(1, 25) n $$;
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
CALL idem_sweep_all(batch_size => 10, max_batches => 1);
SELECT count(*) FROM idempotency_keys;
CALL idem_sweep_all(10, 1, '1 ms');
SELECT count(*) FROM idempotency_keys;
CALL idem_sweep_all(2, 2);
SELECT count(*) FROM idempotency_keys;
CALL idem_sweep_all();
CALL idem_sweep_all(NULL, NULL, NULL);
SELECT count(*) FROM idempotency_keys;
-- Each batch is a transaction of its own.
CREATE TABLE commits (xid xid8, key text);
CREATE FUNCTION note_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.commits VALUES (pg_current_xact_id(), OLD.key); RETURN NULL; END $$;
CREATE TRIGGER note AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION note_commit();
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
SET idempotency.sweep_batch_size = 4;
CALL idem_sweep_all();
RESET idempotency.sweep_batch_size;
SELECT count(*), count(DISTINCT key) FROM commits;
SELECT count(*) AS transactions, min(n), max(n) FROM (SELECT count(*) AS n FROM commits GROUP BY xid) b;
DROP TRIGGER note ON idempotency_keys;
-- The pause is between the batches.
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
SELECT clock_timestamp() AS start \gset
CALL idem_sweep_all(10, pause => '100 ms');
SELECT clock_timestamp() - :'start' >= '200 ms' AS two_pauses, count(*) FROM idempotency_keys;
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
SET idempotency.sweep_pause = '100 ms';
SELECT clock_timestamp() AS start \gset
CALL idem_sweep_all(10);
SELECT clock_timestamp() - :'start' >= '200 ms' AS two_pauses, count(*) FROM idempotency_keys;
RESET idempotency.sweep_pause;

--
-- Bad input
--
SELECT idem_sweep(0);
SELECT idem_sweep(-1);
CALL idem_sweep_all(0);
CALL idem_sweep_all(-2147483648);
CALL idem_sweep_all(max_batches => 0);
CALL idem_sweep_all(pause => '-1 s');
SELECT idem_sweep(2147483647);
CALL idem_sweep_all(2147483647, 2147483647, '0');
\set VERBOSITY sqlstate
SET idempotency.sweep_batch_size = 0;
SET idempotency.sweep_batch_size = 1000001;
SET idempotency.sweep_pause = -1;
SET idempotency.sweep_pause = '2 h';
\set VERBOSITY default
SELECT name, setting, unit, min_val, max_val, context FROM pg_settings WHERE name IN ('idempotency.sweep_batch_size', 'idempotency.sweep_pause') ORDER BY 1;

--
-- Where it can't write or commit
--
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
BEGIN READ ONLY;
SELECT idem_sweep();
ROLLBACK;
SET default_transaction_read_only = on;
CALL idem_sweep_all();
RESET default_transaction_read_only;
BEGIN;
CALL idem_sweep_all();
ROLLBACK;
CREATE FUNCTION pg_temp.sweep() RETURNS void LANGUAGE plpgsql AS $$ BEGIN CALL idem_sweep_all(); END $$;
SELECT pg_temp.sweep();
CREATE FUNCTION pg_temp.sweep_sql() RETURNS void LANGUAGE sql AS $$ CALL idem_sweep_all() $$;
SELECT pg_temp.sweep_sql();
BEGIN;
DO $$ BEGIN CALL idem_sweep_all(); END $$;
ROLLBACK;
DO $$ BEGIN BEGIN CALL idem_sweep_all(); EXCEPTION WHEN invalid_transaction_termination THEN RAISE NOTICE 'refused: %', SQLERRM; END; END $$;
SELECT idem_sweep_all();
SELECT count(*) FROM idempotency_keys;
-- In a DO or a procedure that is no transaction block it may commit.
DO $$ BEGIN CALL idem_sweep_all(10); END $$;
SELECT count(*) FROM idempotency_keys;

--
-- Rows written by hand
--
CREATE FUNCTION pg_temp.insert_row(key text, expires_at timestamptz, due_at timestamptz = NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO idempotency_keys (created_at, claimed_at, token, ttl, attempt, takeover, scope, key, operation, status, expires_at)
        VALUES (now(), now(), 1, '1 day', 1, true, '', key, '', 'completed', expires_at);
    IF due_at IS NOT NULL THEN
        UPDATE idempotency_keys k SET due_at = insert_row.due_at WHERE k.key = insert_row.key;
    END IF;
END $$;
SELECT pg_temp.insert_row('hand-expired', now() - interval '1 day'), pg_temp.insert_row('hand-live', now() + interval '1 day'),
       pg_temp.insert_row('hand-infinite', 'infinity'), pg_temp.insert_row('hand-ancient', '-infinity', '4713-01-01 BC');
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;
UPDATE idempotency_keys SET expires_at = now() WHERE key = 'hand-infinite';
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;

-- One that has deleted nothing leaves no lock.
BEGIN;
SELECT idem_sweep();
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND relation::regclass::text ~ 'idempotency_keys|pg_toast';
COMMIT;

--
-- What refers to a key
--
TRUNCATE idempotency_keys;
CREATE TABLE payment (scope text COLLATE "C" DEFAULT '', key text COLLATE "C", FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
INSERT INTO payment (key) VALUES ('b-1'), ('b-13'), ('b-25');
SELECT idem_sweep(10);
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;
CALL idem_sweep_all(1);
-- a batch tries so many rows and not more, and the next one goes on behind them
SELECT idem_once('z', ttl => '1 us');
CALL pg_temp.pause(0.02);
CALL idem_sweep_all(2, max_batches => 1);
SELECT keys FROM pg_temp.left_over;
CALL idem_sweep_all(2, max_batches => 2);
SELECT keys FROM pg_temp.left_over;
SELECT outcome FROM idem_claim('b-13');
ALTER TABLE payment DROP CONSTRAINT payment_scope_key_fkey;
ALTER TABLE payment ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE;
SELECT idem_sweep();
SELECT key FROM payment;
-- One that is checked when the transaction ends
ALTER TABLE payment DROP CONSTRAINT payment_scope_key_fkey;
ALTER TABLE payment ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys DEFERRABLE INITIALLY DEFERRED;
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
INSERT INTO payment (key) VALUES ('b-7');
CALL idem_sweep_all(3);
SELECT keys FROM pg_temp.left_over;
BEGIN;
SELECT idem_sweep();
DELETE FROM payment;
SELECT idem_sweep();
SET CONSTRAINTS ALL IMMEDIATE;
SELECT idem_sweep();
COMMIT;
SELECT keys FROM pg_temp.left_over;
DROP TABLE payment;

-- Triggers: one that sees, one that refuses, one that breaks off
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.key = 'b-5' THEN RAISE serialization_failure; END IF;
    IF OLD.key = 'b-7' THEN RAISE EXCEPTION 'not this one'; END IF;
    IF OLD.key = 'b-8' THEN RAISE query_canceled; END IF;
    INSERT INTO public.commits VALUES (NULL, concat_ws(' ', OLD.key, current_user = 'regress_idem_owner', current_setting('search_path'), current_setting('lock_timeout')));
    RETURN NULL;
END $$;
TRUNCATE idempotency_keys, commits;
CREATE ROLE regress_idem_owner;
CREATE TRIGGER refuse AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION refuse();
SELECT idem_once('b-' || n, ttl => '1 us') FROM generate_series(5, 7) n;
SELECT idem_once('b-9', ttl => '1 us');
CALL pg_temp.pause(0.02);
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;
SELECT key FROM commits ORDER BY key;
SELECT current_setting('lock_timeout') AS lock_timeout;
SELECT idem_once('b-8', ttl => '1 us');
CALL pg_temp.pause(0.02);
SELECT idem_sweep();
SELECT current_setting('lock_timeout') AS lock_timeout;
DROP TRIGGER refuse ON idempotency_keys;
DROP ROLE regress_idem_owner;
SELECT idem_sweep();
-- An index with more columns keeps another order; the extension's own is the one.
TRUNCATE idempotency_keys;
CREATE INDEX regress_idem_more ON idempotency_keys (due_at, token DESC);
SELECT count(*) FROM idem_once_many(ARRAY(SELECT 'm' || n FROM generate_series(1, 300) n), ttl => '1 us');
CALL pg_temp.pause(0.02);
CALL idem_sweep_all(10);
SELECT keys FROM pg_temp.left_over;
DROP INDEX regress_idem_more;
-- what a trigger does to the table and is undone with the row's error
TRUNCATE idempotency_keys, commits;
CREATE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.key = 'b-1' THEN DROP TRIGGER see ON public.idempotency_keys; RAISE EXCEPTION 'undone'; END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.commits VALUES (NULL, OLD.key); RETURN NULL; END $$;
CREATE TRIGGER meddle AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION meddle();
CREATE TRIGGER see AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION see();
SELECT idem_once('b-' || n, ttl => '1 us') FROM generate_series(1, 3) n;
CALL pg_temp.pause(0.02);
SELECT idem_sweep();
SELECT keys FROM pg_temp.left_over;
SELECT key FROM commits ORDER BY key;
DROP TRIGGER meddle ON idempotency_keys;
DROP TRIGGER see ON idempotency_keys;
TRUNCATE idempotency_keys, commits;
-- many of them, in several batches
ALTER TABLE idempotency_keys ADD CONSTRAINT small CHECK (attempt < 1000);
SELECT count(idem_once('b-' || n, ttl => '1 us')) FROM generate_series(1, 2500) n;
CALL pg_temp.pause(0.02);
CALL idem_sweep_all(100);
SELECT count(*) FROM idempotency_keys;
ALTER TABLE idempotency_keys DROP CONSTRAINT small;

--
-- A table that was altered
--
BEGIN;
DROP INDEX idempotency_keys_due_at_idx;
SAVEPOINT a;
SELECT idem_sweep();
ROLLBACK TO a;
SELECT outcome FROM idem_claim('without');
CREATE INDEX other ON idempotency_keys (due_at) INCLUDE (scope);
SELECT idem_sweep();
ROLLBACK;
BEGIN;
DROP INDEX idempotency_keys_due_at_idx;
CREATE INDEX other ON idempotency_keys (due_at) WHERE due_at < 'infinity';
SELECT idem_sweep();
ROLLBACK;
BEGIN;
CREATE RULE r AS ON DELETE TO idempotency_keys DO INSTEAD NOTHING;
SELECT idem_sweep();
ROLLBACK;
BEGIN;
ALTER TABLE idempotency_keys RENAME due_at TO due;
SELECT idem_sweep();
ROLLBACK;
ALTER TABLE idempotency_keys RENAME due_at TO due;
CALL idem_sweep_all();
ALTER TABLE idempotency_keys RENAME due TO due_at;
CALL idem_sweep_all();

--
-- Privileges
--
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_admin;
SELECT idem_grant('regress_idem_app'), idem_grant('regress_idem_admin', admin => true);
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
SET ROLE regress_idem_app;
SELECT idem_sweep();
CALL idem_sweep_all();
SET ROLE regress_idem_admin;
SELECT idem_sweep(10);
CALL idem_sweep_all();
RESET ROLE;
SELECT count(*) FROM idempotency_keys;
-- Row security, the scope that a role is confined to, and search_path don't come into it.
ALTER TABLE idempotency_keys ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
SELECT pg_temp.fill();
CALL pg_temp.pause(0.02);
CREATE TEMP TABLE idempotency_keys (key text);
SET idempotency.scope = 'other';
SET ROLE regress_idem_admin;
SET search_path = pg_temp, public;
SELECT idem_sweep();
RESET ROLE;
RESET search_path;
RESET idempotency.scope;
DROP TABLE pg_temp.idempotency_keys CASCADE;
ALTER TABLE idempotency_keys DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;
SELECT idem_revoke('regress_idem_admin');
SET ROLE regress_idem_admin;
SELECT idem_sweep();
RESET ROLE;
REVOKE ALL ON SCHEMA public FROM regress_idem_app, regress_idem_admin;
SELECT idem_revoke('regress_idem_app');
DROP ROLE regress_idem_app, regress_idem_admin;

-- Where pg_cron is not; on a server that has it in test/t/012_pg_cron.pl.
SELECT idem_schedule(NULL);
DROP TABLE commits;
DROP FUNCTION refuse, note_commit;
TRUNCATE idempotency_keys;
