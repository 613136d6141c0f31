--
-- scope: whom idempotency.scope confines to one, and that there is no way out
--
TRUNCATE idempotency_keys;
\pset null -
CREATE ROLE regress_idem_confined LOGIN PASSWORD 'regress';
CREATE ROLE regress_idem_free;
SELECT idem_grant('regress_idem_confined', true), idem_grant('regress_idem_free');
SELECT idem_complete('theirs', '"of tenant-2"', token, 'tenant-2') FROM idem_claim('theirs', scope => 'tenant-2');
SELECT idem_complete('theirs', '"of nobody"', token) FROM idem_claim('theirs');
SELECT outcome FROM idem_claim('running', scope => 'tenant-2');
SELECT token AS their_token FROM idempotency_keys WHERE key = 'running' \gset

-- Not every server lets a test log in as somebody else, so here the setting
-- comes with the database; a login that brings it along follows at the end.
\set VERBOSITY sqlstate
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET idempotency.scope = 'tenant-1';
ALTER ROLE regress_idem_confined SET idempotency.scope = 'tenant-1';
\c
SET SESSION AUTHORIZATION regress_idem_confined;
--
-- The default scope means his own, in every call
--
SHOW idempotency.scope;
SELECT outcome FROM idem_claim('theirs');
SELECT token FROM idem_claim('mine') \gset
SELECT scope, key, status FROM idem_get('mine');
SELECT idem_renew('mine', :token) IS NOT NULL AS renewed;
SELECT idem_checkpoint('mine', :token, 'x') IS NOT NULL AS noted;
SELECT idem_complete('mine', '1', :token);
SELECT outcome, response FROM idem_claim('mine');
SELECT outcome, response FROM idem_claim('mine', scope => 'tenant-1');
SELECT scope, key, status FROM idem_get('mine', 'tenant-1');
SELECT response, replayed FROM idem_execute('executed', 'SELECT scope FROM idem_get(''mine'')');
SELECT idem_once('message'), idem_once('message', 'tenant-1');
SELECT * FROM idem_once_many('{message,theirs,message-2}');
SELECT key, outcome, response FROM idem_claim_many('{theirs,mine,many}');
SELECT idem_complete_many(array_agg(key), array_agg(token)) FROM idem_claim_many('{many-3,many-4}');
SELECT idem_fail('failed', '1', token, disposition => 'unknown') FROM idem_claim('failed', scope => 'tenant-1');
SELECT idem_resolve('failed', 'completed', '2'), idem_resolve('failed', 'completed', '2', 'tenant-1');
SELECT idem_forget('failed'), idem_forget('failed', 'tenant-1'), idem_forget('running');

--
-- An explicit other one is refused, in every call, whether it exists or not
--
SELECT idem_claim('theirs', scope => 'tenant-2');
SELECT idem_claim('theirs', scope => 'tenant-3');
SELECT idem_claim('theirs', scope => 'Tenant-1');
SELECT idem_claim('theirs', scope => 'tenant-1 ');
SELECT idem_claim('theirs', scope => 'tenant-');
SELECT idem_claim('theirs', scope => 'tenant-11');
SELECT idem_complete('running', '1', :their_token, 'tenant-2');
SELECT idem_fail('running', '1', :their_token, 'tenant-2');
SELECT idem_renew('running', :their_token, scope => 'tenant-2');
SELECT idem_checkpoint('running', :their_token, 'x', scope => 'tenant-2');
SELECT * FROM idem_get('theirs', 'tenant-2');
SELECT * FROM idem_get('none', 'tenant-2');
SELECT idem_resolve('running', 'completed', scope => 'tenant-2');
SELECT idem_forget('theirs', 'tenant-2');
SELECT idem_execute('theirs', 'SELECT 1', scope => 'tenant-2');
SELECT idem_execute('none', 'SELECT 1', scope => 'tenant-2');
SELECT idem_once('theirs', 'tenant-2');
SELECT idem_once('none', 'tenant-2');
SELECT * FROM idem_once_many('{none}', 'tenant-2');
SELECT * FROM idem_once_many('{}', 'tenant-2');
SELECT * FROM idem_claim_many('{theirs,none}', scope => 'tenant-2');
SELECT idem_complete_many('{running}', ARRAY[:their_token], scope => 'tenant-2');
-- A command is as confined as its caller.
SELECT outcome, response->>'sqlstate' AS sqlstate FROM idem_execute('inner', 'SELECT idem_claim(''theirs'', scope => ''tenant-2'')');
SELECT outcome, response->>'sqlstate' AS sqlstate FROM idem_execute('inner-set', 'SET idempotency.scope = ''tenant-2''');
-- Bad input stays bad input.
SELECT idem_claim('theirs', scope => NULL);
SELECT idem_claim('');
SELECT idem_once('theirs', NULL);
\set VERBOSITY default
SELECT idem_claim('theirs', scope => 'tenant-2');
\set VERBOSITY sqlstate
-- Names are made without regard to it.
SELECT idem_uuid('k') = idem_uuid('k', '') AS uuid, idem_uuid('k', 'tenant-2') IS NOT NULL AS other, idem_key('a') AS key;

