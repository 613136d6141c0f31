--
-- once: has this message been seen before?
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
SET statement_timeout = '20s';

CREATE TABLE inbox (message text);
CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

--
-- True once, false ever after
--
SELECT clock_timestamp() AS before \gset
SELECT idem_once('m1');
SELECT pg_temp.version_of('m1') AS version \gset
SELECT idem_once('m1');
SELECT idem_once('m1', ttl => '1 s'), idem_once('m1', '');
SELECT pg_temp.version_of('m1') = :'version' AS untouched;
-- A small row, settled from the start
SELECT scope, key, operation, status, attempt, checkpoint, state, http_status, headers, response, body, lease_until, created_at = completed_at AS at_once, expires_at - completed_at AS kept, expired,
       created_at BETWEEN :'before' AND clock_timestamp() AS now FROM idem_get('m1');
SELECT request_hash, takeover, retry_at, resolved_by, note, pg_column_size(k) < 150 AS small FROM idempotency_keys k;
-- Scopes, bytes, and the arguments by position
SELECT idem_once('m1', 'other'), idem_once('m1', 'other'), idem_once('m1', 'other '), idem_once('M1'), idem_once('m1 '), idem_once(E'm1\n');
SELECT idem_once('positional', 'other', '1 hour');
SELECT expires_at - completed_at AS kept FROM idem_get('positional', 'other');
SELECT key, idem_once(key) FROM unnest('{a,b,a,c,b,a}'::text[]) key;

--
-- In the consumer's transaction
--
BEGIN;
INSERT INTO inbox SELECT 'm2' WHERE idem_once('m2');
INSERT INTO inbox SELECT 'm2' WHERE idem_once('m2');
COMMIT;
INSERT INTO inbox SELECT 'm2' WHERE idem_once('m2');
SELECT count(*) FROM inbox;
-- Rolled back, it hasn't been seen.
BEGIN;
SELECT idem_once('m3'), idem_once('m3');
ROLLBACK;
SELECT count(*) FROM idem_get('m3');
SELECT idem_once('m3');
BEGIN;
SAVEPOINT a;
SELECT idem_once('m4'), idem_once('m4');
ROLLBACK TO a;
SELECT idem_once('m4'), idem_once('m4');
ROLLBACK TO a;
RELEASE a;
SAVEPOINT b;
SELECT idem_once('m4');
RELEASE b;
COMMIT;
SELECT idem_once('m4');
-- A handler that fails leaves the message for the next delivery.
CREATE PROCEDURE handle(message text, fail boolean) LANGUAGE plpgsql AS $$
BEGIN
    IF idem_once(message, 'inbox') THEN
        INSERT INTO inbox VALUES (message);
        IF fail THEN RAISE EXCEPTION 'handler failed' USING ERRCODE = 'ZZ001'; END IF;
    END IF;
END $$;
CALL handle('m5', true);
CALL handle('m5', false);
CALL handle('m5', true);
SELECT count(*) FROM inbox WHERE message = 'm5';
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_once('m6'), idem_once('m6'), idem_once('m5', 'inbox');
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_once('m6'), idem_once('m7');
COMMIT;

