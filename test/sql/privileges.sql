--
-- privileges: who may call what, and that the table is nobody's but its owner's
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
CREATE ROLE regress_idem_owner LOGIN;
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_admin;
CREATE ROLE regress_idem_none;
CREATE ROLE "regress_idem ""odd""";

-- How every function answers a role that calls it: 42501, or anything else
CREATE FUNCTION calls(role name) RETURNS TABLE (function text, allowed boolean) LANGUAGE plpgsql AS $$
DECLARE
    call text;
    state text;
BEGIN
    FOREACH call IN ARRAY ARRAY['idem_claim(NULL)', 'idem_complete(NULL)', 'idem_fail(NULL)', 'idem_renew(NULL, 1)', 'idem_checkpoint(NULL, 1, NULL)', 'idem_get(NULL)',
                                'idem_execute(NULL, NULL)', 'idem_once(NULL)', 'idem_once_many(NULL)', 'idem_claim_many(NULL)', 'idem_complete_many(NULL, NULL)',
                                'idem_resolve(NULL, NULL)', 'idem_forget(NULL)', 'idem_sweep(0)', 'idem_schedule(NULL)', 'idem_fingerprint(NULL)', 'idem_key(NULL)', 'idem_uuid(NULL)',
                                'idem_grant(NULL)', 'idem_revoke(NULL)'] LOOP
        state := NULL;
        function := split_part(call, '(', 1);
        BEGIN
            EXECUTE format('SET LOCAL ROLE %I', role);
            EXECUTE 'SELECT ' || call;
        EXCEPTION WHEN OTHERS THEN state := SQLSTATE;
        END;
        allowed := CASE state WHEN '42501' THEN false WHEN 'IK400' THEN true END;
        RETURN NEXT;
    END LOOP;
END $$;
GRANT EXECUTE ON FUNCTION calls TO PUBLIC;

-- PUBLIC
SELECT * FROM calls('regress_idem_none');

-- An application
SELECT idem_grant('regress_idem_app');
SELECT * FROM calls('regress_idem_app');
-- An administrator
SELECT idem_grant('regress_idem_admin', true);
SELECT function FROM calls('regress_idem_admin') WHERE NOT allowed;
-- An odd name
SELECT idem_grant('"regress_idem ""odd"""');
SELECT function FROM calls('regress_idem "odd"') WHERE NOT allowed;
-- Once more, and more than before
SELECT idem_grant('regress_idem_app', true);
SELECT function FROM calls('regress_idem_app') WHERE NOT allowed;
-- An application's rights don't take an administrator's back, idem_revoke does.
SELECT idem_grant('regress_idem_app');
SELECT function FROM calls('regress_idem_app') WHERE NOT allowed;
SELECT idem_revoke('regress_idem_app');
SELECT function FROM calls('regress_idem_app') WHERE allowed;
SELECT idem_revoke('regress_idem_app');
SELECT idem_revoke('"regress_idem ""odd"""');
SELECT function FROM calls('regress_idem "odd"') WHERE allowed;
SELECT idem_revoke('regress_idem_none');
SELECT function FROM calls('regress_idem_none') WHERE allowed;
SELECT function FROM calls('regress_idem_admin') WHERE NOT allowed;

