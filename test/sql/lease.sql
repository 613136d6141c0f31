--
-- lease: renewing it, noting how far the work got, taking it over or not
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate

CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;
-- Is an instant this long after the call that gave it, which began at before?
CREATE FUNCTION pg_temp.is_after(at timestamptz, length interval, before timestamptz) RETURNS boolean LANGUAGE sql AS
$$ SELECT at BETWEEN before + length AND clock_timestamp() + length $$;

--
-- idem_renew: returns the new end, which is lease from now
--
SELECT token, created_at FROM idem_claim('renew', lease => '10 s') \gset
SELECT clock_timestamp() AS before \gset
SELECT idem_renew('renew', :token, '2 min') AS lease_until \gset
SELECT pg_temp.is_after(:'lease_until', '2 min', :'before') AS from_now;
SELECT lease_until = :'lease_until' AS stored, status, attempt, created_at = :'created_at' AS same_start,
       expires_at - created_at AS ttl FROM idem_get('renew');

-- Shorter than what is left: so be it.
SELECT clock_timestamp() AS before \gset
SELECT pg_temp.is_after(idem_renew('renew', :token, '1 min'), '1 min', :'before') AS from_now;

-- Without a lease: the default from now, but never earlier than it was.
SELECT clock_timestamp() AS before \gset
SELECT pg_temp.is_after(idem_renew('renew', :token), '5 min', :'before') AS from_now;
SET idempotency.default_lease = '90s';
SELECT idem_renew('renew', :token) = lease_until AS as_it_was FROM idem_get('renew');
SET idempotency.default_lease = '1h';
SELECT clock_timestamp() AS before \gset
SELECT pg_temp.is_after(idem_renew('renew', :token, NULL), '1 hour', :'before') AS from_now;
SELECT clock_timestamp() AS before \gset
SELECT pg_temp.is_after(lease_until, '1 hour', :'before') AS from_now FROM idem_claim('renew-default'), idem_get('renew-default');
RESET idempotency.default_lease;

-- The row lives as long as the lease, and when it is short again as the ttl.
SELECT token FROM idem_claim('renew-ttl', ttl => '1 hour', lease => '1 min') \gset
SELECT idem_renew('renew-ttl', :token, '2 hours') IS NOT NULL AS renewed;
SELECT lease_until = expires_at AS lease_end, expires_at - created_at > '2 hours' AS longer FROM idem_get('renew-ttl');
SELECT idem_renew('renew-ttl', :token, '1 min') IS NOT NULL AS renewed;
SELECT expires_at - created_at AS ttl FROM idem_get('renew-ttl');

-- In the claim's own transaction, and rolled back
BEGIN;
SELECT token FROM idem_claim('renew-here') \gset
SELECT idem_renew('renew-here', :token) IS NOT NULL AS renewed;
SELECT idem_complete('renew-here');
COMMIT;
SELECT token, lease_until FROM idem_claim('renew-back') c, idem_get('renew-back') g \gset
BEGIN;
SELECT idem_renew('renew-back', :token, '1 day') IS NOT NULL AS renewed;
ROLLBACK;
SELECT lease_until = :'lease_until' AS as_it_was FROM idem_get('renew-back');