--
-- How long: ttl, then it is new again
--
SELECT idem_once('ttl', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT expired FROM idem_get('ttl');
SELECT token FROM idempotency_keys WHERE key = 'ttl' \gset
SELECT idem_once('ttl', ttl => '1 hour'), idem_once('ttl', ttl => '1 ms');
SELECT attempt, created_at = completed_at AS at_once, expires_at - completed_at AS kept FROM idem_get('ttl');
SELECT token > :token AS newer FROM idempotency_keys WHERE key = 'ttl';
SET idempotency.default_ttl = '2h';
SELECT idem_once('ttl-default'), idem_once('ttl-month', ttl => '1 month 1 day');
RESET idempotency.default_ttl;
SELECT key, extract(epoch FROM expires_at - completed_at)::int AS kept FROM unnest('{ttl-default,ttl-month}'::text[]) k, idem_get(k);
-- Neither a lease nor a take-over has anything to do with it.
SET idempotency.default_lease = '1ms';
SELECT idem_once('no lease');
CALL pg_temp.pause(0.01);
SELECT idem_once('no lease');
RESET idempotency.default_lease;
-- An expired claim, result or message makes room for any other.
SELECT idem_complete('expired', '"old"', token, ttl => '1 ms', http_status => 200, headers => '[]', body => 'x') FROM idem_claim('expired', '{"n": 1}', operation => 'op', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT idem_once('expired'), idem_once('expired');
SELECT operation, status, response, http_status, headers, body FROM idem_get('expired');
SELECT request_hash FROM idempotency_keys WHERE key = 'expired';
SELECT idem_once('to be claimed', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('to be claimed', '{"n": 1}', operation => 'op');

--
-- A key that somebody else has, in whatever state, is not new
--
SELECT outcome FROM idem_claim('processing', '{"n": 1}', operation => 'op');
SELECT idem_renew('ended', token, '1 ms') IS NOT NULL AS renewed FROM idem_claim('ended');
SELECT idem_renew('held', token, '1 ms') IS NOT NULL AS renewed FROM idem_claim('held', takeover => false);
SELECT idem_complete('completed', '"result"', token) FROM idem_claim('completed');
SELECT idem_fail('failed', '"error"', token) FROM idem_claim('failed');
SELECT idem_fail('retryable', token => token, disposition => 'retry') FROM idem_claim('retryable');
SELECT idem_fail('unknown', token => token, disposition => 'unknown') FROM idem_claim('unknown');
CALL pg_temp.pause(0.01);
SELECT idem_once(k) AS once, idem_once(k) AS again, status, attempt FROM unnest('{processing,ended,held,completed,failed,retryable,unknown}'::text[]) k, idem_get(k);
-- Also a claim of this very transaction
BEGIN;
SELECT outcome FROM idem_claim('own');
SELECT idem_once('own');
SELECT idem_complete('own', '1');
SELECT idem_once('own');
COMMIT;

-- To the other calls it is a completed key.
SELECT outcome, token, attempt, response, replayed FROM idem_execute('m1', 'SELECT 1');
SELECT outcome, token, attempt, response, completed_at IS NOT NULL AS completed FROM idem_claim('m1');
SELECT outcome FROM idem_claim('m1', '{"n": 1}');
SELECT outcome FROM idem_claim('m1', operation => 'op');
SELECT idem_complete('m1');
SELECT idem_complete('m1', token => token) FROM idempotency_keys WHERE key = 'm1' AND scope = '';
SELECT idem_complete('m1', '1', token => token) FROM idempotency_keys WHERE key = 'm1' AND scope = '';
SELECT idem_fail('m1', token => token) FROM idempotency_keys WHERE key = 'm1' AND scope = '';
BEGIN;
SELECT idem_once('own once');
SELECT outcome FROM idem_claim('own once', wait => '1 hour');
SAVEPOINT a;
SELECT idem_complete('own once', '1');
ROLLBACK TO a;
SELECT idem_fail('own once', '1');
ROLLBACK;
-- Forgotten, it is new.
SELECT idem_forget('m1'), idem_once('m1'), idem_once('m1');

--
-- idem_once_many
--
SELECT * FROM idem_once_many('{z,a,m2,y,a,z,b}');
SELECT * FROM idem_once_many('{z,a,m2,y,a,z,b}');
SELECT * FROM idem_once_many('{c,z,d,a,B,b,C}');
SELECT * FROM idem_once_many('{}');
SELECT * FROM idem_once_many('{z}', 'other');
SELECT * FROM idem_once_many('{z,y}', 'other');
SELECT * FROM idem_once_many('{other}', 'other', '1 hour');
SELECT expires_at - completed_at AS kept, status FROM idem_get('other', 'other');
SELECT key, first FROM unnest('{e,a,f}'::text[]) key LEFT JOIN idem_once_many('{e,a,f}') first ON first = key ORDER BY key;
SELECT idem_once_many('{g,h,g}');
SELECT * FROM idem_once_many('{ended,processing,held,i,unknown,retryable}');
SELECT * FROM idem_once_many('[3:5]={j,k,l}');
SELECT * FROM idem_once_many('{{n,m},{m,o}}');
SELECT count(*), count(DISTINCT k) FROM idem_once_many((SELECT array_agg('bulk-' || i % 1000) FROM generate_series(1, 3000) i)) k;
SELECT count(*) FROM idem_once_many((SELECT array_agg('bulk-' || i) FROM generate_series(990, 1009) i));
SELECT array_agg(k) = (SELECT array_agg('order-' || i * 7919 % 1000) FROM generate_series(1, 1000) i) AS in_input_order FROM idem_once_many((SELECT array_agg('order-' || i * 7919 % 1000) FROM generate_series(1, 1000) i)) k;
-- Within a transaction, and rolled back
BEGIN;
SELECT idem_once('t1');
SELECT * FROM idem_once_many('{t2,t1,t3}');
SAVEPOINT a;
SELECT * FROM idem_once_many('{t3,t4}');
ROLLBACK TO a;
SELECT * FROM idem_once_many('{t4,t3}');
COMMIT;
INSERT INTO inbox SELECT * FROM idem_once_many('{t5,t1,t6}');
SELECT message FROM inbox WHERE message LIKE 't_';
-- Expired ones
SELECT count(*) FROM idem_once_many('{x1,x2}', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT * FROM idem_once_many('{x2,x1,x2}');
-- Where it isn't called in FROM
CREATE FUNCTION pg_temp.first(keys text[]) RETURNS SETOF text LANGUAGE sql AS 'SELECT idem_once_many(keys)';
SELECT * FROM pg_temp.first('{f1,f2,f1}');
SELECT 1 WHERE idem_once_many('{f1}') = 'f1';
DO $$
DECLARE
    k text;
BEGIN
    FOR k IN SELECT * FROM idem_once_many('{p1,f1,p2}') LOOP
        IF idem_once(k) THEN RAISE EXCEPTION 'wrong'; END IF;
        INSERT INTO inbox VALUES (k);
    END LOOP;
END $$;
SELECT message FROM inbox WHERE message LIKE 'p_';

--
-- Read-only: what is known is answered
--
BEGIN READ ONLY;
SELECT idem_once('m1'), idem_once('processing');
SELECT * FROM idem_once_many('{m2,m3,m2}');
SAVEPOINT a;
SELECT idem_once('new');
ROLLBACK TO a;
SELECT * FROM idem_once_many('{m2,new}');
ROLLBACK TO a;
\set VERBOSITY default
SELECT idem_once('new');
ROLLBACK TO a;
SELECT * FROM idem_once_many('{m2,new}');
ROLLBACK;

--
-- Bad input
--
SELECT idem_once(NULL);
SELECT * FROM idem_once_many(NULL);
SELECT * FROM idem_once_many('{bad,NULL,bad}');
SELECT * FROM idem_once_many('{bad,bad,""}');
SELECT * FROM idem_once_many(ARRAY['bad', repeat('k', 256)]);
\set VERBOSITY sqlstate
SELECT idem_once('');
SELECT idem_once(repeat('k', 256));
SELECT idem_once('bad', NULL);
SELECT idem_once('bad', repeat('s', 256));
SELECT idem_once('bad', ttl => '0');
SELECT idem_once('bad', ttl => '-1 s');
SELECT idem_once('bad', ttl => '178000000 years');
SELECT * FROM idem_once_many('{bad}', NULL);
SELECT * FROM idem_once_many('{bad}', repeat('s', 256));
SELECT * FROM idem_once_many('{bad}', ttl => '0');
SELECT * FROM idem_once_many('{}', ttl => '-1 s');
SELECT * FROM idem_once_many('{}', NULL);
SELECT count(*) FROM idempotency_keys WHERE key = 'bad';
SELECT idem_once('m1', ttl => '0');
-- The longest there are
SELECT idem_once(repeat(E'\U0001f600', 255), repeat(E'\u20ac', 255)), idem_once(repeat(E'\U0001f600', 255), repeat(E'\u20ac', 255));

DROP PROCEDURE handle;
DROP TABLE inbox;
