--
-- resolve_forget: what an administrator does to a key without its token
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set row 'status, attempt, http_status, headers, response, body, completed_at IS NOT NULL AS ended, lease_until, expires_at - completed_at AS kept'

CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

--
-- idem_resolve: a key of unknown outcome, in each of the three ways
--
SELECT idem_fail(k, '{"code": "timeout"}', token, disposition => 'unknown', http_status => 504, headers => '[["A","1"]]', body => 'late')
    FROM unnest('{un-completed,un-failed,un-retryable}'::text[]) k, idem_claim(k, ttl => '2 hours');
SELECT idem_resolve('un-completed', 'completed', '{"receipt": 7}');
SELECT idem_resolve('un-failed', 'failed', '{"code": "declined"}');
SELECT idem_resolve('un-retryable', 'retryable');
SELECT key, :row FROM unnest('{un-completed,un-failed,un-retryable}'::text[]) k, idem_get(k);
SELECT k, outcome, attempt, response FROM unnest('{un-completed,un-failed,un-retryable}'::text[]) k, idem_claim(k);

-- A held claim, and one that is still being worked on: the owner is fenced off.
SELECT token AS held FROM idem_claim('held', takeover => false) \gset
SELECT idem_renew('held', :held, '1 ms') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT outcome FROM idem_claim('held');
SELECT idem_resolve('held', 'failed', '"never arrived"');
SELECT outcome, response FROM idem_claim('held');
SELECT idem_complete('held', '1', :held);
SELECT idem_fail('held', '"never arrived"', :held);

SELECT token AS running FROM idem_claim('running') \gset
SELECT idem_checkpoint('running', :running, 'sent', '[1]') IS NOT NULL AS noted;
SELECT idem_resolve('running', 'retryable', '"gone"');
SELECT idem_renew('running', :running);
SELECT idem_checkpoint('running', :running, 'received');
SELECT idem_complete('running', '1', :running);
SELECT :row, checkpoint FROM idem_get('running');
SELECT outcome, attempt, checkpoint, state, token > :running + 1 AS newer_still FROM idem_claim('running');

