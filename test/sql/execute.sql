--
-- execute: a command that is run once, and what every caller gets of it
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set shown 'outcome, attempt, response, replayed'
SET statement_timeout = '20s';

CREATE TABLE effects (n serial, note jsonb);
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

--
-- The first caller's command is run, every later one's is not
--
SELECT clock_timestamp() AS before \gset
CREATE TEMP TABLE answers AS SELECT 1 AS n, * FROM idem_execute('first', 'INSERT INTO effects (note) VALUES ($1) RETURNING note->''amount''', '{"amount": 10}', operation => 'charge');
INSERT INTO answers SELECT 2, * FROM idem_execute('first', 'INSERT INTO effects (note) VALUES ($1) RETURNING note->''amount''', '{"amount": 10}', operation => 'charge');
SELECT outcome, token, attempt, http_status, headers, response, body, checkpoint, state, expires_at - completed_at AS kept, retry_after, replayed FROM answers ORDER BY n;
SELECT bool_and(created_at > :'before' AND completed_at >= created_at AND completed_at < clock_timestamp()) AS now, count(DISTINCT (created_at, completed_at, expires_at)) FROM answers;
DROP TABLE answers;
-- The command isn't part of the request: not even a bad one is looked at.
SELECT :shown FROM idem_execute('first', 'no such command', '{"amount": 10.0}', operation => 'charge');
SELECT note, count(*) OVER () FROM effects;
SELECT operation, status, attempt, lease_until, response, expired FROM idem_get('first');

-- The key is one like any other: what one call has stored the other replays.
SELECT outcome, attempt, response, token IS NOT NULL AS token FROM idem_claim('first', '{"amount": 10}', operation => 'charge');
SELECT idem_complete('claimed', '"result"', token, http_status => 201, headers => '[["A","1"]]', body => '\x00ff') FROM idem_claim('claimed', '{"n": 1}');
SELECT :shown, http_status, headers, body, token FROM idem_execute('claimed', 'SELECT 1', '{"n": 1}');
SELECT idem_fail('declined', '"why"', token, http_status => 402) FROM idem_claim('declined');
SELECT :shown, http_status, token FROM idem_execute('declined', 'SELECT 1');
SELECT idem_once('message'), idem_once('message');
SELECT :shown FROM idem_execute('message', 'SELECT 1');

--
-- Arguments
--
SELECT response FROM idem_execute('args-none', 'SELECT $1 IS NULL');
SELECT response FROM idem_execute('args-null', 'SELECT jsonb_typeof($1)', 'null');
SELECT response FROM idem_execute('args-type', 'SELECT pg_typeof($1)::text', '{}');
SELECT response FROM idem_execute('args-twice', 'SELECT jsonb_build_object(''sum'', ($1->>''a'')::int + ($1->>''b'')::int, ''args'', $1)', '{"a": 1, "b": 2, "text": "it''s; --"}');
SELECT response FROM idem_execute('args-unused', 'SELECT 1', '{"a": 1}');
-- Positional, all of them
SELECT :shown FROM idem_execute('positional', 'SELECT $1', '{"a": 1, "t": 2}', 'tenant', 'op', '1 hour', '0', '{t}');
SELECT scope, operation, expires_at - completed_at AS kept FROM idem_get('positional', 'tenant');

