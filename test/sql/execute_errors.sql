--
-- execute_errors: which errors of a command are kept, which are raised, with
-- whose rights it is run, and what idem_execute refuses
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set shown 'outcome, attempt, response, replayed'
SET statement_timeout = '20s';

CREATE TABLE effects (n int CHECK (n < 100), note text);
CREATE FUNCTION raise(state text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO effects VALUES (1, state);
    RAISE EXCEPTION 'the message of %', state USING ERRCODE = state, DETAIL = 'The detail.', HINT = 'The hint.';
END $$;
-- What comes of a command: raised, or stored; and then of the key.
CREATE FUNCTION pg_temp.try(command text, OUT first text, OUT state text, OUT second text, OUT replay_differs boolean, OUT effects bigint) LANGUAGE plpgsql AS $$
DECLARE
    r record;
    again record;
BEGIN
    BEGIN
        r := idem_execute(command, command);
        first := concat_ws(' ', r.outcome, CASE WHEN r.replayed THEN 'again' END);
        state := r.response->>'sqlstate';
    EXCEPTION WHEN OTHERS OR query_canceled THEN
        first := 'raised';
        state := SQLSTATE;
    END;
    again := idem_execute(command, 'SELECT 1');
    second := concat_ws(' ', again.outcome, CASE WHEN again.replayed THEN 'again' END);
    IF again.replayed THEN
        replay_differs := to_jsonb(r) - 'replayed' <> to_jsonb(again) - 'replayed';
    END IF;
    effects := (SELECT count(*) FROM effects);
END $$;

--
-- Kept: what the request has brought about
--
SELECT :shown FROM idem_execute('kept', 'SELECT raise(''ZZ001'')');
SELECT :shown FROM idem_execute('kept', 'SELECT 1');
SELECT outcome, attempt, response, token IS NOT NULL AS token FROM idem_claim('kept');
SELECT status, lease_until, response, completed_at >= created_at AS completed FROM idem_get('kept');
SELECT count(*) FROM effects;
-- What an error doesn't tell is null.
SELECT :shown, http_status, headers, body FROM idem_execute('bare', 'SELECT 1/0');
SELECT response = '{"sqlstate": "22012", "message": "division by zero", "detail": null, "hint": null}' AS well FROM idem_execute('bare', 'SELECT 1');
SELECT response FROM idem_execute('only-hint', $$DO 'BEGIN RAISE EXCEPTION USING MESSAGE = '''', HINT = ''It''''s "odd" \ or not.''; END'$$);
SELECT response FROM idem_execute('odd', $$DO E'BEGIN RAISE EXCEPTION E''\\u20ac\\n\\U0001F600''; END'$$);

-- Of every class but those that say nothing about the request
SELECT code, t.* FROM unnest('{01000,02000,03000,09000,0A000,0B000,0L000,0P000,20000,21000,22000,22P02,23000,23505,23503,23514,24000,25000,25006,26000,27000,28000,2B000,2D000,2F000,34000,38000,39000,3B000,3D000,3F000,42000,42501,44000,54000,54001,55000,55006,55P02,72000,F0000,HV000,P0000,P0001,P0002,IK400,IK404,IK409,IK410,IK413,ZZ999,5A000,99999}'::text[]) code,
    pg_temp.try(format('SELECT raise(%L)', code)) t
    WHERE t.first <> 'failed' OR t.state IS DISTINCT FROM code OR t.second <> 'failed again' OR t.replay_differs OR t.effects <> 0;
-- Real ones
\pset format unaligned
SELECT command, t.* FROM unnest(ARRAY['SELECT 1 +', 'no such command', 'SELECT * FROM no_such_table', 'SELECT no_such_function()', 'SELECT $2', 'SELECT ''x''::int', 'SELECT 2147483647 + 1',
    'INSERT INTO effects VALUES (1, ''lost''); INSERT INTO effects VALUES (100)', 'INSERT INTO effects VALUES (2); SELECT 1/0', 'INSERT INTO effects VALUES (3); no such command',
    'CREATE TABLE effects ()', 'DO $$ BEGIN COMMIT; END $$', 'DO $$ BEGIN ROLLBACK; END $$', 'VACUUM effects', 'CREATE DATABASE regress_idem', 'SELECT idem_claim(NULL)', 'SELECT idem_complete(''nothing'', token => 1)',
    'SELECT idem_execute(''inner'', ''COMMIT'')', 'CREATE FUNCTION pg_temp.forever() RETURNS int LANGUAGE sql AS ''SELECT 1''; CREATE OR REPLACE FUNCTION pg_temp.forever() RETURNS int LANGUAGE sql AS ''SELECT pg_temp.forever() + 1''; SELECT pg_temp.forever()']) command, pg_temp.try(command) t;
\pset format aligned
-- A COMMIT inside a procedure
CREATE PROCEDURE commits() LANGUAGE plpgsql AS $$ BEGIN INSERT INTO effects VALUES (3); COMMIT; INSERT INTO effects VALUES (4); END $$;
SELECT :shown FROM idem_execute('commits', 'CALL commits()');
SELECT count(*) FROM effects;

-- Caught by the command itself, it's no error of it.
SELECT :shown FROM idem_execute('caught', $$DO 'BEGIN INSERT INTO effects VALUES (5, ''kept''); BEGIN INSERT INTO effects VALUES (6, ''undone''); PERFORM 1/0; EXCEPTION WHEN division_by_zero THEN NULL; END; END'$$);
SELECT note FROM effects;
DELETE FROM effects;
-- Nor is a warning or notice, and it is told once.
\set VERBOSITY terse
SELECT outcome FROM idem_execute('notice', $$DO 'BEGIN RAISE NOTICE ''noticed''; RAISE WARNING ''warned''; END'$$);
SELECT outcome FROM idem_execute('notice', $$DO 'BEGIN RAISE NOTICE ''noticed''; RAISE WARNING ''warned''; END'$$);
\set VERBOSITY sqlstate

-- The claim isn't lost with the effects, nor is what came before or comes after.
BEGIN;
INSERT INTO effects VALUES (10, 'before');
SELECT outcome FROM idem_execute('stays', 'INSERT INTO effects VALUES (11); SELECT 1/0');
SELECT outcome, replayed FROM idem_execute('stays', 'INSERT INTO effects VALUES (12)');
INSERT INTO effects VALUES (13, 'after');
SELECT outcome FROM idem_execute('stays, too', 'INSERT INTO effects VALUES (14) RETURNING n');
COMMIT;
SELECT outcome, replayed FROM idem_execute('stays', 'INSERT INTO effects VALUES (12)');
SELECT n FROM effects ORDER BY n;
TRUNCATE effects;

-- What the command has set, opened, created or listened to goes with it as well.
BEGIN;
SELECT outcome FROM idem_execute('undone', 'SET work_mem = ''77kB''; DECLARE c CURSOR FOR SELECT 1; CREATE TABLE gone (); CREATE TEMP TABLE gone_too (); SET LOCAL ROLE pg_monitor; SELECT 1/0');
SELECT current_setting('work_mem') <> '77kB' AS work_mem, to_regclass('gone') AS gone, to_regclass('gone_too') AS gone_too, current_user <> 'pg_monitor' AS myself, count(*) AS cursors FROM pg_cursors WHERE name = 'c';
COMMIT;
-- Many in one transaction
BEGIN;
SELECT outcome, replayed, count(*) FROM generate_series(1, 200) i, idem_execute('many-' || i % 100, 'INSERT INTO effects VALUES (1); SELECT 1/0') GROUP BY outcome, replayed ORDER BY replayed;
SELECT count(*) FROM effects;
COMMIT;
SELECT count(*) FROM idempotency_keys WHERE key LIKE 'many-%' AND status = 'failed';

-- Forgotten, it is tried once more; and a failure has its ttl.
SELECT idem_forget('bare');
SELECT :shown FROM idem_execute('bare', 'SELECT 1');

--
-- Raised: what says nothing about the request.  Nothing is kept, the key is free.
--
SELECT code, t.* FROM unnest('{08000,08006,08P01,40000,40001,40002,40003,40P01,53000,53100,53200,53300,53400,57000,57014,57P01,57P02,57P03,57P05,58000,58030,58P01,XX000,XX001,XX002,55P03}'::text[]) code,
    pg_temp.try(format('SELECT raise(%L)', code)) t
    WHERE t.first <> 'raised' OR t.state IS DISTINCT FROM code OR t.second <> 'completed' OR t.effects <> 0;
\set VERBOSITY default
SELECT idem_execute('raised', 'SELECT raise(''40001'')');
\set VERBOSITY sqlstate
SELECT count(*) FROM idem_get('raised');
SELECT :shown FROM idem_execute('raised', 'SELECT 1');
-- It aborts the transaction, as any error, or is caught.
BEGIN;
SELECT outcome FROM idem_execute('before', 'SELECT 1');
SAVEPOINT a;
SELECT idem_execute('aborts', 'INSERT INTO effects VALUES (1); SELECT raise(''55P03'')');
SELECT outcome FROM idem_execute('aborts', 'SELECT 1');
ROLLBACK TO a;
SELECT outcome, attempt, replayed FROM idem_execute('aborts', 'SELECT 2');
COMMIT;
SELECT response, replayed FROM idem_execute('aborts', 'SELECT 3');
-- Real ones
SET statement_timeout = '100ms';
SELECT idem_execute('timeout', 'INSERT INTO effects VALUES (1); SELECT pg_sleep(60)');
SET statement_timeout = '20s';
SELECT idem_execute('cancelled', 'INSERT INTO effects VALUES (1); SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(60)');
SET temp_file_limit = '64kB';
SET work_mem = '64kB';
SELECT idem_execute('temp_file_limit', 'SELECT count(*) FROM (SELECT repeat(i::text, 50) FROM generate_series(1, 50000) i ORDER BY 1 OFFSET 0) s');
RESET temp_file_limit;
RESET work_mem;
SELECT idem_execute('no file', 'COPY effects FROM ''/no/such/file''');
SELECT idem_execute('no library', 'LOAD ''no_such_library_of_idempotency''');
SELECT count(*) FROM effects;
SELECT count(*) FROM unnest('{timeout,cancelled,temp_file_limit,"no file","no library"}'::text[]) k, idem_get(k);
SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid() AND (locktype = 'advisory' OR relation = 'idempotency_keys'::regclass);
SELECT response, replayed FROM idem_execute('timeout', 'SELECT 1');
-- The attempt before the one that was raised keeps its count, and what was noted.
SELECT token FROM idem_claim('attempts') \gset
SELECT idem_checkpoint('attempts', :token, 'half way', '1') IS NOT NULL AS noted, idem_fail('attempts', token => :token, disposition => 'retry');
SELECT idem_execute('attempts', 'SELECT raise(''40001'')');
SELECT status, attempt, checkpoint FROM idem_get('attempts');
SELECT :shown, checkpoint, state FROM idem_execute('attempts', 'SELECT 1');

-- Constraints that are checked at commit: the result goes with the transaction.
CREATE TABLE deferred (n int UNIQUE DEFERRABLE INITIALLY DEFERRED);
INSERT INTO deferred VALUES (1);
SELECT outcome FROM idem_execute('deferred', 'INSERT INTO deferred VALUES (1)');
SELECT count(*) FROM idem_get('deferred');
BEGIN;
SELECT outcome FROM idem_execute('deferred', 'INSERT INTO deferred VALUES (1)');
COMMIT;
SELECT count(*) FROM idem_get('deferred');
-- Checked by the command, it is the command's error.
SELECT outcome, response->>'sqlstate' AS sqlstate FROM idem_execute('immediate', 'INSERT INTO deferred VALUES (1); SET CONSTRAINTS ALL IMMEDIATE');
SELECT count(*) FROM deferred;

--
-- More than one row
--
\set VERBOSITY default
SELECT idem_execute('rows', 'INSERT INTO effects VALUES (1), (2) RETURNING n');
\set VERBOSITY sqlstate
SELECT count(*) FROM effects;
SELECT count(*) FROM idem_get('rows');
SELECT idem_execute('rows', 'SELECT generate_series(1, 100000)');
SELECT idem_execute('rows', 'SELECT FROM generate_series(1, 2)');
SELECT idem_execute('rows', 'VALUES (NULL), (NULL)');
SELECT idem_execute('rows', 'SELECT 1; SELECT 1 UNION ALL SELECT 1');
SELECT idem_execute('rows', 'EXPLAIN (COSTS OFF) SELECT * FROM effects WHERE n = 1');
SELECT count(*) FROM effects;
SELECT :shown FROM idem_execute('rows', 'SELECT jsonb_agg(i) FROM generate_series(1, 3) i');

--
-- Refused commands
--
\set VERBOSITY default
SELECT idem_execute('refused', NULL);
SELECT idem_execute('refused', '');
SELECT idem_execute('refused', 'COMMIT');
SELECT idem_execute('refused', 'COPY effects TO STDOUT');
SELECT idem_execute('refused', '-- nothing but a comment');
SELECT idem_execute('refused', 'SELECT 1, 2');
SELECT idem_execute('refused', 'SELECT 1 AS a, 2 AS b, 3 AS a');
\set VERBOSITY sqlstate
SELECT idem_execute('refused', E' \n\t\r ; ;; ');
SELECT idem_execute('refused', 'BEGIN');
SELECT idem_execute('refused', 'ROLLBACK');
SELECT idem_execute('refused', 'SAVEPOINT a');
SELECT idem_execute('refused', 'ROLLBACK TO a');
SELECT idem_execute('refused', 'RELEASE a');
SELECT idem_execute('refused', 'PREPARE TRANSACTION ''a''');
SELECT idem_execute('refused', 'COPY effects FROM STDIN');
SELECT idem_execute('refused', 'INSERT INTO effects VALUES (1); COMMIT; INSERT INTO effects VALUES (2)');
SELECT count(*) FROM effects;
SELECT count(*) FROM idem_get('refused');
-- Other arguments
SELECT idem_execute(NULL, 'SELECT 1');
SELECT idem_execute('', 'SELECT 1');
SELECT idem_execute(repeat('k', 256), 'SELECT 1');
SELECT idem_execute('refused', 'SELECT 1', scope => NULL);
SELECT idem_execute('refused', 'SELECT 1', scope => repeat('s', 256));
SELECT idem_execute('refused', 'SELECT 1', operation => NULL);
SELECT idem_execute('refused', 'SELECT 1', operation => repeat('o', 256));
SELECT idem_execute('refused', 'SELECT 1', ttl => '0');
SELECT idem_execute('refused', 'SELECT 1', ttl => '-1 s');
SELECT idem_execute('refused', 'SELECT 1', ttl => '178000000 years');
SELECT idem_execute('refused', 'SELECT 1', wait => '-1 us');
SELECT idem_execute('refused', 'SELECT 1', '{}', ignore => '{NULL}');
SELECT idem_execute('refused', 'SELECT 1', ignore => '{NULL}');
SELECT count(*) FROM idem_get('refused');
-- They come before a replay, and the command before the key is looked at.
SELECT :shown FROM idem_execute('replayed', 'SELECT 1');
SELECT idem_execute('replayed', NULL);
SELECT idem_execute('replayed', 'SELECT 1', ttl => '0');
SELECT :shown FROM idem_execute('replayed', 'SELECT 2');
-- All of it is refused in an aborted transaction.
BEGIN;
SELECT 1/0;
SELECT idem_execute('aborted', 'SELECT 1');
ROLLBACK;

--
-- A result that is too large: nothing has happened
--
SET idempotency.max_response_size = 1000;
\set VERBOSITY terse
SELECT idem_execute('large', 'INSERT INTO effects VALUES (1); SELECT repeat(''x'', 1000)');
\set VERBOSITY sqlstate
SELECT idem_execute('large', 'SELECT jsonb_agg(i) FROM generate_series(1, 1000) i');
SELECT idem_execute('large', 'DO $$ BEGIN INSERT INTO effects VALUES (1); RAISE EXCEPTION ''%'', repeat(''x'', 1000); END $$');
SELECT count(*) FROM effects;
SELECT count(*) FROM idem_get('large');
SELECT length(response #>> '{}'), attempt FROM idem_execute('large', 'SELECT repeat(''x'', 900)');
SET idempotency.max_response_size = 0;
-- An error that is too large to be kept is raised as it is.
SELECT outcome FROM idem_execute('error too large', 'SELECT 1 / 0');
SELECT count(*) FROM idem_get('error too large');
SELECT outcome, response FROM idem_execute('nothing', 'INSERT INTO effects VALUES (1)');
SELECT length(response #>> '{}'), replayed FROM idem_execute('large', 'SELECT 1');
RESET idempotency.max_response_size;
TRUNCATE effects;

--
-- The command has the caller's rights and search_path, and nothing else
--
CREATE ROLE regress_idem_app;
CREATE ROLE regress_idem_none;
SELECT idem_grant('regress_idem_app');
CREATE SCHEMA regress_idem_path;
CREATE TABLE regress_idem_path.effects (n int, note text);
GRANT USAGE ON SCHEMA regress_idem_path TO regress_idem_app;
GRANT SELECT, INSERT ON regress_idem_path.effects TO regress_idem_app;
SET ROLE regress_idem_none;
SELECT idem_execute('nobody', 'SELECT 1');
SET ROLE regress_idem_app;
SELECT response FROM idem_execute('who', 'SELECT current_user');
-- A lack of rights is an answer like any other, and stays one.
SELECT outcome, response->>'sqlstate' AS sqlstate, response->>'message' AS message FROM idem_execute('no right', 'INSERT INTO effects VALUES (1)');
SELECT outcome, response->>'sqlstate' AS sqlstate FROM idem_execute('the keys', 'SELECT count(*) FROM idempotency_keys');
SELECT outcome, response->>'sqlstate' AS sqlstate FROM idem_execute('the sequence', 'SELECT nextval(''idempotency_keys_token_seq'')');
SELECT outcome, response->>'sqlstate' AS sqlstate FROM idem_execute('forget', 'SELECT idem_forget(''who'')');
RESET ROLE;
GRANT INSERT ON effects TO regress_idem_app;
SET ROLE regress_idem_app;
SELECT outcome, response->>'sqlstate' AS sqlstate, replayed FROM idem_execute('no right', 'INSERT INTO effects VALUES (1)');
SELECT outcome, replayed FROM idem_execute('right', 'INSERT INTO effects VALUES (1)');
SET search_path = regress_idem_path, public;
SELECT outcome, replayed FROM idem_execute('path', 'INSERT INTO effects VALUES (2)');
SELECT response FROM idem_execute('path seen', 'SELECT current_setting(''search_path'')');
SET search_path = pg_temp;
SELECT outcome, response->>'sqlstate' AS sqlstate FROM public.idem_execute('path of nothing', 'INSERT INTO effects VALUES (3)');
RESET search_path;
RESET ROLE;
SELECT tableoid::regclass, n FROM (SELECT tableoid, n FROM effects UNION ALL SELECT tableoid, n FROM regress_idem_path.effects) e ORDER BY n;
-- A definer's function gives it the definer's, as it does any statement.
CREATE FUNCTION define(k text) RETURNS jsonb LANGUAGE sql SECURITY DEFINER SET search_path = public, pg_temp AS 'SELECT response FROM idem_execute(k, ''SELECT current_user <> ''''regress_idem_none'''' AND current_setting(''''search_path'''') = ''''public, pg_temp'''''')';
SET ROLE regress_idem_none;
SELECT define('defined');
RESET ROLE;
-- Whoever the command turns into, the claim stays the caller's.
BEGIN;
SET LOCAL ROLE regress_idem_app;
SELECT outcome, replayed FROM idem_execute('turns', 'SET LOCAL ROLE NONE; SET LOCAL ROLE regress_idem_none; SET LOCAL search_path = ''''');
SELECT current_user, current_setting('search_path');
ROLLBACK;
-- Decoys in the caller's path: what he calls are his operators, what we call aren't.
CREATE SCHEMA regress_idem_decoy;
CREATE FUNCTION regress_idem_decoy.to_jsonb(anyelement) RETURNS jsonb LANGUAGE sql AS $$ SELECT '"decoy"'::jsonb $$;
CREATE TEMP TABLE idempotency_keys (key text);
SET search_path = regress_idem_decoy, pg_temp, public, pg_catalog;
SELECT response FROM idem_execute('decoy', 'SELECT 1');
SELECT response FROM idem_execute('decoy called', 'SELECT to_jsonb(1)');
RESET search_path;
DROP TABLE pg_temp.idempotency_keys;
SELECT status FROM idem_get('decoy');
-- Row security is the caller's, not the owner's.
ALTER TABLE effects ENABLE ROW LEVEL SECURITY;
GRANT SELECT ON effects TO regress_idem_app;
SET ROLE regress_idem_app;
SELECT response FROM idem_execute('row security', 'SELECT count(*) FROM effects');
RESET ROLE;
SELECT response FROM idem_execute('no row security', 'SELECT count(*) FROM effects');

SELECT idem_revoke('regress_idem_app');
DROP FUNCTION define, raise;
DROP PROCEDURE commits;
DROP SCHEMA regress_idem_path, regress_idem_decoy CASCADE;
DROP TABLE effects, deferred;
DROP ROLE regress_idem_app, regress_idem_none;