--
-- He can't get out of it
--
SET idempotency.scope = 'tenant-2';
SET idempotency.scope = '';
SET SESSION idempotency.scope TO DEFAULT;
SELECT set_config('idempotency.scope', '', false);
UPDATE pg_settings SET setting = '' WHERE name = 'idempotency.scope';
BEGIN;
SET LOCAL idempotency.scope = '';
ROLLBACK;
CREATE FUNCTION pg_temp.get_out(k text) RETURNS text LANGUAGE sql SET idempotency.scope = '' AS 'SELECT outcome::text FROM idem_claim(k)';
ALTER ROLE regress_idem_confined SET idempotency.scope = 'tenant-2';
ALTER ROLE regress_idem_confined RESET idempotency.scope;
ALTER ROLE CURRENT_USER RESET ALL;
RESET idempotency.scope;
SHOW idempotency.scope;
RESET ALL;
SHOW idempotency.scope;
SET ROLE NONE;
SELECT outcome, response FROM idem_claim('mine');
SELECT idem_claim('theirs', scope => 'tenant-2');
SET SESSION AUTHORIZATION DEFAULT;
DISCARD ALL;
SHOW idempotency.scope;

--
-- nor before the library is loaded, where the server has not loaded it
--
-- Whether each of these attempts is refused at once or comes to nothing later
-- depends on that; what counts is what is within reach afterwards.
\set VERBOSITY terse
\set reach 'DO $$ BEGIN PERFORM idem_get(\'theirs\', \'tenant-2\'); RAISE INFO \'got out\'; EXCEPTION WHEN insufficient_privilege THEN RAISE INFO \'confined\'; END $$'
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
DO $$ BEGIN SET idempotency.scope = 'tenant-2'; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
DO $$ BEGIN SET idempotency.scope = ''; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
DO $$ BEGIN SET idempotency.scope TO DEFAULT; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
DO $$ BEGIN RESET idempotency.scope; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
BEGIN;
DO $$ BEGIN SET LOCAL idempotency.scope = 'tenant-2'; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:reach;
COMMIT;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
BEGIN;
SAVEPOINT a;
DO $$ BEGIN SET idempotency.scope = 'tenant-2'; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:reach;
ROLLBACK TO a;
:reach;
COMMIT;
:reach;
\c
SET SESSION AUTHORIZATION regress_idem_confined;
SET client_min_messages = error;
DO $$ BEGIN ALTER ROLE CURRENT_USER SET idempotency.scope = 'tenant-2'; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
DO $$ BEGIN ALTER ROLE CURRENT_USER RESET idempotency.scope; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
DO $$ BEGIN ALTER ROLE CURRENT_USER RESET ALL; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET idempotency.scope', current_database()); EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
RESET SESSION AUTHORIZATION;
SELECT setconfig FROM pg_db_role_setting WHERE setrole = 'regress_idem_confined'::regrole;
ALTER DATABASE :"db" RESET idempotency.scope;
\set VERBOSITY sqlstate

