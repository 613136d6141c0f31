--
-- complete: storing a result, once, by whoever owns the claim
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set result 'outcome, attempt, http_status, headers, response, body'

CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

--
-- In one transaction no token is asked for,
--
BEGIN;
SELECT outcome FROM idem_claim('one');
SELECT idem_complete('one', '{"n": 1}');
SELECT :result FROM idem_claim('one');
COMMIT;
SELECT :result FROM idem_claim('one');

-- nor inside one statement, function or block.
SELECT c.outcome, idem_complete('one-statement', '1') FROM idem_claim('one-statement') c;
DO $$
BEGIN
    PERFORM idem_claim('one-block');
    PERFORM idem_complete('one-block', '2');
END $$;
SELECT :result FROM idem_claim('one-statement');
SELECT :result FROM idem_claim('one-block');

-- The token serves as well.
BEGIN;
SELECT token FROM idem_claim('one-token') \gset
SELECT idem_complete('one-token', token => :token);
COMMIT;

-- Rolled back, the key is free.
BEGIN;
SELECT outcome FROM idem_claim('rolled-back');
SELECT idem_complete('rolled-back', '1');
ROLLBACK;
SELECT count(*) FROM idem_get('rolled-back');
SELECT outcome, attempt FROM idem_claim('rolled-back');

-- Only the completion rolled back, the claim still stands.
SELECT token FROM idem_claim('half') \gset
BEGIN;
SELECT idem_complete('half', '1', :token);
ROLLBACK;
SELECT outcome FROM idem_claim('half');
SELECT idem_complete('half', '2', :token);
SELECT :result FROM idem_claim('half');

--
-- In another transaction than the claim's the token is needed
--
SELECT token FROM idem_claim('lease', '{"n": 1}', operation => 'pay', ttl => '2 days') \gset
SELECT pg_temp.version_of('lease') AS version \gset
SELECT idem_complete('lease', '1');
SELECT idem_complete('lease', '1', :token + 1);
SELECT idem_complete('lease', '1', :token - 1);
SELECT idem_complete('lease', '1', 0);
SELECT idem_complete('lease', '1', -9223372036854775808);
SELECT pg_temp.version_of('lease') = :'version' AS untouched;
SELECT clock_timestamp() AS before \gset
SELECT idem_complete('lease', '1', :token);
SELECT operation, status, completed_at BETWEEN :'before' AND clock_timestamp() AS now, expires_at - completed_at AS kept, lease_until
    FROM idem_get('lease');

-- A claim that was only touched here was not made here.
SELECT token FROM idem_claim('touched') \gset
BEGIN;
SELECT idem_renew('touched', :token) IS NOT NULL AS renewed;
SAVEPOINT here;
SELECT idem_complete('touched');
ROLLBACK TO here;
SELECT idem_checkpoint('touched', :token, 'half way') IS NOT NULL AS noted;
SELECT outcome FROM idem_claim('touched-other');
SAVEPOINT here;
SELECT idem_complete('touched');
ROLLBACK TO here;
SELECT idem_complete('touched', token => :token), idem_complete('touched-other');
COMMIT;

-- Nor was one whose token is higher than those drawn here, made meanwhile by
-- somebody else.  (The sequence set back stands for the other session.)
SELECT token FROM idem_claim('meanwhile') \gset
SELECT setval('idempotency_keys_token_seq', :token - 1) IS NOT NULL AS set_back;
BEGIN;
SELECT outcome FROM idem_claim('first');
SELECT idem_renew('meanwhile', :token) IS NOT NULL AS renewed;
SELECT idem_complete('meanwhile');
ROLLBACK;

