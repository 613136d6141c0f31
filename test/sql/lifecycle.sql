--
-- lifecycle: the extension comes, goes and moves within one session that has cached its calls
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
SELECT count(*) FROM idem_claim('warm-up');

-- Calls that are kept: by prepared statements, in plpgsql, and in SQL functions
PREPARE claim(text) AS SELECT outcome::text, attempt FROM idem_claim($1);
PREPARE complete(text) AS SELECT idem_complete($1, '1', (SELECT token FROM idempotency_keys WHERE key = $1));
PREPARE get(text) AS SELECT status::text, response FROM idem_get($1);
CREATE FUNCTION life_claim(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE o text;
BEGIN
    SELECT outcome INTO o FROM idem_claim(k);
    RETURN o;
END $$;
CREATE PROCEDURE life_all(k text) LANGUAGE plpgsql AS $$
DECLARE c record;
BEGIN
    SELECT outcome::text, attempt, token INTO c FROM idem_claim(k, '{"n": 1}');
    PERFORM idem_checkpoint(k, c.token, 'x'), idem_renew(k, c.token, '1 hour');
    PERFORM idem_fail(k, '1', c.token, disposition => 'retry');
    SELECT outcome::text, attempt, token INTO c FROM idem_claim(k, '{"n": 1}');
    PERFORM idem_complete(k, '2', c.token);
    RAISE INFO '% % %', c.outcome, c.attempt, (SELECT concat(outcome, ' ', response) FROM idem_claim(k, '{"n": 1}'));
    RAISE INFO '%', (SELECT concat(status, ' ', response) FROM idem_get(k));
    RAISE INFO '%', idem_forget(k);
    SELECT outcome::text, response INTO c FROM idem_execute(k, 'SELECT count(*) FROM idem_claim_many(''{many-1,many-2,many-1}'') WHERE outcome = ''claimed''');
    RAISE INFO '% % % % %', c.outcome, c.response, idem_once(k), idem_once(k || '-once'), (SELECT array_agg(o) FROM idem_once_many(ARRAY[k || '-many', k || '-once']) o);
    RAISE INFO '%', idem_complete_many('{many-2,many-1}', NULL);
    PERFORM idem_forget(f) FROM unnest(ARRAY[k, k || '-once', k || '-many', 'many-1', 'many-2']) f;
END $$;
EXECUTE claim('a');
EXECUTE complete('a');
EXECUTE get('a');
SELECT life_claim('a'), life_claim('b');
\set VERBOSITY terse
CALL life_all('c');
\set VERBOSITY sqlstate

--
-- Dropped: an error, not a crash
--
DROP EXTENSION idempotency;
EXECUTE claim('a');
EXECUTE complete('a');
EXECUTE get('a');
SELECT life_claim('a');
CALL life_all('c');
SELECT idem_claim('a');
-- The library is still there.  A function that somebody made of it says what is missing.
CREATE FUNCTION stray_forget(text, text) RETURNS boolean LANGUAGE c AS '$libdir/idempotency', 'idem_forget';
\set VERBOSITY default
SELECT stray_forget('a', '');
\set VERBOSITY sqlstate

--
-- Made anew: as if nothing had been
--
CREATE EXTENSION idempotency;
EXECUTE claim('a');
EXECUTE complete('a');
EXECUTE get('a');
SELECT life_claim('a'), life_claim('b');
\set VERBOSITY terse
CALL life_all('c');
\set VERBOSITY sqlstate
SELECT stray_forget('b', ''), stray_forget('b', '');

--
-- Dropped and made anew in a transaction that rolls back
--
BEGIN;
DROP EXTENSION idempotency;
SAVEPOINT here;
EXECUTE claim('a');
ROLLBACK TO here;
SELECT stray_forget('a', '');
ROLLBACK TO here;
CREATE EXTENSION idempotency;
EXECUTE claim('a');
SELECT life_claim('a');
\set VERBOSITY terse
CALL life_all('c');
\set VERBOSITY sqlstate
ROLLBACK;
EXECUTE claim('a');
EXECUTE get('a');
SELECT life_claim('a');
\set VERBOSITY terse
CALL life_all('c');
\set VERBOSITY sqlstate

-- to a savepoint,
BEGIN;
SELECT outcome FROM idem_claim('mine');
SAVEPOINT here;
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
EXECUTE claim('a');
SELECT outcome FROM idem_claim('mine');
ROLLBACK TO here;
EXECUTE claim('a');
SELECT idem_complete('mine', '1');
COMMIT;
SELECT outcome FROM idem_claim('mine');

-- and a CREATE that is rolled back, with a claim in it.
DROP EXTENSION idempotency;
BEGIN;
CREATE EXTENSION idempotency;
EXECUTE claim('a');
SELECT life_claim('b');
ROLLBACK;
EXECUTE claim('a');
SELECT life_claim('b');
SELECT stray_forget('a', '');
CREATE EXTENSION idempotency;
EXECUTE claim('a');
SELECT life_claim('b');

-- Dropped by the transaction that has claimed
BEGIN;
SELECT life_claim('open');
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
SELECT life_claim('open'), life_claim('open');
COMMIT;
SELECT life_claim('open'), life_claim('a');

-- From inside a function that has called it already
\set VERBOSITY terse
DO $$
BEGIN
    RAISE INFO '%', life_claim('in');
    DROP EXTENSION idempotency;
    CREATE EXTENSION idempotency;
    RAISE INFO '%', life_claim('in');
    RAISE INFO '%', life_claim('in');
END $$;
\set VERBOSITY sqlstate

-- Many times
DO $$
BEGIN
    FOR i IN 1 .. 20 LOOP
        DROP EXTENSION idempotency;
        CREATE EXTENSION idempotency;
        IF life_claim('many') <> 'claimed' OR life_claim('many') <> 'processing' THEN RAISE EXCEPTION 'turn %', i; END IF;
    END LOOP;
END $$;

--
-- Another schema
--
CREATE SCHEMA regress_idem_a;
CREATE SCHEMA regress_idem_b;
SELECT life_claim('moved');
ALTER EXTENSION idempotency SET SCHEMA regress_idem_a;
SELECT life_claim('moved');
SET search_path = regress_idem_a, public;
SELECT life_claim('moved'), life_claim('moved 2');
EXECUTE claim('moved');
\set VERBOSITY terse
CALL life_all('c');
\set VERBOSITY sqlstate
BEGIN;
ALTER EXTENSION idempotency SET SCHEMA regress_idem_b;
SELECT outcome FROM regress_idem_b.idem_claim('moved');
SELECT outcome FROM regress_idem_b.idem_claim('moved 3');
SET LOCAL search_path = regress_idem_b, public;
SELECT life_claim('moved 3');
ROLLBACK;
SELECT life_claim('moved'), life_claim('moved 3');
ALTER SCHEMA regress_idem_a RENAME TO regress_idem_c;
SELECT outcome FROM regress_idem_c.idem_claim('moved 3');
-- Dropped, and made in another one at once
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency SCHEMA regress_idem_b;
SET search_path = regress_idem_b, public;
SELECT life_claim('moved'), life_claim('moved');
EXECUTE claim('moved');
-- A schema that goes takes the extension along.
SET client_min_messages = warning;
DROP SCHEMA regress_idem_b CASCADE;
RESET client_min_messages;
SELECT life_claim('moved');
RESET search_path;
DROP SCHEMA regress_idem_c;

--
-- Objects that are there already are not adopted
--
CREATE TABLE idempotency_keys (scope text, key text, PRIMARY KEY (scope, key));
CREATE EXTENSION idempotency;
DROP TABLE idempotency_keys;
CREATE SEQUENCE idempotency_keys_token_seq;
CREATE EXTENSION idempotency;
DROP SEQUENCE idempotency_keys_token_seq;
CREATE TYPE idem_status AS ENUM ('completed');
CREATE EXTENSION idempotency;
DROP TYPE idem_status;
CREATE FUNCTION idem_forget(key text, scope text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE EXTENSION idempotency;
DROP FUNCTION idem_forget(text, text);
SELECT count(*) FROM pg_extension WHERE extname = 'idempotency';
CREATE EXTENSION idempotency;
SELECT life_claim('after'), life_claim('after');

-- Its parts go with it alone, and it doesn't go while somebody depends on it.
DROP TABLE idempotency_keys;
DROP FUNCTION idem_forget(text, text);
CREATE TABLE payments (scope text, key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
DROP EXTENSION idempotency;
SET client_min_messages = warning;
DROP EXTENSION idempotency CASCADE;
RESET client_min_messages;
SELECT count(*) FROM pg_class WHERE relname LIKE 'idempotency_keys%';
CREATE EXTENSION idempotency;
SELECT life_claim('after'), life_claim('after');

-- It is a heap, whatever the server makes by default.
CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler;
SET default_table_access_method = other;
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
RESET default_table_access_method;
DROP ACCESS METHOD other;
SELECT life_claim('after'), life_claim('after');

DEALLOCATE ALL;
DROP TABLE payments;
DROP FUNCTION life_claim, stray_forget;
DROP PROCEDURE life_all;
