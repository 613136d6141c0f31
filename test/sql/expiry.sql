--
-- expiry: a row whose time is over counts as absent for every call
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set shown 'outcome, token IS NOT NULL AS token, attempt, http_status, headers, response, body, checkpoint, state'

CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

-- One of each that can expire, with everything that a row can bear.
CREATE FUNCTION pg_temp.claim_one(key text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE t bigint;
BEGIN
    SELECT c.token INTO t FROM idem_claim(key, '{"n": 1}', operation => 'pay', ttl => '1 ms') c;
    PERFORM idem_checkpoint(key, t, 'sent', '{"id": 3}');
    RETURN t;
END $$;
SELECT pg_temp.claim_one('x-processing') AS processing, pg_temp.claim_one('x-completed') AS completed,
       pg_temp.claim_one('x-failed') AS failed, pg_temp.claim_one('x-retryable') AS retryable \gset
SELECT idem_renew('x-processing', :processing, '1 ms') IS NOT NULL AS renewed;
SELECT idem_complete('x-completed', '1', :completed, '', 200, '[]', 'body');
SELECT idem_fail('x-failed', '1', :failed, '', 'final', NULL, 500, '[]', 'body');
SELECT idem_fail('x-retryable', '1', :retryable, '', 'retry', NULL, 500, '[]', 'body');
CALL pg_temp.pause(0.01);
SELECT key, status, expired FROM unnest('{x-processing,x-completed,x-failed,x-retryable}'::text[]) k, idem_get(k);

--
-- The owner is late: no such live claim, whatever the token
--
SELECT pg_temp.version_of('x-processing') AS version \gset
SELECT idem_complete('x-processing', '1', :processing);
SELECT idem_complete('x-processing', '1');
SELECT idem_complete('x-processing', '1', :processing + 1000);
SELECT idem_fail('x-processing', '1', :processing);
SELECT idem_renew('x-processing', :processing);
SELECT idem_checkpoint('x-processing', :processing, 'received');
SELECT idem_resolve('x-processing', 'completed');
SELECT pg_temp.version_of('x-processing') = :'version' AS untouched;
SELECT idem_complete('x-completed', '1', :completed, '', 200, '[]', 'body');
SELECT idem_complete('x-completed', '2', :completed);
SELECT idem_resolve('x-completed', 'completed', '1');
SELECT idem_fail('x-failed', '1', :failed, '', 'final', NULL, 500, '[]', 'body');
SELECT idem_resolve('x-retryable', 'completed');

--
-- The next claim starts at attempt 1, and finds nothing of the past
--
CREATE TEMP TABLE past AS SELECT key AS past_key, token AS past_token, created_at AS past_start FROM idempotency_keys WHERE key LIKE 'x-%';
SELECT past_key, :shown FROM past, idem_claim(past_key, '{"n": 2}', operation => 'other') ORDER BY past_key;
SELECT key, token > past_token AS newer, created_at > past_start AS later, operation, status, attempt, checkpoint, state, http_status, headers,
       response, body, completed_at, retry_at, takeover, expires_at - created_at AS ttl
    FROM past JOIN idempotency_keys ON key = past_key ORDER BY key;
SELECT past_key, outcome FROM past, idem_claim(past_key, '{"n": 1}', operation => 'pay') ORDER BY past_key;
SELECT past_key, outcome FROM past, idem_claim(past_key, '{"n": 2}', operation => 'other') ORDER BY past_key;
-- The last life's token is worth nothing in this one.
SELECT idem_complete('x-processing', '1', :processing);
SELECT idem_complete('x-processing', '1', token) FROM idempotency_keys WHERE key = 'x-processing';

-- The request isn't kept either, if the new claim gives none.
SELECT idem_complete('plain', '1', token, ttl => '1 ms') FROM idem_claim('plain', '{"n": 1}', operation => 'pay');
CALL pg_temp.pause(0.01);
SELECT outcome FROM idem_claim('plain');
SELECT request_hash, '[' || operation || ']' AS operation FROM idempotency_keys WHERE key = 'plain';

-- Rolled back, it is as expired as before.
SELECT idem_complete('back', '1', token, ttl => '1 ms') FROM idem_claim('back');
CALL pg_temp.pause(0.01);
BEGIN;
SELECT outcome, attempt FROM idem_claim('back');
SELECT idem_complete('back', '2');
ROLLBACK;
SELECT status, response, expired FROM idem_get('back');
SELECT outcome, attempt FROM idem_claim('back');

-- In the transaction that made it: the clock runs on.
BEGIN;
SELECT outcome FROM idem_claim('same');
SELECT idem_complete('same', '1', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT expired FROM idem_get('same');
SELECT idem_complete('same', '1');
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_claim('same');
SELECT idem_complete('same', '1', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('same');
SELECT idem_complete('same', '2');
COMMIT;
SELECT outcome, response FROM idem_claim('same');

--
-- Not expired: what runs, what is held, and what waits for its retry
--
SELECT token FROM idem_claim('leased', ttl => '1 ms', lease => '1 hour') \gset
CALL pg_temp.pause(0.01);
SELECT outcome FROM idem_claim('leased');
SELECT status, expired FROM idem_get('leased');
SELECT idem_renew('leased', :token, '2 hours') IS NOT NULL AS renewed;
SELECT idem_complete('leased', '1', :token);
SELECT idem_fail('held', '1', token, disposition => 'unknown', ttl => '1 ms') FROM idem_claim('held');
SELECT idem_fail('backing-off', '1', token, disposition => 'retry', retry_after => '1 hour', ttl => '1 ms') FROM idem_claim('backing-off');
CALL pg_temp.pause(0.01);
SELECT k, outcome, attempt FROM unnest('{held,backing-off}'::text[]) k, idem_claim(k);
-- Resolved, it gets its retention: the ttl that was last given.
SELECT idem_resolve('held', 'failed', '1');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('held');

-- A lease that ends before the ttl is taken over, not forgotten.
SELECT idem_renew('over', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('over', ttl => '1 hour');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('over');

--
-- Tokens rise through all of a key's lives
--
CREATE FUNCTION pg_temp.lives(n int) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE last bigint := 0; t bigint;
BEGIN
    FOR i IN 1 .. n LOOP
        SELECT c.token INTO STRICT t FROM idem_claim('lives') c WHERE c.outcome = 'claimed';
        IF t <= last THEN RETURN false; END IF;
        last := t;
        CASE i % 5
            WHEN 0 THEN PERFORM idem_forget('lives');
            WHEN 1 THEN PERFORM idem_fail('lives', disposition => 'retry');
            WHEN 2 THEN PERFORM idem_complete('lives', ttl => '1 microsecond');
            WHEN 3 THEN PERFORM idem_fail('lives', ttl => '1 microsecond');
            WHEN 4 THEN PERFORM idem_resolve('lives', 'retryable');
        END CASE;
        PERFORM pg_sleep(0.00001);
    END LOOP;
    RETURN true;
END $$;
SELECT pg_temp.lives(100) AS rising;
SELECT count(*) FROM idempotency_keys WHERE key = 'lives';

-- also when somebody sets the sequence back.
SELECT token AS token1 FROM idem_claim('set-back') \gset
SELECT last_value FROM idempotency_keys_token_seq \gset
SELECT setval('idempotency_keys_token_seq', 1) AS set_back;
SELECT idem_fail('set-back', token => :token1, disposition => 'retry');
SELECT token > :token1 AS newer, token < 9007199254740992 AS exact_in_javascript FROM idem_claim('set-back');
SELECT setval('idempotency_keys_token_seq', :last_value + 1) > 0 AS restored;
