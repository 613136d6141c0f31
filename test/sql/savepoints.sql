--
-- savepoints: what a subtransaction did to a key lives and dies with it
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate

--
-- A claim rolled back is no claim
--
BEGIN;
SAVEPOINT a;
SELECT outcome, attempt FROM idem_claim('one');
SELECT outcome FROM idem_claim('one');
ROLLBACK TO a;
SELECT count(*) FROM idem_get('one');
SELECT outcome, attempt FROM idem_claim('one');
ROLLBACK TO a;
SELECT outcome, attempt FROM idem_claim('one');
SELECT idem_complete('one', '1');
COMMIT;
SELECT outcome, attempt, response FROM idem_claim('one');

-- Many times over, in one transaction
BEGIN;
DO $$
BEGIN
    FOR i IN 1 .. 200 LOOP
        BEGIN
            PERFORM 1 FROM idem_claim('many') WHERE outcome = 'claimed';
            IF NOT FOUND THEN RAISE INFO 'turn % is not the first', i; END IF;
            RAISE EXCEPTION 'back' USING ERRCODE = 'ZZ999';
        EXCEPTION WHEN SQLSTATE 'ZZ999' THEN NULL;
        END;
    END LOOP;
END $$;
SELECT outcome, attempt FROM idem_claim('many');
COMMIT;

--
-- A completion rolled back leaves the claim as it was
--
BEGIN;
SELECT outcome FROM idem_claim('two');
SAVEPOINT a;
SELECT idem_complete('two', '1');
SELECT outcome, response FROM idem_claim('two');
ROLLBACK TO a;
SELECT outcome, response FROM idem_claim('two');
SELECT idem_fail('two', '"no"');
SAVEPOINT b;
SELECT idem_fail('two', '"no"');
SELECT idem_complete('two', '2');
ROLLBACK TO b;
COMMIT;
SELECT outcome, response FROM idem_claim('two');

-- also one with a token, of a claim that is there already.
SELECT token FROM idem_claim('three') \gset
BEGIN;
SAVEPOINT a;
SELECT idem_complete('three', '1', :token);
ROLLBACK TO a;
SELECT outcome FROM idem_claim('three');
SAVEPOINT a;
SELECT idem_fail('three', '1', :token, disposition => 'retry');
SELECT outcome, attempt FROM idem_claim('three');
ROLLBACK TO a;
SELECT idem_complete('three', '2', :token);
COMMIT;
SELECT outcome, attempt, response FROM idem_claim('three');

--
-- Renewal, checkpoint, resolve and forget
--
SELECT token FROM idem_claim('four', lease => '1 hour') \gset
SELECT lease_until FROM idem_get('four') \gset
BEGIN;
SAVEPOINT a;
SELECT idem_renew('four', :token, '2 hours') > :'lease_until' AS later;
SELECT idem_checkpoint('four', :token, 'x', '1') > :'lease_until' AS later;
ROLLBACK TO a;
SELECT lease_until = :'lease_until' AS as_it_was, checkpoint, state FROM idem_get('four');
SELECT idem_checkpoint('four', :token, 'y', '2') = :'lease_until' AS as_it_was;
SAVEPOINT b;
SELECT idem_resolve('four', 'completed', '1');
SELECT outcome FROM idem_claim('four');
SELECT idem_renew('four', :token);
ROLLBACK TO b;
SELECT idem_forget('four');
SELECT outcome, attempt, checkpoint FROM idem_claim('four');
SELECT idem_complete('four', '3');
ROLLBACK TO b;
SELECT status, checkpoint, state FROM idem_get('four');
SELECT idem_renew('four', :token, '2 hours') > :'lease_until' AS later;
RELEASE a;
COMMIT;
SELECT status, checkpoint, state, lease_until > :'lease_until' AS later FROM idem_get('four');

--
-- Completing without a token: the claim must have been made in this
-- transaction, in whatever subtransaction that has not been rolled back
--
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idem_claim('five');
RELEASE a;
SAVEPOINT b;
SELECT idem_complete('five', '1');
RELEASE b;
COMMIT;
SELECT outcome, response FROM idem_claim('five');

-- The claim that was rolled back gives no right to the one before it.
SELECT token FROM idem_claim('six') \gset
SELECT idem_renew('six', :token, '1 ms') IS NOT NULL AS renewed;
DO $$ BEGIN PERFORM pg_sleep(0.01); END $$;
BEGIN;
SAVEPOINT a;
SELECT outcome, attempt FROM idem_claim('six');
ROLLBACK TO a;
SELECT status, attempt FROM idem_get('six');
SELECT idem_complete('six', '1');
ROLLBACK TO a;
SELECT idem_complete('six', '2', :token);
COMMIT;
SELECT outcome, attempt, response FROM idem_claim('six');

