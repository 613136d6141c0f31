--
-- claim: every outcome of idem_claim, what its row shows, and their order
--
TRUNCATE idempotency_keys;
\pset null -
\set shown 'outcome, token IS NOT NULL AS token, attempt, http_status, headers, response, body, checkpoint, state, created_at IS NOT NULL AS created, completed_at IS NOT NULL AS completed, expires_at IS NOT NULL AS expires, retry_after > \'0\' AS retry'

-- What a row is, to see that a call has left it alone.
CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

--
-- claimed
--
SELECT clock_timestamp() AS before \gset
SELECT :shown FROM idem_claim('claim-new', '{"amount": 10}', operation => 'charge');
SELECT created_at BETWEEN :'before' AND clock_timestamp() AS now,
       expires_at - created_at AS ttl, lease_until - created_at AS lease
    FROM idem_get('claim-new');

-- The arguments by position, and the clock of the call, not of the transaction.
BEGIN;
CALL pg_temp.pause(0.01);
SELECT :shown, created_at > now() AS later, expires_at - created_at AS ttl
    FROM idem_claim('claim-args', '{}', 'shop', 'refund', '\x01', '2 days', '1 hour', '0', true);
COMMIT;
SELECT scope, key, operation, lease_until - created_at AS lease FROM idem_get('claim-args', 'shop');
SELECT request_hash FROM idempotency_keys WHERE key = 'claim-args';

-- The row lives as long as its lease, however short the ttl.
SELECT expires_at - created_at AS ttl FROM idem_claim('claim-short', ttl => '1 s', lease => '1 hour');

--
-- processing
--
SELECT pg_temp.version_of('claim-new') AS version, clock_timestamp() AS before \gset
SELECT :shown, retry_after <= lease_until - :'before' AS within_lease
    FROM idem_claim('claim-new', '{"amount": 10}', operation => 'charge') c,
         (SELECT lease_until FROM idem_get('claim-new')) g;
SELECT c.created_at = g.created_at AS same_start, c.expires_at = g.expires_at AS same_end
    FROM idem_claim('claim-new', '{"amount": 10}', operation => 'charge') c, idem_get('claim-new') g;
SELECT pg_temp.version_of('claim-new') = :'version' AS untouched;

-- However little of the lease is left, it is never less than what is said.
SELECT token FROM idem_claim('claim-ends', lease => '1 hour') \gset
SELECT lease_until FROM idem_renew('claim-ends', :token, '0.7 s') lease_until \gset
SELECT clock_timestamp() AS before \gset
SELECT outcome = 'claimed' OR retry_after > '0' AND retry_after <= :'lease_until'::timestamptz - :'before' AS right
    FROM idem_claim('claim-ends');

-- This very transaction holds it: the same, and no wait makes sense.
SET statement_timeout = '1min';
BEGIN;
SELECT outcome FROM idem_claim('claim-own');
SELECT :shown FROM idem_claim('claim-own', wait => '1 hour');
COMMIT;

-- Two callers within one statement.
SELECT name, c.outcome FROM unnest('{claim-a,claim-b,claim-a}'::text[]) name, idem_claim(name) c;

--
-- completed
--
BEGIN;
SELECT outcome FROM idem_claim('claim-done', '{"amount": 10}', operation => 'charge');
SELECT idem_complete('claim-done', '{"receipt": 7}', http_status => 201,
                     headers => '[["Location","/receipts/7"]]', body => '\x00ff');
COMMIT;
SELECT pg_temp.version_of('claim-done') AS version \gset
SELECT :shown FROM idem_claim('claim-done', '{"amount": 10}', operation => 'charge');
SELECT c.created_at = g.created_at AS created, c.completed_at = g.completed_at AS completed, c.expires_at = g.expires_at AS expires
    FROM idem_claim('claim-done', '{"amount": 10}', operation => 'charge', wait => '1 hour') c, idem_get('claim-done') g;
SELECT pg_temp.version_of('claim-done') = :'version' AS untouched;

--
-- failed
--
BEGIN;
SELECT outcome FROM idem_claim('claim-failed');
SELECT idem_fail('claim-failed', '{"code": "card_declined"}', http_status => 402,
                 headers => '[["X-Reason","declined"]]', body => 'declined');
COMMIT;
SELECT :shown FROM idem_claim('claim-failed', '{"amount": 10}');

--
-- unknown
--
BEGIN;
SELECT outcome FROM idem_claim('claim-unknown');
SELECT idem_fail('claim-unknown', '{"code": "timeout"}', disposition => 'unknown', http_status => 504);
COMMIT;
SELECT :shown, expires_at FROM idem_claim('claim-unknown', wait => '1 hour');