-- A retryable one whose time has not come
SELECT idem_fail('backing-off', '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('backing-off');
SELECT outcome FROM idem_claim('backing-off');
SELECT idem_resolve('backing-off', 'completed', '2');
SELECT outcome, response FROM idem_claim('backing-off');
SELECT idem_fail('at-once', '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('at-once');
SELECT idem_resolve('at-once', 'retryable', '2');
SELECT outcome, attempt FROM idem_claim('at-once');

-- One of this very transaction
BEGIN;
SELECT outcome FROM idem_claim('here');
SELECT idem_resolve('here', 'completed', '1');
SELECT outcome FROM idem_claim('here');
COMMIT;
SELECT outcome, response FROM idem_claim('here');

--
-- Once more: the same is no news, and what is final stays
--
SELECT pg_temp.version_of('un-completed') AS version \gset
SELECT idem_resolve('un-completed', 'completed', '{"receipt": 7}');
SELECT idem_resolve('un-completed', 'completed', '{"receipt": 8}');
SELECT idem_resolve('un-completed', 'completed');
SELECT idem_resolve('un-completed', 'failed', '{"receipt": 7}');
SELECT idem_resolve('un-completed', 'retryable');
SELECT pg_temp.version_of('un-completed') = :'version' AS untouched;
SELECT idem_resolve('un-failed', 'failed', '{"code": "declined"}');
SELECT idem_resolve('un-failed', 'completed', '{"code": "declined"}');
SELECT idem_fail('un-again', '1', token, disposition => 'unknown') FROM idem_claim('un-again');
SELECT idem_resolve('un-again', 'retryable', '1'), idem_resolve('un-again', 'retryable', '1');

-- Refused
SELECT idem_fail('un-refused', '1', token, disposition => 'unknown') FROM idem_claim('un-refused');
SELECT pg_temp.version_of('un-refused') AS version \gset
SELECT idem_resolve('un-refused', 'processing');
SELECT idem_resolve('un-refused', 'unknown');
SELECT idem_resolve('un-refused', NULL);
SELECT idem_resolve('un-refused', 'completed', scope => 'elsewhere');
SELECT idem_resolve('never', 'completed');
SELECT pg_temp.version_of('un-refused') = :'version' AS untouched;

-- Who and why: in the row, for the owner of the table to see, and until the
-- key is claimed anew.
CREATE ROLE regress_idem_admin;
SELECT idem_grant('regress_idem_admin', true);
SET ROLE regress_idem_admin;
SELECT idem_resolve('un-refused', 'retryable', note => 'Called the bank: no such payment.');
RESET ROLE;
SELECT status, resolved_by, note FROM idempotency_keys WHERE key = 'un-refused';
SELECT outcome FROM idem_claim('un-refused');
SELECT status, resolved_by, note FROM idempotency_keys WHERE key = 'un-refused';
SELECT idem_revoke('regress_idem_admin');
REVOKE USAGE ON SCHEMA public FROM regress_idem_admin;
DROP ROLE regress_idem_admin;

-- The server's log tells of it, and so does the client's if asked to.
SELECT idem_fail('logged', '1', token, 'shop', disposition => 'unknown') FROM idem_claim('logged', scope => 'shop');
CREATE ROLE regress_idem_admin SUPERUSER;
SET ROLE regress_idem_admin;
\set VERBOSITY default
SET log_statement = 'none';
SET log_min_duration_statement = -1;
SET client_min_messages = log;
SELECT idem_resolve('logged', 'completed', '1', 'shop', 'Called the bank: it arrived.');
SELECT idem_resolve('logged', 'completed', '1', 'shop', 'And once more.');
RESET client_min_messages;
\set VERBOSITY sqlstate
RESET ROLE;
DROP ROLE regress_idem_admin;

--
-- idem_forget: whatever the state
--
SELECT outcome FROM idem_claim('f-processing');
SELECT idem_complete('f-completed', '1', token) FROM idem_claim('f-completed');
SELECT idem_fail('f-failed', '1', token) FROM idem_claim('f-failed');
SELECT idem_fail('f-retryable', '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('f-retryable');
SELECT idem_fail('f-unknown', '1', token, disposition => 'unknown') FROM idem_claim('f-unknown');
SELECT idem_renew('f-held', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('f-held', takeover => false);
SELECT idem_complete('f-expired', '1', token, ttl => '1 ms') FROM idem_claim('f-expired');
CALL pg_temp.pause(0.01);
SELECT k, idem_forget(k), idem_forget(k) AS again
    FROM unnest('{f-processing,f-completed,f-failed,f-retryable,f-unknown,f-held,f-expired,f-never}'::text[]) k;
SELECT count(*) FROM idempotency_keys WHERE key LIKE 'f-%';
SELECT k, outcome, attempt
    FROM unnest('{f-processing,f-completed,f-failed,f-retryable,f-unknown,f-held,f-expired}'::text[]) k,
         idem_claim(k, '{"another": "request"}', operation => 'another');

-- Its own scope alone, and byte for byte
SELECT outcome FROM idem_claim('f', scope => 'a'), idem_claim('f', scope => 'b') b(o);
SELECT idem_forget('f'), idem_forget('f', 'A'), idem_forget('f ', 'a'), idem_forget('f', 'a');
SELECT scope FROM idempotency_keys WHERE key = 'f';

-- The owner's claim is lost, and the next token is higher all the same.
SELECT token AS token1 FROM idem_claim('f-owner') \gset
SELECT idem_forget('f-owner');
SELECT idem_complete('f-owner', '1', :token1);
SELECT idem_renew('f-owner', :token1);
SELECT token > :token1 AS newer, attempt FROM idem_claim('f-owner');
SELECT idem_complete('f-owner', '1', :token1);

-- In this transaction, and rolled back
BEGIN;
SELECT outcome FROM idem_claim('f-here');
SELECT idem_forget('f-here');
SELECT idem_complete('f-here');
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_claim('f-here');
SELECT idem_forget('f-here');
SELECT outcome, attempt FROM idem_claim('f-here');
SELECT idem_complete('f-here', '2');
COMMIT;
SELECT outcome, response FROM idem_claim('f-here');
BEGIN;
SELECT idem_forget('f-here');
SELECT count(*) FROM idem_get('f-here');
ROLLBACK;
SELECT outcome, response FROM idem_claim('f-here');
