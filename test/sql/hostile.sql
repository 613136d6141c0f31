--
-- hostile: objects that lie in wait for a call, in pg_temp or in a schema first in search_path
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app', true);
CREATE SCHEMA regress_idem_trap AUTHORIZATION regress_idem_app;
SELECT idem_complete('before', '"genuine"', token) FROM idem_claim('before', '{"n": 1}');

SET ROLE regress_idem_app;
-- Everything that somebody could hope the functions look up by name: it says
-- so when it is called, and answers wrongly.
CREATE FUNCTION regress_idem_trap.trap() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN NULL; END $$;
CREATE TABLE regress_idem_trap.idempotency_keys (scope text, key text, operation text, request_hash bytea, status text, token bigint, response jsonb);
INSERT INTO regress_idem_trap.idempotency_keys VALUES ('', 'before', '', NULL, 'completed', 1, '"forged"'), ('', 'new', '', NULL, 'completed', 1, '"forged"');
CREATE TRIGGER trap BEFORE INSERT OR UPDATE OR DELETE ON regress_idem_trap.idempotency_keys EXECUTE FUNCTION regress_idem_trap.trap();
CREATE SEQUENCE regress_idem_trap.idempotency_keys_token_seq;
CREATE FUNCTION regress_idem_trap.trap_text(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN true; END $$;
CREATE FUNCTION regress_idem_trap.trap_bytea(bytea, bytea) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN true; END $$;
CREATE FUNCTION regress_idem_trap.trap_jsonb(jsonb, jsonb) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN true; END $$;
CREATE FUNCTION regress_idem_trap.trap_timestamptz(timestamptz, timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN true; END $$;
CREATE FUNCTION regress_idem_trap.trap_bigint(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN true; END $$;
CREATE OPERATOR regress_idem_trap.= (FUNCTION = regress_idem_trap.trap_text, LEFTARG = text, RIGHTARG = text);
CREATE OPERATOR regress_idem_trap.= (FUNCTION = regress_idem_trap.trap_bytea, LEFTARG = bytea, RIGHTARG = bytea);
CREATE OPERATOR regress_idem_trap.= (FUNCTION = regress_idem_trap.trap_jsonb, LEFTARG = jsonb, RIGHTARG = jsonb);
CREATE OPERATOR regress_idem_trap.= (FUNCTION = regress_idem_trap.trap_bigint, LEFTARG = bigint, RIGHTARG = bigint);
CREATE OPERATOR regress_idem_trap.< (FUNCTION = regress_idem_trap.trap_timestamptz, LEFTARG = timestamptz, RIGHTARG = timestamptz);
CREATE OPERATOR regress_idem_trap.<= (FUNCTION = regress_idem_trap.trap_timestamptz, LEFTARG = timestamptz, RIGHTARG = timestamptz);
CREATE OPERATOR regress_idem_trap.> (FUNCTION = regress_idem_trap.trap_timestamptz, LEFTARG = timestamptz, RIGHTARG = timestamptz);
CREATE FUNCTION regress_idem_trap.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN '2000-01-01'; END $$;
CREATE FUNCTION regress_idem_trap.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN '2000-01-01'; END $$;
CREATE FUNCTION regress_idem_trap.nextval(regclass) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN 1; END $$;
CREATE FUNCTION regress_idem_trap.sha256(bytea) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN ''; END $$;
CREATE FUNCTION regress_idem_trap.numeric_send(numeric) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN ''; END $$;
CREATE FUNCTION regress_idem_trap.idem_fingerprint(jsonb, text[] DEFAULT NULL) RETURNS bytea LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN '\x00'; END $$;
CREATE FUNCTION regress_idem_trap.idem_get(text, text DEFAULT '') RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE INFO 'trapped'; RETURN 'forged'; END $$;
CREATE TYPE regress_idem_trap.idem_status AS ENUM ('completed', 'processing');
CREATE TYPE regress_idem_trap.idem_outcome AS ENUM ('claimed');
CREATE TYPE regress_idem_trap.idem_disposition AS ENUM ('final');
CREATE DOMAIN regress_idem_trap.jsonb AS text;
CREATE DOMAIN regress_idem_trap.bytea AS text;
CREATE DOMAIN regress_idem_trap.timestamptz AS text;
CREATE COLLATION regress_idem_trap."C" FROM "POSIX";
-- The same in pg_temp, which is searched for tables and types before all else
CREATE TEMP TABLE idempotency_keys (LIKE regress_idem_trap.idempotency_keys);
INSERT INTO pg_temp.idempotency_keys SELECT * FROM regress_idem_trap.idempotency_keys;
CREATE TRIGGER trap BEFORE INSERT OR UPDATE OR DELETE ON pg_temp.idempotency_keys EXECUTE FUNCTION regress_idem_trap.trap();
CREATE TEMP SEQUENCE idempotency_keys_token_seq;
CREATE TYPE pg_temp.idem_status AS ENUM ('completed', 'processing');
CREATE DOMAIN pg_temp.jsonb AS text;
CREATE TEMP TABLE pg_extension (oid oid, extname name, extnamespace oid);
INSERT INTO pg_temp.pg_extension VALUES (1, 'idempotency', 'regress_idem_trap'::regnamespace);

-- Every call, and not one trap goes off
CREATE PROCEDURE regress_idem_trap.all_calls(k pg_catalog.text) LANGUAGE plpgsql AS $$
DECLARE
    c record;
    t pg_catalog.int8;
BEGIN
    SELECT * INTO c FROM public.idem_claim('before', '{"n": 1}'::pg_catalog.jsonb);
    RAISE INFO '% %', c.outcome, c.response;
    SELECT * INTO c FROM public.idem_claim('before', '{"n": 2}'::pg_catalog.jsonb);
    RAISE INFO '%', c.outcome;
    SELECT * INTO c FROM public.idem_claim(k, '{"n": 1, "m": [1.50]}'::pg_catalog.jsonb, operation => 'pay');
    RAISE INFO '% %', c.outcome, c.attempt;
    t := c.token;
    PERFORM public.idem_checkpoint(k, t, 'sent', '1'::pg_catalog.jsonb);
    PERFORM public.idem_renew(k, t, '1 hour');
    PERFORM public.idem_fail(k, '"busy"'::pg_catalog.jsonb, t, disposition => 'retry'::public.idem_disposition);
    SELECT * INTO c FROM public.idem_claim(k, '{"n": 1, "m": [1.5]}'::pg_catalog.jsonb, operation => 'pay');
    RAISE INFO '% % % %', c.outcome, c.attempt, c.checkpoint, pg_catalog.int8gt(c.token, t);
    PERFORM public.idem_complete(k, '{"receipt": 7}'::pg_catalog.jsonb, c.token, http_status => 201, headers => '[["A","1"]]'::pg_catalog.jsonb, body => '\x00'::pg_catalog.bytea);
    RAISE INFO '%', public.idem_complete(k, '{"receipt": 7.0}'::pg_catalog.jsonb, c.token, http_status => 201, headers => '[["A","1"]]'::pg_catalog.jsonb, body => '\x00'::pg_catalog.bytea);
    SELECT * INTO c FROM public.idem_get(k);
    RAISE INFO '% %', c.status, c.response;
    PERFORM public.idem_claim('u', scope => 'hostile');
    PERFORM public.idem_fail('u', scope => 'hostile', disposition => 'unknown'::public.idem_disposition);
    RAISE INFO '% %', public.idem_resolve('u', 'completed'::public.idem_status, scope => 'hostile'), public.idem_forget('u', 'hostile');
    SELECT * INTO c FROM public.idem_execute(k || '-executed', 'SELECT 1 AS one, $1 AS args', '{"n": 1.50}'::pg_catalog.jsonb);
    RAISE INFO '% %', c.outcome, c.response;
    SELECT * INTO c FROM public.idem_execute(k || '-failed', 'SELECT 1/0');
    RAISE INFO '% %', c.outcome, c.response;
    RAISE INFO '% %', public.idem_once(k || '-once'), public.idem_once(k || '-once');
    FOR c IN SELECT * FROM public.idem_once_many(ARRAY[k || '-many', k || '-once']) LOOP RAISE INFO '%', c; END LOOP;
    FOR c IN SELECT ordinal, outcome, response FROM public.idem_claim_many(ARRAY['before', k || '-b', k || '-a'], ARRAY['{"n": 1}', '1', '2']::pg_catalog.jsonb[]) LOOP RAISE INFO '%', c; END LOOP;
    RAISE INFO '%', public.idem_complete_many(ARRAY[k || '-a', k || '-b'], NULL, ARRAY['1', '2']::pg_catalog.jsonb[]);
    RAISE INFO '% %', public.idem_key('a', 'b:c'), public.idem_uuid('k');
    RAISE INFO '%', public.idem_fingerprint('{"a": 1.50}'::pg_catalog.jsonb);
END $$;
\set VERBOSITY terse
CALL regress_idem_trap.all_calls('plain');
SET search_path = regress_idem_trap, pg_temp, public, pg_catalog;
CALL regress_idem_trap.all_calls('schema');
SET search_path = pg_temp, regress_idem_trap, public, pg_catalog;
CALL regress_idem_trap.all_calls('temp');
SET search_path = '';
CALL regress_idem_trap.all_calls('empty');
SET search_path = 'does not exist';
CALL regress_idem_trap.all_calls('absent');
RESET search_path;
-- The trap tables are as they were made.
SELECT count(*) FROM pg_temp.idempotency_keys;
SELECT count(*) FROM regress_idem_trap.idempotency_keys;
RESET ROLE;
SELECT key, status, attempt, response FROM public.idempotency_keys WHERE key IN ('before', 'plain', 'schema', 'temp', 'empty', 'absent') ORDER BY key;

-- By whoever calls it with a superuser's rights, too
SET search_path = regress_idem_trap, pg_temp, public, pg_catalog;
CALL regress_idem_trap.all_calls('superuser');
RESET search_path;
CREATE ROLE regress_idem_none;
SET search_path = regress_idem_trap, pg_temp, public, pg_catalog;
SELECT public.idem_grant('regress_idem_none', true), public.idem_revoke('regress_idem_none');
RESET search_path;

-- A function of the same name beside ours, where someone may create one
CREATE FUNCTION public.idem_claim(key text) RETURNS text LANGUAGE sql AS $$ SELECT 'forged' $$;
CREATE FUNCTION public.idem_forget(int) RETURNS text LANGUAGE sql AS $$ SELECT 'forged' $$;
REVOKE EXECUTE ON FUNCTION public.idem_claim(text), public.idem_forget(int) FROM PUBLIC;
SELECT public.idem_grant('regress_idem_none', true);
SELECT has_function_privilege('regress_idem_none', 'public.idem_forget(text, text)', 'EXECUTE') AS ours, has_function_privilege('regress_idem_none', 'public.idem_forget(int)', 'EXECUTE') AS theirs;
SELECT public.idem_revoke('regress_idem_none');
DROP FUNCTION public.idem_claim(text), public.idem_forget(int);

DROP TABLE pg_temp.pg_extension, pg_temp.idempotency_keys;
DROP SEQUENCE pg_temp.idempotency_keys_token_seq;
DROP TYPE pg_temp.idem_status, pg_temp.jsonb;

--
-- The extension itself in a schema with an odd name, which nobody searches
--
CREATE SCHEMA "regress_idem ""Odd"" ; --";
ALTER EXTENSION idempotency SET SCHEMA "regress_idem ""Odd"" ; --";
SET search_path = pg_catalog;
SELECT outcome FROM "regress_idem ""Odd"" ; --".idem_claim('odd');
SELECT outcome, response FROM "regress_idem ""Odd"" ; --".idem_claim('before', '{"n": 1}');
SELECT "regress_idem ""Odd"" ; --".idem_grant('regress_idem_none');
SET ROLE regress_idem_none;
SELECT "regress_idem ""Odd"" ; --".idem_complete('odd 2', '1', token) FROM "regress_idem ""Odd"" ; --".idem_claim('odd 2');
SELECT status FROM "regress_idem ""Odd"" ; --".idem_get('odd');
RESET ROLE;
SELECT "regress_idem ""Odd"" ; --".idem_revoke('regress_idem_none');
RESET search_path;
ALTER EXTENSION idempotency SET SCHEMA public;
REVOKE ALL ON SCHEMA "regress_idem ""Odd"" ; --" FROM regress_idem_none;
DROP SCHEMA "regress_idem ""Odd"" ; --";
SELECT outcome FROM idem_claim('odd');

SET client_min_messages = warning;
DROP SCHEMA regress_idem_trap CASCADE;
RESET client_min_messages;
SELECT idem_revoke('regress_idem_app');
DROP ROLE regress_idem_app, regress_idem_none;
