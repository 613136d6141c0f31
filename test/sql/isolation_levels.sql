--
-- isolation_levels: the same answers at every level, and in read-only transactions
--
-- What other sessions do meanwhile is shown by the isolation specs.
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
SELECT token FROM idem_claim('open', '{"n": 1}') \gset
SELECT idem_complete('done', '{"n": 2}', token, http_status => 201) FROM idem_claim('done', '{"n": 1}');
SELECT idem_fail('failed', '{"n": 3}', token) FROM idem_claim('failed');

-- One transaction, from the claim to the replay
\set VERBOSITY terse
CREATE PROCEDURE pg_temp.work(k text) LANGUAGE plpgsql AS $$
DECLARE c record;
BEGIN
    SELECT * INTO c FROM idem_claim(k, '{"n": 1}');
    RAISE INFO '% %', c.outcome, c.attempt;
    SELECT * INTO c FROM idem_claim(k, '{"n": 1}');
    RAISE INFO '%', c.outcome;
    SELECT * INTO c FROM idem_claim(k, '{"n": 2}');
    RAISE INFO '%', c.outcome;
    PERFORM idem_complete(k, '1');
    SELECT * INTO c FROM idem_claim(k, '{"n": 1}');
    RAISE INFO '% %', c.outcome, c.response;
    SELECT * INTO c FROM idem_get(k);
    RAISE INFO '% %', c.status, c.response;
END $$;
BEGIN ISOLATION LEVEL READ COMMITTED;
CALL pg_temp.work('rc');
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT 1;
CALL pg_temp.work('rr');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) > 0 FROM idempotency_keys;
CALL pg_temp.work('ser');
COMMIT;
SELECT k, outcome, response FROM unnest('{rc,rr,ser}'::text[]) k, idem_claim(k, '{"n": 1}');

-- Renewal, checkpoint, failure, take-over, resolve, forget
CREATE PROCEDURE pg_temp.all_calls(k text) LANGUAGE plpgsql AS $$
DECLARE t bigint; c record;
BEGIN
    SELECT token INTO t FROM idem_claim(k);
    PERFORM idem_checkpoint(k, t, 'one');
    PERFORM idem_renew(k, t, '1 hour');
    PERFORM idem_fail(k, disposition => 'retry');
    SELECT * INTO c FROM idem_claim(k);
    RAISE INFO '% % %', c.outcome, c.attempt, c.checkpoint;
    PERFORM idem_fail(k, disposition => 'unknown');
    PERFORM idem_resolve(k, 'retryable');
    SELECT * INTO c FROM idem_claim(k);
    RAISE INFO '% %', c.outcome, c.attempt;
    PERFORM idem_forget(k);
    SELECT * INTO c FROM idem_claim(k);
    RAISE INFO '% %', c.outcome, c.attempt;
END $$;
BEGIN ISOLATION LEVEL REPEATABLE READ;
CALL pg_temp.all_calls('rr-all');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
CALL pg_temp.all_calls('ser-all');
COMMIT;
\set VERBOSITY sqlstate

-- Claims of another transaction, settled here
SELECT token AS rr FROM idem_claim('rr-token') \gset
SELECT token AS ser FROM idem_claim('ser-token') \gset
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_renew('rr-token', :rr) IS NOT NULL AS renewed;
SELECT idem_complete('rr-token', '1', :rr);
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idem_complete('ser-token', '1', :ser);
COMMIT;
SELECT k, outcome FROM unnest('{rr-token,ser-token}'::text[]) k, idem_claim(k);

-- A look takes no predicate lock.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outcome FROM idem_claim('done', '{"n": 1}');
SELECT status FROM idem_get('done');
SELECT count(*) FROM idem_get('none');
SELECT outcome FROM idem_claim('ser-new');
SELECT relation::regclass, locktype FROM pg_locks WHERE mode = 'SIReadLock' AND pid = pg_backend_pid() AND relation::regclass::text LIKE 'idempotency%';
COMMIT;

--
-- Read only: what needs no write is answered, and what does is 25006
--
SELECT idem_fail('unknown', '1', token, disposition => 'unknown') FROM idem_claim('unknown');
SELECT idem_fail('backing-off', '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('backing-off');
SELECT idem_fail('due', '1', token, disposition => 'retry') FROM idem_claim('due');
SELECT idem_renew('ended', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('ended');
SELECT idem_renew('held', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('held', takeover => false);
SELECT idem_complete('expired', '1', token, ttl => '1 ms') FROM idem_claim('expired');
DO $$ BEGIN PERFORM pg_sleep(0.01); END $$;

CREATE FUNCTION pg_temp.state(command text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE command;
    RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
    RETURN SQLSTATE;
END $$;
BEGIN READ ONLY;
SELECT k, outcome, http_status, response FROM unnest('{open,done,failed,unknown,held,backing-off}'::text[]) k, idem_claim(k, '{"n": 1}');
SELECT k, outcome FROM unnest('{open,done}'::text[]) k, idem_claim(k, '{"n": 2}');
SELECT k, outcome FROM unnest('{open,done,failed,unknown,held,backing-off,due,ended}'::text[]) k, idem_claim(k, operation => 'other');
SELECT outcome, retry_after > '0' AS retry FROM idem_claim('open', wait => '50 ms');
SELECT k, status FROM unnest('{open,done,failed,unknown,held,backing-off,due,ended,expired,none}'::text[]) k LEFT JOIN idem_get(k) ON true;
SELECT k, pg_temp.state(format('SELECT idem_claim(%L)', k)) FROM unnest('{none,expired,due,ended}'::text[]) k;
SELECT pg_temp.state(format('SELECT idem_complete(''open'', token => %s)', :token)) AS complete, pg_temp.state(format('SELECT idem_fail(''open'', token => %s)', :token)) AS fail,
       pg_temp.state(format('SELECT idem_renew(''open'', %s)', :token)) AS renew, pg_temp.state(format('SELECT idem_checkpoint(''open'', %s, ''c'')', :token)) AS checkpoint,
       pg_temp.state('SELECT idem_resolve(''open'', ''failed'')') AS resolve, pg_temp.state('SELECT idem_forget(''open'')') AS forget;
SELECT pg_temp.state('SELECT idem_claim('''')') AS bad_input, pg_temp.state('SELECT idem_claim(''none'', lease => ''0'')') AS bad_lease;
SELECT idem_key('a', 'b'), length(idem_fingerprint('{}')), idem_uuid('a') IS NOT NULL AS uuid;
SELECT pg_current_xact_id_if_assigned();
COMMIT;
\set VERBOSITY default
BEGIN READ ONLY;
SELECT idem_claim('none');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_complete('open');
ROLLBACK;
\set VERBOSITY sqlstate

-- Read only in other ways
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY;
SELECT outcome FROM idem_claim('done', '{"n": 1}');
SELECT outcome FROM idem_claim('none');
ROLLBACK;
SET default_transaction_read_only = on;
SELECT outcome FROM idem_claim('done', '{"n": 1}');
SELECT outcome FROM idem_claim('none');
BEGIN READ WRITE;
SELECT outcome FROM idem_claim('none');
ROLLBACK;
RESET default_transaction_read_only;
-- A transaction that has written, and then forbids itself to
BEGIN;
SELECT outcome FROM idem_claim('first');
SET TRANSACTION READ ONLY;
SELECT outcome FROM idem_claim('first');
SELECT idem_complete('first');
ROLLBACK;

-- Nothing was changed by all of it.
SELECT k, status FROM unnest('{open,done,failed,unknown,held,backing-off,due,ended,expired,none}'::text[]) k LEFT JOIN idem_get(k) ON true;