-- A lease that has ended, as long as nobody has taken over
SELECT token FROM idem_claim('renew-ended') \gset
SELECT idem_renew('renew-ended', :token, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT idem_renew('renew-ended', :token, '1 hour') IS NOT NULL AS renewed;
SELECT outcome FROM idem_claim('renew-ended');

-- Refused
SELECT pg_temp.version_of('renew') AS version \gset
SELECT idem_renew('renew', NULL);
SELECT idem_renew('renew', :token);
SELECT idem_renew('renew', 0, '1 day');
SELECT idem_renew('never', :token);
SELECT idem_renew('renew', :token, scope => 'elsewhere');
SELECT pg_temp.version_of('renew') = :'version' AS untouched;
SELECT token FROM idem_claim('renew-settled') \gset
SELECT idem_complete('renew-settled', '1', :token);
SELECT idem_renew('renew-settled', :token);
SELECT idem_checkpoint('renew-settled', :token, 'x');
SELECT idem_renew('renew-settled', :token + 1);
SELECT token FROM idem_claim('renew-failed') \gset
SELECT idem_fail('renew-failed', '1', :token);
SELECT idem_renew('renew-failed', :token);
SELECT token FROM idem_claim('renew-retry') \gset
SELECT idem_fail('renew-retry', '1', :token, disposition => 'retry');
SELECT idem_renew('renew-retry', :token);
SELECT idem_checkpoint('renew-retry', :token, 'x');
SELECT token FROM idem_claim('renew-unknown') \gset
SELECT idem_fail('renew-unknown', '1', :token, disposition => 'unknown');
SELECT idem_renew('renew-unknown', :token);

--
-- idem_checkpoint: replaces checkpoint and state, and tells the lease's end
--
SELECT token FROM idem_claim('step', lease => '10 min') \gset
SELECT idem_checkpoint('step', :token, 'one', '{"a": [1, 2.50], "b": null}') = lease_until AS as_it_was FROM idem_get('step');
SELECT status, attempt, checkpoint, state FROM idem_get('step');
SELECT idem_checkpoint('step', :token, 'two') = lease_until AS as_it_was FROM idem_get('step');
SELECT checkpoint, state FROM idem_get('step');
SELECT idem_checkpoint('step', :token, '', 'null') IS NOT NULL AS noted;
SELECT '[' || checkpoint || ']' AS checkpoint, state FROM idem_get('step');

-- With a lease it renews too.
SELECT clock_timestamp() AS before \gset
SELECT pg_temp.is_after(idem_checkpoint('step', :token, 'three', lease => '1 hour'), '1 hour', :'before') AS from_now;
SELECT pg_temp.is_after(lease_until, '1 hour', :'before') AS stored, checkpoint FROM idem_get('step');

-- A long one comes back as it was.
SELECT idem_checkpoint('step', :token, repeat('x', 20000), to_jsonb(repeat('y', 20000))) IS NOT NULL AS noted;
SELECT checkpoint = repeat('x', 20000) AS checkpoint, state = to_jsonb(repeat('y', 20000)) AS state FROM idem_get('step');

-- A replay shows none of it, and nor does processing.
SELECT outcome, checkpoint, state FROM idem_claim('step');
SELECT idem_complete('step', '1', :token);
SELECT outcome, checkpoint, state FROM idem_claim('step');

-- Refused
SELECT token FROM idem_claim('step-mine') \gset
SELECT pg_temp.version_of('step-mine') AS version \gset
SELECT idem_checkpoint('step-mine', NULL, 'x');
SELECT idem_checkpoint('step-mine', :token + 1, 'x');
SELECT idem_checkpoint('step-mine', :token, 'x', scope => 'elsewhere');
SELECT idem_checkpoint('never', :token, 'x');
SELECT pg_temp.version_of('step-mine') = :'version' AS untouched;

--
-- Taking over: the next claim after the end, with the last owner's notes
--
SELECT token AS token1 FROM idem_claim('next', '{"n": 1}', operation => 'ship') \gset
SELECT idem_checkpoint('next', :token1, 'packed', '{"box": 1}', lease => '1 ms') IS NOT NULL AS noted;
CALL pg_temp.pause(0.01);
SELECT status, expired FROM idem_get('next');
SELECT clock_timestamp() AS before \gset
SELECT token AS token2, outcome, attempt, checkpoint, state FROM idem_claim('next', '{"n": 1}', operation => 'ship', ttl => '2 days', lease => '1 hour') \gset
\echo :outcome :attempt :checkpoint :state
SELECT pg_temp.is_after(lease_until, '1 hour', :'before') AS lease, pg_temp.is_after(expires_at, '2 days', :'before') AS ttl,
       operation, checkpoint, state FROM idem_get('next');
-- The last owner is fenced off in every way.
SELECT pg_temp.version_of('next') AS version \gset
SELECT idem_renew('next', :token1);
SELECT idem_checkpoint('next', :token1, 'shipped');
SELECT idem_complete('next', '1', :token1);
SELECT idem_fail('next', '1', :token1);
SELECT pg_temp.version_of('next') = :'version' AS untouched;
-- Nothing noted anew: the old notes go on to the third owner.
SELECT idem_renew('next', :token2, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT outcome, attempt, checkpoint, state FROM idem_claim('next', '{"n": 1}', operation => 'ship');

--
-- takeover => false: held when the lease ends, past the ttl too
--
SELECT token, expires_at FROM idem_claim('held', '{"n": 1}', ttl => '1 ms', lease => '1 hour', takeover => false) \gset
\echo :expires_at
SELECT outcome, retry_after > '0' AS retry, expires_at FROM idem_claim('held');
SELECT idem_renew('held', :token, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT pg_temp.version_of('held') AS version \gset
SELECT outcome, token, attempt, checkpoint, expires_at, retry_after FROM idem_claim('held', '{"n": 1}');
SELECT outcome FROM idem_claim('held', wait => '1 hour', takeover => true);
SELECT status, expired, expires_at FROM idem_get('held');
SELECT pg_temp.version_of('held') = :'version' AS untouched;
-- Its owner may come back,
SELECT idem_renew('held', :token, '1 hour') IS NOT NULL AS renewed;
SELECT outcome FROM idem_claim('held', '{"n": 1}');
SELECT idem_checkpoint('held', :token, 'x', lease => '1 ms') IS NOT NULL AS noted;
CALL pg_temp.pause(0.01);
SELECT outcome FROM idem_claim('held', '{"n": 1}');
-- and settle it after all.
SELECT idem_complete('held', '"done"', :token, ttl => '1 hour');
SELECT outcome, response, expires_at - completed_at AS kept FROM idem_claim('held', '{"n": 1}');
-- So may a failure, in each way.
SELECT idem_renew(k, token, '1 ms') IS NOT NULL AS set_up, token AS token1 FROM unnest('{held-final}'::text[]) k, idem_claim(k, takeover => false) \gset
SELECT idem_renew(k, token, '1 ms') IS NOT NULL AS set_up, token AS token2 FROM unnest('{held-retry}'::text[]) k, idem_claim(k, takeover => false) \gset
SELECT idem_renew(k, token, '1 ms') IS NOT NULL AS set_up, token AS token3 FROM unnest('{held-unknown}'::text[]) k, idem_claim(k, takeover => false) \gset
CALL pg_temp.pause(0.01);
SELECT idem_fail('held-final', '1', :token1), idem_fail('held-retry', '1', :token2, disposition => 'retry'),
       idem_fail('held-unknown', '1', :token3, disposition => 'unknown');
SELECT k, outcome, attempt FROM unnest('{held-final,held-retry,held-unknown}'::text[]) k, idem_claim(k);

-- Each claim decides for itself whether it may be taken over.
SELECT idem_renew('turns', token, '1 ms') IS NOT NULL AS renewed FROM idem_claim('turns');
CALL pg_temp.pause(0.01);
SELECT idem_renew('turns', token, '1 ms') IS NOT NULL AS renewed, attempt FROM idem_claim('turns', takeover => false);
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('turns');
SELECT idem_fail('turns-retry', token => token, disposition => 'retry') FROM idem_claim('turns-retry', takeover => false);
SELECT idem_renew('turns-retry', token, '1 ms') IS NOT NULL AS renewed, attempt FROM idem_claim('turns-retry');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('turns-retry');