-- They are the request that is compared, less what is to be ignored.
SELECT :shown FROM idem_execute('request', 'SELECT $1', '{"a": 1, "ts": 1, "c": {"id": 1, "x": 1}}', ignore => '{ts,c.id}');
SELECT :shown FROM idem_execute('request', 'SELECT $1', '{"c": {"x": 1.0, "id": 2}, "a": 1e0, "ts": 2}', ignore => '{ts,c.id}');
SELECT :shown FROM idem_execute('request', 'SELECT $1', '{"a": 1, "c": {"x": 1}}');
SELECT :shown, token, created_at, completed_at, expires_at, retry_after FROM idem_execute('request', 'SELECT $1', '{"a": 2, "c": {"x": 1}}', ignore => '{ts,c.id}');
SELECT :shown FROM idem_execute('request', 'SELECT $1', '{"a": 1, "ts": 1, "c": {"id": 1, "x": 1}}');
SELECT :shown FROM idem_execute('request', 'SELECT $1', 'null');
SELECT :shown FROM idem_execute('request', 'SELECT 1', operation => 'other');
SELECT :shown FROM idem_execute('request', 'SELECT 1');
SELECT outcome FROM idem_claim('request', request_hash => idem_fingerprint('{"a": 1, "c": {"x": 1}}'));
SELECT outcome FROM idem_claim('request', request_hash => idem_fingerprint('{"a": 1, "c": {"x": 2}}'));
-- Another scope is another key.
SELECT :shown FROM idem_execute('request', 'SELECT $1', '{"a": 2}', scope => 'tenant');
SELECT :shown FROM idem_execute('request', 'SELECT $1', '{"a": 2}', scope => 'tenant');
-- A mismatch does nothing, in whatever state the key is.
SELECT token FROM idem_claim('open', '1') \gset
SELECT outcome, replayed FROM idem_execute('open', 'INSERT INTO effects DEFAULT VALUES', '2');
SELECT idem_fail('open', token => :token, disposition => 'retry');
SELECT outcome, replayed FROM idem_execute('open', 'INSERT INTO effects DEFAULT VALUES', '2');
SELECT outcome, replayed FROM idem_execute('open', 'INSERT INTO effects DEFAULT VALUES', '1', operation => 'other');
SELECT status, attempt FROM idem_get('open');
SELECT count(*) FROM effects;

--
-- Values
--
-- Each is compared to to_jsonb()'s, when it is new and when it comes back.
CREATE TYPE point3 AS (x int, y numeric, label text);
CREATE DOMAIN positive AS int CHECK (VALUE > 0);
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE FUNCTION pg_temp.run(command text, OUT value jsonb, OUT well boolean) LANGUAGE plpgsql AS $$
DECLARE
    r record;
    again record;
BEGIN
    r := idem_execute(command, command);
    again := idem_execute(command, command);
    value := r.response;
    well := r.outcome = 'completed' AND NOT r.replayed AND again.outcome = 'completed' AND again.replayed AND again.response IS NOT DISTINCT FROM r.response;