--
-- Once more: the same is no news, and anything else is refused
--
SELECT token FROM idem_claim('again') \gset
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 200, headers => '[["A","1"]]', body => '\x00');
SELECT pg_temp.version_of('again') AS version \gset
SELECT idem_complete('again', '{"b": 2, "a": 1}', :token, http_status => 200, headers => '[["A","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 200, headers => '[["A","1"]]', body => '\x00', ttl => '1 hour');
SELECT idem_complete('again', '{"a": 1, "b": 3}', :token, http_status => 200, headers => '[["A","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 201, headers => '[["A","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 200, headers => '[["a","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 200, headers => '[["A","1"]]', body => '\x0000');
SELECT idem_complete('again', NULL, :token, http_status => 200, headers => '[["A","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, headers => '[["A","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 200, body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token, http_status => 200, headers => '[["A","1"]]');
SELECT idem_complete('again', token => :token);
SELECT idem_fail('again', '{"a": 1, "b": 2}', :token, http_status => 200, headers => '[["A","1"]]', body => '\x00');
-- The token comes first.
SELECT idem_complete('again', '{"a": 1, "b": 2}', :token + 1, http_status => 200, headers => '[["A","1"]]', body => '\x00');
SELECT idem_complete('again', '{"a": 1, "b": 2}', http_status => 200, headers => '[["A","1"]]', body => '\x00');
SELECT pg_temp.version_of('again') = :'version' AS untouched;

-- The same within the claim's own transaction, without a token.
BEGIN;
SELECT outcome FROM idem_claim('again-here');
SELECT idem_complete('again-here', '1');
SELECT idem_complete('again-here', '1');
SELECT idem_complete('again-here', '2');
ROLLBACK;

-- Nothing at all is a result too, and not the same as another nothing.
SELECT token FROM idem_claim('nothing') \gset
SELECT idem_complete('nothing', token => :token);
SELECT idem_complete('nothing', token => :token);
SELECT idem_complete('nothing', 'null', :token);
SELECT idem_complete('nothing', token => :token, body => '');
SELECT idem_complete('nothing', token => :token, headers => '[]');
SELECT :result FROM idem_claim('nothing');

-- After a failure
SELECT token FROM idem_claim('failed') \gset
SELECT idem_fail('failed', '1', :token);
SELECT idem_complete('failed', '1', :token);
SELECT token FROM idem_claim('retryable') \gset
SELECT idem_fail('retryable', '1', :token, disposition => 'retry');
SELECT idem_complete('retryable', '1', :token);
SELECT token FROM idem_claim('unknown') \gset
SELECT idem_fail('unknown', '1', :token, disposition => 'unknown');
SELECT idem_complete('unknown', '1', :token);
SELECT status FROM unnest('{failed,retryable,unknown}'::text[]) k, idem_get(k);

--
-- Who was late
--
-- An ended lease that nobody has taken over is still its owner's,
SELECT token FROM idem_claim('late') \gset
SELECT idem_renew('late', :token, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT idem_complete('late', '1', :token);
SELECT :result FROM idem_claim('late');

-- and one that was taken over is not.
SELECT token AS token1 FROM idem_claim('stale') \gset
SELECT idem_renew('stale', :token1, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT token AS token2, attempt, token > :token1 AS newer FROM idem_claim('stale', lease => '1 hour') \gset
\echo attempt :attempt, a newer token: :newer
SELECT pg_temp.version_of('stale') AS version \gset
SELECT idem_complete('stale', '"A"', :token1);
SELECT idem_fail('stale', '"A"', :token1, disposition => 'retry');
SELECT pg_temp.version_of('stale') = :'version' AS untouched;
SELECT idem_complete('stale', '"B"', :token2);
SELECT idem_complete('stale', '"A"', :token1);
SELECT idem_complete('stale', '"B"', :token1);
SELECT :result FROM idem_claim('stale');

-- The owner of a retry that was claimed again has lost as well.
SELECT token AS token1 FROM idem_claim('retried') \gset
SELECT idem_fail('retried', token => :token1, disposition => 'retry');
SELECT token AS token2 FROM idem_claim('retried') \gset
SELECT idem_fail('retried', token => :token1, disposition => 'retry');
SELECT idem_complete('retried', token => :token1);
SELECT idem_complete('retried', token => :token2);

--
-- No such claim
--
SELECT idem_complete('never', '1');
SELECT idem_complete('never', '1', 1);
SELECT token FROM idem_claim('scoped', scope => 'a') \gset
SELECT idem_complete('scoped', '1', :token);
SELECT idem_complete('scoped', '1', :token, 'b');
SELECT idem_complete('scoped', '1', :token, 'A');
SELECT idem_complete('scoped', '1', :token, 'a');
SELECT count(*) FROM idem_get('scoped');
SELECT :result FROM idem_claim('scoped', scope => 'a');

--
-- How long it is kept: the claim's ttl from the completion on, unless told
--
SELECT idem_complete('kept', token => token) FROM idem_claim('kept');
SELECT idem_complete('kept-claim', token => token) FROM idem_claim('kept-claim', ttl => '3 hours');
SELECT idem_complete('kept-call', token => token, ttl => '90 s') FROM idem_claim('kept-call', ttl => '3 hours');
SELECT token FROM idem_claim('kept-month', ttl => '1 month 1 day') \gset
SET idempotency.default_ttl = '2h';
SELECT idem_complete('kept-default', token => token) FROM idem_claim('kept-default');
-- The setting is of no account any more, and nor is the lease.
SELECT idem_complete('kept-month', token => :token);
RESET idempotency.default_ttl;
SELECT idem_complete('kept-lease', token => token, ttl => '1 min') FROM idem_claim('kept-lease', lease => '1 hour');
SELECT key, extract(epoch FROM expires_at - completed_at)::int AS kept, lease_until
    FROM unnest('{kept,kept-claim,kept-call,kept-month,kept-default,kept-lease}'::text[]) k, idem_get(k);

-- A checkpoint stays with the key.
SELECT token FROM idem_claim('noted') \gset
SELECT idem_checkpoint('noted', :token, 'sent', '{"id": 3}') IS NOT NULL AS noted;
SELECT idem_complete('noted', '1', :token);
SELECT status, checkpoint, state, response FROM idem_get('noted');