--
-- Who isn't confined may use all of them, and only a superuser can confine
--
\c
SET SESSION AUTHORIZATION regress_idem_free;
SELECT outcome, response FROM idem_claim('theirs', scope => 'tenant-2');
SELECT outcome, response FROM idem_claim('theirs');
SELECT outcome FROM idem_claim('mine', scope => 'tenant-1');
SET idempotency.scope = 'tenant-1';
ALTER ROLE regress_idem_free SET idempotency.scope = 'tenant-1';
RESET SESSION AUTHORIZATION;

-- A superuser's session, one transaction of it, or one function
SET idempotency.scope = 'tenant-1';
SELECT outcome FROM idem_claim('mine');
SELECT idem_claim('theirs', scope => 'tenant-2');
RESET idempotency.scope;
BEGIN;
SET LOCAL idempotency.scope = 'tenant-2';
SELECT outcome, response FROM idem_claim('theirs');
COMMIT;
SELECT outcome, response FROM idem_claim('theirs');
CREATE FUNCTION pg_temp.claim_as(k text) RETURNS jsonb LANGUAGE sql SET idempotency.scope = 'tenant-2' AS 'SELECT response FROM idem_claim(k)';
SELECT pg_temp.claim_as('theirs');
-- An odd name
SET idempotency.scope = E'tenant \'\u00e4\' \\ ';
SELECT outcome FROM idem_claim('odd');
SELECT scope || '|' AS scope, key FROM idem_get('odd', E'tenant \'\u00e4\' \\ ');
SELECT outcome FROM idem_claim('odd', scope => E'tenant \'\u00e4\' \\');
RESET idempotency.scope;

--
-- Logging in as a role that ALTER ROLE has confined, where that can be done
--
-- These say nothing as long as all is well, so that it is the same to have
-- left them out.
SELECT coalesce(bool_and(auth_method IN ('trust', 'password', 'md5', 'scram-sha-256')), false) AS can_log_in
    FROM pg_hba_file_rules WHERE (type = 'local') = (inet_server_addr() IS NULL) AND database <> '{replication}' \gset
SELECT current_setting('shared_preload_libraries') NOT LIKE '%idempotency%' AS loaded_later \gset
\set confined 'DO $$ BEGIN PERFORM idem_get(\'theirs\', \'tenant-2\'); RAISE EXCEPTION \'got out\'; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$'
\set his_own 'DO $$ BEGIN PERFORM idem_claim(\'login\'); IF NOT EXISTS (SELECT FROM idem_get(\'login\', \'tenant-1\')) THEN RAISE EXCEPTION \'not his own\'; END IF; END $$'
\set login 'dbname=' :db ' user=regress_idem_confined password=regress'
\set VERBOSITY terse
\if :can_log_in
\c -reuse-previous=on :login
SET client_min_messages = error;
:his_own;
:confined;
\c
SET client_min_messages = error;
DO $$ BEGIN SET idempotency.scope = ''; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
:confined;
DISCARD ALL;
SET client_min_messages = error;
:confined;
\if :loaded_later
-- An option of the connection.  (If the library is loaded it can't be opened.)
\set options :login ' options=\'-c idempotency.scope=tenant-2\''
\c -reuse-previous=on :options
SET client_min_messages = error;
:confined;
\set options :login ' options=\'-c idempotency.scope=\''
\c -reuse-previous=on :options
SET client_min_messages = error;
:confined;
BEGIN;
DO $$ BEGIN SET LOCAL idempotency.scope = ''; EXCEPTION WHEN insufficient_privilege THEN NULL; END $$;
COMMIT;
:confined;
RESET ALL;
SET client_min_messages = error;
:confined;
\endif
\set connection 'dbname=' :db
\c -reuse-previous=off :connection
\endif

-- Theirs has stayed as it was.
SELECT scope, key, status, response FROM idempotency_keys WHERE key IN ('theirs', 'running') ORDER BY scope, key;
SELECT idem_revoke('regress_idem_confined'), idem_revoke('regress_idem_free');
DROP ROLE regress_idem_confined, regress_idem_free;