END $$;
CREATE FUNCTION pg_temp.reference(expression text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    value jsonb;
BEGIN
    EXECUTE 'SELECT to_jsonb(' || expression || ')' INTO value;
    RETURN value;
END $$;
\pset format unaligned
SELECT expression, value, well, value = pg_temp.reference(expression) AS as_to_jsonb FROM unnest(ARRAY[
    'true', '7::smallint', '7', '9007199254740993', '1.50', '12345678901234567890.123456789', '''NaN''::numeric', '1e-7::float8', '''-Infinity''::float4',
    '''text''::text', '''''::text', '''it''''s "quoted" \ ''::varchar(20)', '''ab''::char(4)', '''name''::name', 'E''\n\t\u20ac\U0001F600''::text', '''\x00ff''::bytea',
    '''2024-02-29''::date', '''2024-02-29 12:00:00.123456''::timestamp', '''2024-02-29 12:00:00.123456+00''::timestamptz', '''12:00''::time', '''1 day 2 hours''::interval',
    '''00000000-0000-0000-0000-000000000001''::uuid', '''10.0.0.1/8''::inet', '''[1,5)''::int4range', '''(1,2)''::point', 'B''101''', '''pg_class''::regclass', '42::oid',
    '''{"b": 1, "a": [1, null]}''::jsonb', '''{"b": 1,  "a": [1, null], "a": 2}''::json', '''"string"''::jsonb', '''7''::jsonb', '''[]''::jsonb', '''{}''::jsonb',
    'ARRAY[1, 2, NULL]', 'ARRAY[]::int[]', 'ARRAY[[1,2],[3,4]]', 'ARRAY[''a'', ''b"c'']', 'ARRAY[''{"a": 1}''::jsonb]', '''[0:1]={1,2}''::int[]',
    'ROW(1, 2.5, ''x'')::point3', 'ARRAY[ROW(1, 2.5, ''x'')::point3, NULL]', 'ROW(NULL, NULL, NULL)::point3', 'ROW(1, ''a'', ROW(2))', '5::positive', '''happy''::mood']) expression,
    pg_temp.run('SELECT ' || expression);

SELECT value, well FROM pg_temp.run('SELECT ''unknown''');
-- Several columns, whole rows, no column, no row, and nothings that differ
SELECT command, value, value IS NULL AS is_null, well FROM unnest(ARRAY[
    'SELECT 1 AS a, ''b'' AS "B c", NULL::int AS n, ''{"k": []}''::jsonb AS j',
    'SELECT e.* FROM (VALUES (1, ''x'')) e(id, name)', 'SELECT e FROM (VALUES (1, ''x'')) e(id, name)', 'SELECT NULL::int AS a, NULL::text AS b',
    'SELECT (ROW(1, 2, ''x'')::point3).*', 'SELECT ROW(1, 2, ''x'')::point3 AS p, 2 AS q', 'VALUES (1, ''a'')',
    'SELECT', 'SELECT 1 WHERE false', 'SELECT 1, 2 WHERE false', 'SELECT WHERE false', 'SELECT NULL', 'SELECT NULL::jsonb', 'SELECT NULL::point3', 'SELECT ''null''::jsonb', 'SELECT ''null''::json', 'SELECT ''''']) command,
    pg_temp.run(command);
\pset format aligned
-- The same for a caller in another transaction, and for idem_claim and idem_get
SELECT count(*), bool_and(c.outcome = 'completed' AND c.response IS NOT DISTINCT FROM k.response AND e.response IS NOT DISTINCT FROM k.response AND e.replayed AND g.response IS NOT DISTINCT FROM k.response) AS well
    FROM idempotency_keys k, idem_claim(k.key) c, idem_execute(k.key, 'SELECT 1/0') e, idem_get(k.key) g WHERE k.key LIKE 'SELECT%' OR k.key LIKE 'VALUES%';

-- A long one, stored out of line
SELECT length(response->>0), replayed FROM idem_execute('long', 'SELECT jsonb_build_array(string_agg(md5(i::text), '''')) FROM generate_series(1, 3000) i');
SELECT length(response->>0), replayed, md5(response->>0) = md5(string_agg(md5(i::text), '')) AS same
    FROM idem_execute('long', 'SELECT 1'), generate_series(1, 3000) i GROUP BY response, replayed;
-- and one that comes out of a table's own TOAST
CREATE TABLE documents (doc jsonb, t text);
INSERT INTO documents SELECT to_jsonb(string_agg(md5(i::text), '')), string_agg(md5(i::text), '') FROM generate_series(1, 3000) i;
SELECT length(response #>> '{}'), replayed FROM idem_execute('toasted', 'DELETE FROM documents RETURNING doc');
INSERT INTO documents SELECT NULL, string_agg(md5(i::text), '') FROM generate_series(1, 3000) i;
SELECT length(response->>'t'), replayed FROM idem_execute('toasted row', 'DELETE FROM documents RETURNING *');
VACUUM documents;
SELECT length(e.response #>> '{}') AS doc, length(f.response->>'t') AS row FROM idem_execute('toasted', 'SELECT 1') e, idem_execute('toasted row', 'SELECT 1') f;
DROP TABLE documents;

--
-- Commands of every kind
--
CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL);
CREATE PROCEDURE pay(INOUT id int, amount int, INOUT note text DEFAULT 'paid') LANGUAGE plpgsql AS $$
BEGIN
    UPDATE accounts a SET balance = balance - amount WHERE a.id = pay.id;
END $$;
CREATE PROCEDURE pay_only(id int, amount int) LANGUAGE sql AS 'UPDATE accounts a SET balance = balance - amount WHERE a.id = pay_only.id';
\pset format unaligned
SELECT key, outcome, response, replayed FROM (VALUES
    ('insert', 'INSERT INTO accounts SELECT i, 100 FROM generate_series(1, 5) i'),
    ('insert returning', 'INSERT INTO accounts VALUES (6, 100) RETURNING id'),
    ('insert nothing', 'INSERT INTO accounts VALUES (6, 100) ON CONFLICT DO NOTHING RETURNING id'),
    ('update', 'UPDATE accounts SET balance = balance - 1'),
    ('update one', 'UPDATE accounts SET balance = balance - 10 WHERE id = 1 RETURNING id, balance'),
    ('update none', 'UPDATE accounts SET balance = 0 WHERE id = 99 RETURNING balance'),
    ('delete', 'DELETE FROM accounts WHERE id = 6 RETURNING *'),
    ('with', 'WITH moved AS (UPDATE accounts SET balance = balance + 1 RETURNING *) SELECT count(*), sum(balance) FROM moved'),
    ('with many, of which one is seen', 'WITH moved AS (UPDATE accounts SET balance = balance + 1 RETURNING *) SELECT ''done'''),
    ('call', 'CALL pay_only(1, 1)'),
    ('call with result', 'CALL pay(2, 20)'),
    ('do', 'DO $$ BEGIN UPDATE accounts SET balance = 5 WHERE id = 5; END $$'),
    ('create', 'CREATE TABLE made AS SELECT 1 AS one'),
    ('select into', 'SELECT 2 AS two INTO made2'),
    ('alter', 'ALTER TABLE made ADD made_later int DEFAULT 3'),
    ('show', 'SHOW DateStyle'),
    ('explain', 'EXPLAIN (COSTS OFF) SELECT 1'),
    ('lock', 'LOCK TABLE accounts IN SHARE MODE'),
    ('notify', 'NOTIFY regress_idem, ''hello'''),
    ('several', 'INSERT INTO accounts VALUES (7, 7); UPDATE accounts SET balance = 8 WHERE id = 7; SELECT balance FROM accounts WHERE id = 7'),
    ('several, of which the last has no value', 'SELECT 1; UPDATE accounts SET balance = 9 WHERE id = 7'),
    ('several, of which the last has no row', 'SELECT 1; SELECT 2 WHERE false'),
    ('several, of which the first has rows', 'UPDATE accounts SET balance = balance + 1000 RETURNING id; SELECT count(*) FROM accounts WHERE balance > 1000'),
    ('several, of which the first has rows to be looked at', 'SELECT nextval(''effects_n_seq'') FROM generate_series(1, 10); SELECT currval(''effects_n_seq'') - ' || currval('effects_n_seq')),
    ('blanks', E'\n\t ;; SELECT 1 ; ; -- the end'),
    ('comment', '/* a comment */ SELECT 2')) v(key, command), idem_execute(key, command);
\pset format aligned
TABLE accounts ORDER BY id;
TABLE made;
TABLE made2;
-- None of them is run again.
SELECT count(*), bool_and(replayed AND outcome = 'completed') AS replayed FROM idempotency_keys k, idem_execute(k.key, 'DELETE FROM accounts') WHERE key ~ '^(insert|update|delete|with|call|do|create|select|alter|show|explain|lock|notify|several|blanks|comment)';
SELECT count(*), sum(balance) FROM accounts;

-- A cursor or prepared statement of the session
BEGIN;
DECLARE c CURSOR FOR SELECT i FROM generate_series(10, 20) i;
PREPARE p AS SELECT 'prepared';
SELECT key, response FROM unnest('{one,two,one}'::text[]) key, idem_execute(key, 'FETCH c');
SELECT response FROM idem_execute('prepared', 'EXECUTE p');
COMMIT;
DEALLOCATE p;

-- What a command sets, stays set as if the caller had done it, and only once.
BEGIN;
SELECT outcome FROM idem_execute('set local', 'SET LOCAL lock_timeout = ''7s''');
SHOW lock_timeout;
COMMIT;
SHOW lock_timeout;
SELECT outcome, replayed FROM idem_execute('set local', 'SELECT 1');

-- Later commands of a statement see what earlier ones did.
SELECT a.response, b.response, c.response FROM idem_execute('see-1', 'INSERT INTO accounts VALUES (10, 1) RETURNING id') a,
    idem_execute('see-2', 'SELECT count(*) FROM accounts WHERE id = ' || (a.response::int)) b, idem_execute('see-3', 'DELETE FROM accounts WHERE id = 10 RETURNING balance') c;

-- Inside a query, as often as it has rows
SELECT key, response, replayed FROM unnest('{q1,q2,q1,q1}'::text[]) WITH ORDINALITY q(key, n), idem_execute(key, 'SELECT ' || n) ORDER BY n;

--
-- The clock, and how long the result is kept
--
SELECT a.outcome, b.outcome, c.outcome FROM idem_execute('kept', 'SELECT 1') a, idem_execute('kept-ttl', 'SELECT 1', ttl => '1 month 1 day') b, idem_execute('kept-failed', 'SELECT 1/0', ttl => '30 s') c;
SET idempotency.default_ttl = '2h';
SELECT outcome FROM idem_execute('kept-default', 'SELECT 1');
RESET idempotency.default_ttl;
SELECT key, extract(epoch FROM expires_at - completed_at)::int AS kept, lease_until FROM unnest('{kept,kept-ttl,kept-failed,kept-default}'::text[]) k, idem_get(k);
BEGIN;
CALL pg_temp.pause(0.01);
SELECT created_at > now() AS created, completed_at - created_at >= '20 ms' AS completed FROM idem_execute('clock', 'SELECT pg_sleep(0.02)');
COMMIT;
-- One that outlasts its lease and its ttl still has the key.
SET idempotency.default_lease = '1ms';
SELECT outcome, response, replayed, expires_at - completed_at AS kept FROM idem_execute('slow', 'SELECT pg_sleep(0.02)', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT :shown FROM idem_execute('slow', 'SELECT ''after it has expired''', 'true', operation => 'another');
SELECT outcome, replayed FROM idem_execute('slow-lease', 'SELECT pg_sleep(0.02)');
SELECT outcome, replayed FROM idem_execute('slow-lease', 'SELECT 1/0');
RESET idempotency.default_lease;

--
-- A key that somebody has claimed
--
-- is waited for, or not.
SELECT token FROM idem_claim('held', lease => '1 hour') \gset
SELECT clock_timestamp() AS before \gset
SELECT :shown, token IS NULL AS no_token, retry_after > '0' AND retry_after <= '1 hour' AS retry FROM idem_execute('held', 'SELECT 1', wait => '0');
SELECT :shown FROM idem_execute('held', 'SELECT 1', wait => '100 ms');
SELECT clock_timestamp() - :'before' >= '100 ms' AS waited;
SET statement_timeout = '100ms';
SELECT :shown FROM idem_execute('held', 'SELECT 1');
SET statement_timeout = '20s';
SELECT idem_complete('held', '"done"', :token);
SELECT :shown FROM idem_execute('held', 'SELECT 1');
-- An ended lease is taken over, and its owner has lost.
SELECT token FROM idem_claim('left', '{"n": 1}') \gset
SELECT idem_checkpoint('left', :token, 'sent', '{"id": 3}', lease => '1 ms') IS NOT NULL AS noted;
CALL pg_temp.pause(0.01);
SELECT :shown, checkpoint, state FROM idem_execute('left', 'SELECT $1', '{"n": 1}', wait => '0');
SELECT idem_complete('left', '2', :token);
SELECT :shown, checkpoint, state FROM idem_execute('left', 'SELECT 1');
SELECT token FROM idem_claim('left-failed', lease => '1 ms') \gset
CALL pg_temp.pause(0.01);
SELECT outcome, attempt, response->>'sqlstate' AS sqlstate, replayed FROM idem_execute('left-failed', 'SELECT 1/0');
-- Waiting goes on until it ends, and no longer.
SELECT outcome FROM idem_claim('ending', lease => '100 ms');
SELECT :shown FROM idem_execute('ending', 'SELECT 1', wait => '1 hour');
SELECT outcome FROM idem_claim('ending-unlimited', lease => '100 ms');
SELECT :shown FROM idem_execute('ending-unlimited', 'SELECT 1');
-- One that isn't to be taken over is of unknown outcome then.
SELECT outcome FROM idem_claim('held-back', lease => '100 ms', takeover => false);
SELECT :shown FROM idem_execute('held-back', 'SELECT 1');
SELECT idem_resolve('held-back', 'completed', '"resolved"');
SELECT :shown FROM idem_execute('held-back', 'SELECT 1');
-- A failure to be retried, now and later
SELECT idem_fail('retry', token => token, disposition => 'retry') FROM idem_claim('retry');
SELECT :shown FROM idem_execute('retry', 'SELECT 1');
SELECT idem_fail('retry-later', '"busy"', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('retry-later');
SELECT outcome, attempt, replayed, retry_after > '59 min' AS retry FROM idem_execute('retry-later', 'SELECT 1');
SELECT outcome, attempt, replayed, retry_after > '59 min' AS retry FROM idem_execute('retry-later', 'SELECT 1', wait => '0');
SELECT idem_fail('unknown', '"lost"', token, disposition => 'unknown') FROM idem_claim('unknown');
SELECT outcome, attempt, replayed FROM idem_execute('unknown', 'SELECT 1');
-- A claim of this very transaction isn't waited for.
BEGIN;
SELECT outcome FROM idem_claim('own');
SELECT outcome, replayed, token IS NULL AS no_token FROM idem_execute('own', 'SELECT 1');
SELECT idem_complete('own', '"own"');
SELECT :shown FROM idem_execute('own', 'SELECT 1');
COMMIT;

--
-- A command that uses keys itself
--
SELECT :shown FROM idem_execute('outer', $$SELECT jsonb_agg(e) FROM (SELECT key, outcome, attempt, response, replayed FROM unnest('{outer,inner,inner}'::text[]) key, idem_execute(key, 'SELECT 1')) e$$);
SELECT key, response->>'sqlstate' AS sqlstate, outcome, replayed FROM unnest('{outer,inner}'::text[]) key, idem_execute(key, 'SELECT 2');
SELECT :shown FROM idem_execute('deep-1', $c$SELECT to_jsonb(e) - '{created_at,completed_at,expires_at}'::text[] FROM idem_execute('deep-2', $$SELECT outcome || ' ' || status FROM idem_execute('deep-3', 'SELECT 1/0'), idem_get('deep-1')$$) e$c$);
SELECT key, status FROM unnest('{deep-1,deep-2,deep-3}'::text[]) k, idem_get(k);
-- An error takes back the keys it was about to store.
SELECT :shown FROM idem_execute('outer-failed', $$SELECT 1 / (response::int - 1) FROM idem_execute('inner-failed', 'SELECT 1')$$);
SELECT count(*) FROM idem_get('inner-failed');
SELECT response FROM idem_execute('looks-itself', $$SELECT status FROM idem_get('looks-itself')$$);
SELECT response FROM idem_execute('claims-itself', $$SELECT outcome FROM idem_claim('claims-itself', wait => '1 hour')$$);
SELECT response->>'outcome' AS outcome FROM idem_execute('claims-other', $$SELECT outcome, token FROM idem_claim('other')$$);
SELECT status FROM idem_get('other');
-- Its own key is none of its business: all is undone then.
SELECT idem_execute('completes', $$SELECT idem_complete('completes', '"other"')$$);
SELECT idem_execute('forgets', $$SELECT idem_forget('forgets')$$);
SELECT idem_execute('resolves', $$SELECT idem_resolve('resolves', 'completed')$$);
SELECT idem_execute('claims-again', $$SELECT idem_forget('claims-again'), idem_claim('claims-again')$$);
SELECT idem_execute('truncates', $$INSERT INTO effects DEFAULT VALUES; TRUNCATE idempotency_keys$$);
SELECT idem_execute('drops', $$INSERT INTO effects DEFAULT VALUES; DROP EXTENSION idempotency$$);
SELECT idem_execute('alters', $$ALTER TABLE idempotency_keys RENAME response TO answer$$);
SELECT count(*) FROM unnest('{completes,forgets,resolves,claims-again,truncates,drops,alters}'::text[]) k, idem_get(k);
SELECT count(*) FROM effects;

--
-- Transactions
--
BEGIN;
SELECT outcome, replayed FROM idem_execute('rolled-back', 'INSERT INTO effects DEFAULT VALUES');
SELECT outcome, replayed FROM idem_execute('rolled-back', 'INSERT INTO effects DEFAULT VALUES');
ROLLBACK;
SELECT count(*) FROM effects;
SELECT outcome, attempt, replayed FROM idem_execute('rolled-back', 'INSERT INTO effects DEFAULT VALUES');
SELECT count(*) FROM effects;
BEGIN;
SAVEPOINT a;
SELECT response, replayed FROM idem_execute('savepoint', 'SELECT 1');
ROLLBACK TO a;
SELECT response, replayed FROM idem_execute('savepoint', 'SELECT 2');
RELEASE a;
SAVEPOINT b;
SELECT response, replayed FROM idem_execute('savepoint', 'SELECT 3');
ROLLBACK TO b;
COMMIT;
SELECT response, replayed FROM idem_execute('savepoint', 'SELECT 4');

-- A function that catches its errors
CREATE FUNCTION caught(k text, command text, later text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    answer text;
BEGIN
    BEGIN
        SELECT outcome INTO answer FROM idem_execute(k, command);
        EXECUTE later;
    EXCEPTION WHEN OTHERS THEN
        RETURN SQLSTATE || ' after ' || coalesce(answer, 'none');
    END;
    RETURN answer;
END $$;
SELECT caught('caught', 'INSERT INTO effects DEFAULT VALUES', 'SELECT 1/0');
SELECT count(*) FROM idem_get('caught');
SELECT caught('caught', 'SELECT nothing', 'SELECT 1');
SELECT caught('caught', 'INSERT INTO effects DEFAULT VALUES', 'SELECT 1');
SELECT caught('caught-transient', 'DO $$ BEGIN RAISE EXCEPTION ''x'' USING ERRCODE = ''40001''; END $$', 'SELECT 1');
SELECT caught('caught-transient', 'SELECT 1', 'SELECT 1');
SELECT count(*) FROM effects;

-- A procedure that commits between the steps
CREATE PROCEDURE saga(fail_at int) LANGUAGE plpgsql AS $$
DECLARE
    r record;
BEGIN
    FOR step IN 1 .. 3 LOOP
        r := idem_execute(idem_key('saga', step::text), 'INSERT INTO effects (note) VALUES ($1) RETURNING note', to_jsonb('step ' || step));
        RAISE INFO '% %', r.response, CASE WHEN r.replayed THEN 'again' ELSE 'done' END;
        IF step = fail_at THEN RAISE EXCEPTION 'power cut'; END IF;
        COMMIT;
    END LOOP;
END $$;
\set VERBOSITY terse
CALL saga(2);
CALL saga(3);
CALL saga(0);
CALL saga(0);
SELECT note, count(*) FROM effects WHERE note #>> '{}' LIKE 'step%' GROUP BY note ORDER BY note;
-- A loop over a cursor, with a commit in each turn
DO $$
DECLARE
    k text;
    r record;
BEGIN
    FOR k IN SELECT 'loop-' || i % 3 FROM generate_series(1, 5) i LOOP
        r := idem_execute(k, 'SELECT 1');
        RAISE INFO '% %', k, r.replayed;
        COMMIT;
    END LOOP;
END $$;
\set VERBOSITY sqlstate

-- A trigger, an SQL function, and a set-returning one
CREATE FUNCTION on_insert() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM idem_execute('trigger', 'SELECT count(*) FROM orders'); RETURN NEW; END $$;
CREATE TABLE orders (id int);
CREATE TRIGGER t AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION on_insert();
INSERT INTO orders VALUES (1), (2);
SELECT :shown FROM idem_execute('trigger', 'SELECT 1');
CREATE FUNCTION pg_temp.charge(k text) RETURNS idem_execute_result LANGUAGE sql AS $$ SELECT idem_execute(k, 'INSERT INTO orders VALUES (3) RETURNING id') $$;
SELECT :shown FROM pg_temp.charge('sql');
SELECT :shown FROM pg_temp.charge('sql');
SELECT count(*) FROM orders;

-- Isolation: as in any statement of the transaction
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT count(*) FROM orders;
SELECT :shown FROM idem_execute('serializable', 'INSERT INTO orders VALUES (9) RETURNING id');
SELECT :shown FROM idem_execute('sql', 'SELECT 1');
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT :shown FROM idem_execute('serializable', 'SELECT 1');
SELECT outcome FROM idem_execute('repeatable read', 'SELECT 1/0');
COMMIT;

--
-- In a read-only transaction replays, mismatch and processing are answered
--
SELECT outcome FROM idem_claim('running', lease => '1 hour');
SELECT outcome FROM idem_execute('division', 'SELECT 1/0');
BEGIN READ ONLY;
SELECT :shown FROM idem_execute('first', 'SELECT 1', '{"amount": 10}', operation => 'charge');
SELECT outcome, response->>'sqlstate' AS sqlstate, replayed FROM idem_execute('division', 'SELECT 1');
SELECT outcome FROM idem_execute('first', 'SELECT 1', '{"amount": 11}', operation => 'charge');
SELECT outcome FROM idem_execute('running', 'SELECT 1', wait => '0');
SELECT outcome FROM idem_execute('unknown', 'SELECT 1');
SELECT outcome FROM idem_execute('retry-later', 'SELECT 1');
SAVEPOINT a;
SELECT idem_execute('read only', 'SELECT 1');
ROLLBACK TO a;
\set VERBOSITY default
SELECT idem_execute('read only', 'SELECT 1');
\set VERBOSITY sqlstate
ROLLBACK;
SELECT :shown FROM idem_execute('read only', 'SELECT 1');
-- A command that makes itself read-only doesn't make its claim so.
SELECT :shown FROM idem_execute('becomes read only', 'SET TRANSACTION READ ONLY');
SELECT :shown FROM idem_execute('becomes read only', 'SELECT 1');

DROP PROCEDURE saga, pay, pay_only;
DROP TABLE effects, accounts, made, made2, orders;
DROP FUNCTION caught, on_insert;
DROP TYPE point3, mood;
DROP DOMAIN positive;