-- The table and the sequence, of whoever may call the functions
SELECT idem_grant('regress_idem_app', true);
CREATE SCHEMA regress_idem_own AUTHORIZATION regress_idem_app;
SET ROLE regress_idem_app;
SELECT token FROM idem_claim('mine', '{"n": 1}') \gset
SELECT idem_complete('mine', '"secret"', :token);
SELECT outcome, response FROM idem_claim('mine', '{"n": 1}');
SELECT * FROM idempotency_keys;
SELECT count(*) FROM idempotency_keys;
INSERT INTO idempotency_keys DEFAULT VALUES;
UPDATE idempotency_keys SET ttl = '1 s';
DELETE FROM idempotency_keys;
TRUNCATE idempotency_keys;
BEGIN;
LOCK TABLE idempotency_keys IN ACCESS SHARE MODE;
ROLLBACK;
CREATE TABLE regress_idem_own.payments (scope text, key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
COPY idempotency_keys TO STDOUT;
ALTER TABLE idempotency_keys ADD x int;
SELECT last_value FROM idempotency_keys_token_seq;
SELECT nextval('idempotency_keys_token_seq');
SELECT setval('idempotency_keys_token_seq', 1);
-- nor may it give on what it was given.
SELECT idem_grant('regress_idem_none');
GRANT EXECUTE ON FUNCTION idem_forget TO regress_idem_none;
RESET ROLE;
DROP SCHEMA regress_idem_own;
SELECT has_function_privilege('regress_idem_none', 'idem_forget(text, text)', 'EXECUTE');

-- Without USAGE on the schema there is no calling anything; idem_grant gives
-- it where it is lacking.
CREATE SCHEMA regress_idem_schema;
ALTER EXTENSION idempotency SET SCHEMA regress_idem_schema;
SET ROLE regress_idem_app;
SELECT regress_idem_schema.idem_claim('mine');
RESET ROLE;
SELECT regress_idem_schema.idem_grant('regress_idem_app');
SET ROLE regress_idem_app;
SELECT outcome FROM regress_idem_schema.idem_claim('mine');
SELECT count(*) FROM regress_idem_schema.idempotency_keys;
RESET ROLE;
ALTER EXTENSION idempotency SET SCHEMA public;
REVOKE USAGE ON SCHEMA regress_idem_schema FROM regress_idem_app;
DROP SCHEMA regress_idem_schema;

-- Granting is the owner's: who was lent idem_grant has nothing to give.
GRANT EXECUTE ON FUNCTION idem_grant, idem_revoke TO regress_idem_none;
SET ROLE regress_idem_none;
SELECT idem_grant('regress_idem_none', true);
SELECT idem_revoke('regress_idem_app');
RESET ROLE;
REVOKE EXECUTE ON FUNCTION idem_grant, idem_revoke FROM regress_idem_none;
SELECT function FROM calls('regress_idem_none') WHERE allowed;
SELECT function FROM calls('regress_idem_app') WHERE NOT allowed;

-- No such role
SELECT idem_grant('regress_idem_nobody');
SELECT idem_revoke('regress_idem_nobody');

--
-- Row security concerns the functions as little as privileges on the table do
--
ALTER TABLE idempotency_keys ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
CREATE POLICY nothing ON idempotency_keys USING (false) WITH CHECK (false);
SET ROLE regress_idem_app;
SELECT outcome, response FROM idem_claim('mine', '{"n": 1}');
SELECT outcome FROM idem_claim('mine', '{"n": 2}');
SELECT token, outcome FROM idem_claim('hidden') \gset
\echo :outcome
SELECT idem_renew('hidden', :token) IS NOT NULL AS renewed;
SELECT idem_checkpoint('hidden', :token, 'x') IS NOT NULL AS noted;
SELECT idem_complete('hidden', '1', :token);
SELECT status, response FROM idem_get('hidden');
SELECT idem_forget('hidden');
SET row_security = off;
SELECT outcome, response FROM idem_claim('mine', '{"n": 1}');
RESET row_security;
RESET ROLE;
DROP POLICY nothing ON idempotency_keys;
ALTER TABLE idempotency_keys DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;

--
-- Whoever owns the table
--
ALTER TABLE idempotency_keys OWNER TO regress_idem_owner;
SET ROLE regress_idem_app;
SELECT outcome FROM idem_claim('another');
SELECT outcome, response FROM idem_claim('mine', '{"n": 1}');
RESET ROLE;
ALTER TABLE idempotency_keys OWNER TO CURRENT_USER;
-- If he takes all rights from himself, the functions work on.
REVOKE ALL ON idempotency_keys FROM CURRENT_USER;
SET ROLE regress_idem_app;
SELECT outcome FROM idem_claim('no rights');
SELECT idem_complete('no rights at all', '1', token) FROM idem_claim('no rights at all');
RESET ROLE;
GRANT ALL ON idempotency_keys TO CURRENT_USER;

-- A definer's function lends its rights.
CREATE FUNCTION lend(k text) RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS 'SELECT outcome::text FROM idem_claim(k)';
SET ROLE regress_idem_none;
SELECT idem_claim('lent');
SELECT lend('lent');
RESET ROLE;
DROP FUNCTION lend;

SELECT idem_revoke(r) FROM unnest('{regress_idem_app,regress_idem_admin,regress_idem_none}'::regrole[]) r;
DROP FUNCTION calls;
DROP ROLE regress_idem_owner, regress_idem_app, regress_idem_admin, regress_idem_none, "regress_idem ""odd""";