-- A claim that must not be taken over, and whose lease has ended.
SELECT token FROM idem_claim('claim-held', lease => '1 hour', takeover => false) \gset
SELECT outcome FROM idem_claim('claim-held');
SELECT idem_renew('claim-held', :token, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT :shown, expires_at FROM idem_claim('claim-held', wait => '1 hour');

--
-- retryable
--
BEGIN;
SELECT outcome FROM idem_claim('claim-retry');
SELECT idem_fail('claim-retry', '{"code": "busy"}', disposition => 'retry', retry_after => '1 hour', http_status => 503);
COMMIT;
SELECT :shown, retry_after BETWEEN '59 min' AND '1 hour' AS left FROM idem_claim('claim-retry');

-- Its time has come: claimed anew, with what the last owner left behind.
SELECT token AS token1, created_at AS created1 FROM idem_claim('claim-again', '{"n": 1}') \gset
SELECT idem_checkpoint('claim-again', :token1, 'paid', '{"payment": 5}') IS NOT NULL AS noted;
SELECT idem_fail('claim-again', '{"code": "busy"}', :token1, disposition => 'retry', http_status => 503,
                 headers => '[["Retry-After","0"]]', body => 'busy');
SELECT :shown, token > :token1 AS newer, created_at = :'created1' AS same_start, expires_at > :'created1'::timestamptz + '24 h' AS own_ttl
    FROM idem_claim('claim-again', '{"n": 1}');
SELECT :shown FROM idem_claim('claim-again', '{"n": 1}');

--
-- claimed: an ended lease is taken over
--
SELECT token AS token1, created_at AS created1 FROM idem_claim('claim-taken', '{"n": 1}', operation => 'ship') \gset
SELECT idem_checkpoint('claim-taken', :token1, 'packed', '[1, 2]', lease => '1 ms') IS NOT NULL AS noted;
CALL pg_temp.pause(0.01);
SELECT :shown, token > :token1 AS newer, created_at = :'created1' AS same_start
    FROM idem_claim('claim-taken', '{"n": 1}', operation => 'ship', lease => '1 hour');
SELECT :shown FROM idem_claim('claim-taken', '{"n": 1}', operation => 'ship');

--
-- mismatch: in every state, before all else, at once, and without a trace
--
SELECT idem_renew('mm-ended', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('mm-ended', '{"n": 1}', operation => 'pay');
SELECT idem_renew('mm-held', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('mm-held', '{"n": 1}', operation => 'pay', takeover => false);
SELECT outcome FROM idem_claim('mm-processing', '{"n": 1}', operation => 'pay');
SELECT idem_complete('mm-completed', '1', token) FROM idem_claim('mm-completed', '{"n": 1}', operation => 'pay');
SELECT idem_fail('mm-failed', '1', token) FROM idem_claim('mm-failed', '{"n": 1}', operation => 'pay');
SELECT idem_fail('mm-retryable', '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('mm-retryable', '{"n": 1}', operation => 'pay');
SELECT idem_fail('mm-due', '1', token, disposition => 'retry') FROM idem_claim('mm-due', '{"n": 1}', operation => 'pay');
SELECT idem_fail('mm-unknown', '1', token, disposition => 'unknown') FROM idem_claim('mm-unknown', '{"n": 1}', operation => 'pay');
CALL pg_temp.pause(0.01);
CREATE TEMP TABLE before_mismatch AS SELECT k.key, pg_temp.version_of(k.key) AS version FROM idempotency_keys k WHERE k.key LIKE 'mm-%';
SELECT last_value AS last_token FROM idempotency_keys_token_seq \gset
SELECT m.key, c.* FROM before_mismatch m, idem_claim(m.key, '{"n": 2}', operation => 'pay', wait => '1 hour') c ORDER BY m.key;
SELECT m.key, c.outcome AS other_operation, d.outcome AS no_operation, e.outcome AS other_hash
    FROM before_mismatch m,
         idem_claim(m.key, '{"n": 1}', operation => 'Pay', wait => '1 hour') c,
         idem_claim(m.key, wait => '1 hour') d,
         idem_claim(m.key, operation => 'pay', request_hash => '\x02', wait => '1 hour') e
    ORDER BY m.key;
SELECT count(*), bool_and(pg_temp.version_of(m.key) = m.version) AS untouched FROM before_mismatch m;
SELECT last_value = :last_token AS no_token_drawn FROM idempotency_keys_token_seq;

-- The right request meets each of them as if nothing had been.
SELECT m.key, c.outcome, c.attempt FROM before_mismatch m, idem_claim(m.key, '{"n": 1}', operation => 'pay') c ORDER BY m.key;

-- What isn't given, now or by whoever claimed, isn't compared.
SELECT outcome FROM idem_claim('mm-completed', operation => 'pay');
SELECT outcome FROM idem_claim('mm-none');
SELECT outcome FROM idem_claim('mm-none', '{"n": 1}');
SELECT outcome FROM idem_claim('mm-none', request_hash => '\x01');

-- JSON null is a request.
SELECT outcome FROM idem_claim('mm-null', 'null');
SELECT outcome FROM idem_claim('mm-null', '{}');
SELECT outcome FROM idem_claim('mm-null', 'null');

-- The caller's own hash stands for the request, and is compared byte for byte.
SELECT outcome FROM idem_claim('mm-hash', '{"n": 1}', request_hash => sha256('raw'));
SELECT outcome FROM idem_claim('mm-hash', '{"n": 2}', request_hash => sha256('raw'));
SELECT outcome FROM idem_claim('mm-hash', '{"n": 1}', request_hash => sha256('ray'));
SELECT outcome FROM idem_claim('mm-hash', request_hash => substr(sha256('raw'), 1, 31));
SELECT outcome FROM idem_claim('mm-long', request_hash => sha512('raw'));
SELECT outcome FROM idem_claim('mm-long', request_hash => set_byte(sha512('raw'), 63, 0));
SELECT outcome FROM idem_claim('mm-long', request_hash => sha512('raw'));

-- The request is the fingerprint of its value, not of its spelling.
SELECT outcome FROM idem_claim('mm-json', '{"a": 1, "b": {"c": [1, 2], "d": 2.50}}');
SELECT outcome FROM idem_claim('mm-json', '{"b":{"d":2.5,"c":[1,2]},"a":1.0}');
SELECT outcome FROM idem_claim('mm-json', '{"b":{"d":2.5,"c":[2,1]},"a":1.0}');
SELECT outcome FROM idem_claim('mm-json', request_hash => idem_fingerprint('{"a": 1, "b": {"c": [1, 2], "d": 2.50}}'));

--
-- Keys and scopes are compared byte for byte
--
SELECT count(*) FILTER (WHERE c.outcome = 'claimed') AS claimed, count(*)
    FROM unnest(ARRAY['byte', 'BYTE', 'byte ', ' byte', E'byte\n', E'byte\t', 'byte\', ' ', E'\t',
                      E'caf\u00e9', E'cafe\u0301', E'\u00a0', 'byte%', 'byt_', '''byte''', '"byte"', '$1']) name,
         idem_claim(name) c;
SELECT scope, c.outcome FROM unnest('{bytes,Bytes," bytes","bytes "}'::text[]) scope, idem_claim('byte', scope => scope) c;

-- Scope and key don't run into each other.
SELECT scope, name, c.outcome
    FROM (VALUES ('a', 'b:c'), ('a:b', 'c'), ('a', 'b|c'), ('a|b', 'c'), ('a', E'b\u001fc'), (E'a\u001fb', 'c'), ('ab', 'c'), ('a', 'bc'), ('', 'abc')) v(scope, name),
         idem_claim(name, scope => scope) c;

-- A scope that knows nothing of the other's result.
SELECT idem_complete('secret', '"of u1"', token, 'u1') FROM idem_claim('secret', scope => 'u1');
SELECT :shown FROM idem_claim('secret', scope => 'u2');
SELECT count(*) FROM idem_get('secret');

-- 255 characters are allowed, whatever their bytes, and whether they compress or not.
SELECT outcome FROM idem_claim(repeat(E'\u20ac', 255), scope => repeat(E'\U0001f600', 255), operation => repeat(E'\u00e4', 255));
SELECT length(key), octet_length(key), octet_length(scope), octet_length(operation) FROM idem_get(repeat(E'\u20ac', 255), repeat(E'\U0001f600', 255));
SELECT string_agg(chr(65536 + i * 7919 % 50000), '' ORDER BY i) AS longest FROM generate_series(1, 255) i \gset
SELECT outcome FROM idem_claim(:'longest', scope => :'longest', operation => :'longest');
SELECT outcome FROM idem_claim(:'longest', scope => :'longest', operation => :'longest');
SELECT outcome FROM idem_claim(left(:'longest', 254), scope => :'longest');
SELECT length(key), octet_length(key), octet_length(scope), octet_length(operation) FROM idem_get(:'longest', :'longest');

--
-- wait
--
SELECT outcome FROM idem_claim('wait', lease => '1 hour');
SELECT clock_timestamp() AS before \gset
SELECT outcome FROM idem_claim('wait', wait => '200 ms');
SELECT clock_timestamp() - :'before' >= '200 ms' AS waited;

-- Until the lease ends, and no longer.
SELECT token, lease_until FROM idem_claim('wait-lease', lease => '1 hour') c, idem_renew('wait-lease', token, '100 ms') lease_until \gset
SELECT outcome, attempt, clock_timestamp() >= :'lease_until' AS ended FROM idem_claim('wait-lease', wait => '1 hour');

-- A mismatch waits for nothing, and neither does a lease that ends held.
SELECT outcome FROM idem_claim('wait', operation => 'other', wait => '1 hour');
SELECT idem_renew('wait-held', token, '100 ms') IS NOT NULL AS set_up FROM idem_claim('wait-held', lease => '1 hour', takeover => false);
SELECT outcome FROM idem_claim('wait-held', wait => '1 hour');

-- One that is cancelled leaves nothing behind.
SET statement_timeout = '100ms';
SELECT outcome FROM idem_claim('wait', wait => '1 hour');
RESET statement_timeout;
SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation = 'idempotency_keys'::regclass);
SELECT outcome, attempt FROM idem_claim('wait');