-- A claim of this transaction, next to others that are not
SELECT token FROM idem_claim('seven') \gset
BEGIN;
SELECT outcome FROM idem_claim('eight');
SAVEPOINT a;
SELECT idem_complete('seven', '1');
ROLLBACK TO a;
SELECT idem_complete('seven', '1', :token), idem_complete('eight', '1');
COMMIT;

-- In the next transaction the right is gone.
BEGIN;
SELECT outcome FROM idem_claim('nine');
COMMIT;
SELECT idem_complete('nine');
BEGIN;
SELECT outcome FROM idem_claim('ten');
SELECT idem_complete('nine');
ROLLBACK;

--
-- plpgsql: an exception block is a subtransaction
--
CREATE FUNCTION pg_temp.pay(key text, amount int, fail boolean) RETURNS text LANGUAGE plpgsql AS $$
DECLARE c record;
BEGIN
    SELECT * INTO c FROM idem_claim(key, jsonb_build_object('amount', amount));
    IF c.outcome <> 'claimed' THEN RETURN c.outcome || ' ' || coalesce(c.response::text, '-'); END IF;
    BEGIN
        PERFORM idem_checkpoint(key, c.token, 'charging');
        IF fail THEN RAISE EXCEPTION 'card declined'; END IF;
        PERFORM idem_complete(key, to_jsonb(amount));
    EXCEPTION WHEN raise_exception THEN
        PERFORM idem_fail(key, to_jsonb(SQLERRM));
    END;
    RETURN 'done';
END $$;
SELECT pg_temp.pay('pay-1', 10, false);
SELECT pg_temp.pay('pay-1', 10, false);
SELECT pg_temp.pay('pay-1', 11, false);
SELECT pg_temp.pay('pay-2', 10, true);
SELECT pg_temp.pay('pay-2', 10, false);
SELECT status, response, checkpoint FROM idem_get('pay-2');

-- Errors of this extension are caught like any other, and leave the rest alone.
\set VERBOSITY terse
DO $$
DECLARE t bigint;
BEGIN
    SELECT token INTO t FROM idem_claim('caught');
    BEGIN PERFORM idem_complete('caught', token => t + 1); EXCEPTION WHEN SQLSTATE 'IK410' THEN RAISE INFO '%', SQLSTATE; END;
    BEGIN PERFORM idem_complete('caught', http_status => 1); EXCEPTION WHEN SQLSTATE 'IK400' THEN RAISE INFO '%', SQLSTATE; END;
    BEGIN PERFORM idem_complete('not there'); EXCEPTION WHEN SQLSTATE 'IK404' THEN RAISE INFO '%', SQLSTATE; END;
    PERFORM idem_complete('caught', '1');
    BEGIN PERFORM idem_complete('caught', '2'); EXCEPTION WHEN SQLSTATE 'IK409' THEN RAISE INFO '%', SQLSTATE; END;
END $$;
SELECT outcome, response FROM idem_claim('caught');

-- A procedure that commits between claim and completion
CREATE PROCEDURE pg_temp.two_transactions(key text) LANGUAGE plpgsql AS $$
DECLARE t bigint;
BEGIN
    SELECT token INTO t FROM idem_claim(key);
    COMMIT;
    BEGIN PERFORM idem_complete(key); EXCEPTION WHEN SQLSTATE 'IK410' THEN RAISE INFO '%', SQLSTATE; END;
    PERFORM idem_complete(key, '1', t);
    ROLLBACK;
    PERFORM idem_complete(key, '2', t);
    COMMIT;
END $$;
CALL pg_temp.two_transactions('procedure');
\set VERBOSITY sqlstate
SELECT outcome, response FROM idem_claim('procedure');

--
-- Deep: each level claims, each second one is rolled back
--
CREATE FUNCTION pg_temp.deep(level int, levels int) RETURNS int LANGUAGE plpgsql AS $$
BEGIN
    IF level > levels THEN RETURN 0; END IF;
    PERFORM idem_claim('deep-' || level);
    PERFORM pg_temp.deep(level + 1, levels);
    IF level % 2 = 0 THEN RAISE EXCEPTION 'back' USING ERRCODE = 'ZZ999'; END IF;
    PERFORM idem_complete('deep-' || level, to_jsonb(level));
    RETURN level;
EXCEPTION WHEN SQLSTATE 'ZZ999' THEN
    RETURN -level;
END $$;
SELECT pg_temp.deep(1, 20);
SELECT key, status, response FROM idempotency_keys WHERE key LIKE 'deep-%';
SELECT k, outcome FROM generate_series(1, 4) n, concat('deep-', n) k, idem_claim(k);
