--
-- bad_input: every limit, its SQLSTATE, what the message says, and that nothing has changed
--
TRUNCATE idempotency_keys;
\pset null -
\pset tuples_only on
\pset format unaligned

-- Rows, their versions and locks, and the tokens drawn: all that a call could leave behind
CREATE FUNCTION pg_temp.table_state() RETURNS text LANGUAGE sql AS $$
    SELECT md5(string_agg(concat_ws(' ', k.ctid, k.xmin, k.xmax, k), ',' ORDER BY k.scope, k.key)) || (SELECT s.last_value FROM idempotency_keys_token_seq s)
    FROM idempotency_keys k $$;
CREATE FUNCTION pg_temp.try(command text, full_text boolean DEFAULT true) RETURNS SETOF text LANGUAGE plpgsql AS $$
DECLARE
    before text := pg_temp.table_state();
    state text;
    message text;
    detail text;
    hint text;
BEGIN
    BEGIN
        EXECUTE command;
        RETURN NEXT 'accepted';
    EXCEPTION WHEN OTHERS THEN
        GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
        RETURN NEXT state || ': ' || message;
        IF full_text AND detail <> '' THEN RETURN NEXT '    detail: ' || regexp_replace(detail, 'Token \d+', 'Token N'); END IF;
        IF full_text AND hint <> '' THEN RETURN NEXT '    hint: ' || hint; END IF;
        IF pg_temp.table_state() IS DISTINCT FROM before THEN RETURN NEXT '    THE TABLE HAS CHANGED'; END IF;
    END;
END $$;
-- The SQLSTATE alone, for many
CREATE FUNCTION pg_temp.state(command text) RETURNS text LANGUAGE sql AS
$$ SELECT string_agg(left(t, CASE WHEN t LIKE '    %' THEN NULL WHEN t = 'accepted' THEN 8 ELSE 5 END), ' ') FROM pg_temp.try(command, false) t $$;

SELECT outcome FROM idem_claim('mine', '{"n": 1}');
SELECT token FROM idempotency_keys WHERE key = 'mine' \gset
SELECT idem_complete('done', '1', token) FROM idem_claim('done');
SELECT token AS done_token FROM idempotency_keys WHERE key = 'done' \gset

--
-- Key, scope, operation
--
SELECT pg_temp.try($$SELECT idem_claim(NULL)$$);
SELECT pg_temp.try($$SELECT idem_claim('')$$);
SELECT pg_temp.try($$SELECT idem_claim(repeat('k', 256))$$);
SELECT pg_temp.try($$SELECT idem_claim('k', scope => NULL)$$);
SELECT pg_temp.try($$SELECT idem_claim('k', scope => repeat('s', 256))$$);
SELECT pg_temp.try($$SELECT idem_claim('k', operation => NULL)$$);
SELECT pg_temp.try($$SELECT idem_claim('k', operation => repeat('o', 256))$$);

-- Every call says the same of a bad key or scope.
SELECT name, array_agg(pg_temp.state(format(call, key, scope)) ORDER BY n)
    FROM (VALUES ('idem_claim', 'SELECT idem_claim(%s, scope => %s)'),
                 ('idem_complete', 'SELECT idem_complete(%s, scope => %s)'),
                 ('idem_fail', 'SELECT idem_fail(%s, scope => %s)'),
                 ('idem_renew', 'SELECT idem_renew(%s, 1, scope => %s)'),
                 ('idem_checkpoint', 'SELECT idem_checkpoint(%s, 1, ''c'', scope => %s)'),
                 ('idem_get', 'SELECT idem_get(%s, %s)'),
                 ('idem_resolve', 'SELECT idem_resolve(%s, ''completed'', scope => %s)'),
                 ('idem_forget', 'SELECT idem_forget(%s, %s)'),
                 ('idem_uuid', 'SELECT idem_uuid(%s, %s)')) calls(name, call),
         (VALUES (1, 'NULL', ''''''), (2, '''''', ''''''), (3, 'repeat(''k'', 256)', ''''''), (4, '''k''', 'NULL'), (5, '''k''', 'repeat(''s'', 256)'),
                 (6, 'repeat(E''\u00e4'', 256)', ''''''), (7, '''k''', 'repeat(E''\U0001f600'', 256)'), (8, 'repeat(''k'', 10000000)', '''''')) args(n, key, scope)
    GROUP BY name ORDER BY name COLLATE "C";

-- 255 characters, not bytes: no call finds these too long.
SELECT call, pg_temp.state(call)
    FROM unnest(ARRAY['SELECT idem_claim(repeat(''k'', 255), scope => repeat(''s'', 255), operation => repeat(''o'', 255))',
                      'SELECT idem_claim(repeat(E''\u00e4'', 255), scope => repeat(E''\u20ac'', 255), operation => repeat(E''\U0001f600'', 255))',
                      'SELECT idem_complete(repeat(E''\U0001f600'', 255))', 'SELECT idem_forget(repeat(E''\U0001f600'', 255))',
                      'SELECT idem_claim(''k'', operation => repeat(E''\u00e4'', 256))', 'SELECT idem_uuid(repeat(E''\U0001f600'', 255), repeat(E''\U0001f600'', 255))']) call;

-- Blank is not empty.
SELECT pg_temp.state($$SELECT idem_claim(' ')$$), pg_temp.state($$SELECT idem_claim(E'\t')$$);

--
-- request_hash
--
SELECT pg_temp.try($$SELECT idem_claim('k', request_hash => '')$$);
SELECT pg_temp.try($$SELECT idem_claim('k', request_hash => decode(repeat('ab', 65), 'hex'))$$);
SELECT pg_temp.state($$SELECT idem_claim('k1', request_hash => '\x00')$$), pg_temp.state($$SELECT idem_claim('k64', request_hash => decode(repeat('ab', 64), 'hex'))$$),
       pg_temp.state($$SELECT idem_claim('k', request_hash => decode(repeat('ab', 1000000), 'hex'))$$);

--
-- Durations
--
SELECT pg_temp.try($$SELECT idem_claim('k', ttl => '0')$$);
SELECT pg_temp.try($$SELECT idem_claim('k', lease => '-1 s')$$);
SELECT pg_temp.try($$SELECT idem_claim('k', lease => '300000 years')$$);
SELECT pg_temp.try($$SELECT idem_claim('k', lease => '-178000000 years')$$);
SELECT pg_temp.try($$SELECT idem_claim('k', wait => '-1 s')$$);
SELECT pg_temp.try($$SELECT idem_claim('k', wait => NULL)$$);
SELECT pg_temp.try(format($$SELECT idem_fail('mine', token => %s, disposition => 'retry', retry_after => '-1 s')$$, :token));

-- Every argument that is one.  (Where it is right, the token is what is wrong.)
SELECT name, array_agg(pg_temp.state(format(call, value)) ORDER BY n)
    FROM (VALUES (1, 'claim ttl', 'SELECT idem_claim(''k'', ttl => %L)'), (2, 'claim lease', 'SELECT idem_claim(''k'', lease => %L)'),
                 (3, 'claim wait', 'SELECT idem_claim(''done'', wait => %L)'), (4, 'complete ttl', 'SELECT idem_complete(''mine'', token => 0, ttl => %L)'),
                 (5, 'fail ttl', 'SELECT idem_fail(''mine'', token => 0, ttl => %L)'),
                 (6, 'fail retry_after', 'SELECT idem_fail(''mine'', token => 0, disposition => ''retry'', retry_after => %L)'),
                 (7, 'renew lease', 'SELECT idem_renew(''mine'', 0, %L)'), (8, 'checkpoint lease', 'SELECT idem_checkpoint(''mine'', 0, ''c'', lease => %L)')) calls(c, name, call),
         (VALUES (1, '0'), (2, '1 month -30 days'), (3, '-1 microsecond'), (4, '-1 s'), (5, '1 month -31 days'), (6, '-1 month 29 days 23:59:59'), (7, '-178000000 years'),
                 (8, '300000 years'), (9, '178000000 years'), (10, '290000 years 100000000 hours'), (11, '2562047788 hours')) args(n, value)
    GROUP BY c, name ORDER BY c;
SELECT pg_temp.state($$SELECT idem_complete('mine', token => 0, ttl => '1 microsecond')$$), pg_temp.state($$SELECT idem_fail('mine', token => 0, ttl => '1 microsecond')$$),
       pg_temp.state($$SELECT idem_renew('mine', 0, '1 microsecond')$$), pg_temp.state($$SELECT idem_checkpoint('mine', 0, 'c', lease => '1 microsecond')$$);

-- Infinite ones, on servers that have them: only a wait may be
SELECT bool_and(pg_temp.state(format(call, value)) = CASE WHEN current_setting('server_version_num')::int < 170000 THEN '22007' ELSE wanted END)
    FROM (VALUES ('SELECT idem_claim(''k'', ttl => %L)', 'IK400'), ('SELECT idem_claim(''k'', lease => %L)', 'IK400'),
                 ('SELECT idem_complete(''mine'', token => ' || :token || ', ttl => %L)', 'IK400'), ('SELECT idem_fail(''mine'', token => ' || :token || ', ttl => %L)', 'IK400'),
                 ('SELECT idem_fail(''mine'', token => ' || :token || ', disposition => ''retry'', retry_after => %L)', 'IK400'),
                 ('SELECT idem_renew(''mine'', ' || :token || ', %L)', 'IK400'), ('SELECT idem_checkpoint(''mine'', ' || :token || ', ''c'', lease => %L)', 'IK400')) calls(call, wanted),
         (VALUES ('infinity'), ('-infinity')) args(value);
SELECT pg_temp.state($$SELECT idem_claim('done', wait => 'infinity')$$) = CASE WHEN current_setting('server_version_num')::int < 170000 THEN '22007' ELSE 'accepted' END,
       pg_temp.state($$SELECT idem_claim('done', wait => '-infinity')$$) = CASE WHEN current_setting('server_version_num')::int < 170000 THEN '22007' ELSE 'IK400' END;

-- The longest that end in time, added to anything, overflow nothing.  (A year
-- is 360 days here.)
SELECT outcome FROM idem_claim('long', ttl => '292000 years', lease => '292000 years');
SELECT outcome, retry_after > '0' FROM idem_claim('long');
SELECT idem_renew('long', k.token, '292000 years') > '289000-01-01', idem_checkpoint('long', k.token, 'c', lease => '292000 years') > '289000-01-01'
    FROM idempotency_keys k WHERE k.key = 'long';
SELECT idem_fail('long', token => k.token, disposition => 'retry', retry_after => '292000 years', ttl => '292000 years') FROM idempotency_keys k WHERE k.key = 'long';
SELECT outcome, retry_after > '291999 years' FROM idem_claim('long');
SELECT status, expires_at > '294000-01-01', isfinite(expires_at) FROM idem_get('long');
SELECT outcome FROM idem_claim('done', wait => '292000 years');

-- Null is the default.
SELECT outcome FROM idem_claim('defaults', NULL, '', '', NULL, NULL, NULL, '0', true);
SELECT expires_at - created_at, lease_until - created_at FROM idem_get('defaults');

--
-- http_status
--
SELECT pg_temp.try(format($$SELECT idem_complete('mine', token => %s, http_status => 99)$$, :token));
SELECT pg_temp.try(format($$SELECT idem_fail('mine', token => %s, http_status => 600)$$, :token));
SELECT s, pg_temp.state(format('SELECT idem_complete(''mine'', token => %s, http_status => %s)', :token, s)), pg_temp.state(format('SELECT idem_fail(''mine'', token => %s, http_status => %s)', :token, s))
    FROM unnest('{-2147483648,-1,0,99,600,2147483647}'::int[]) s;

--
-- headers
--
SELECT pg_temp.try(format($$SELECT idem_complete('mine', token => %s, headers => '{"Content-Type": "text/plain"}')$$, :token));
SELECT h, pg_temp.state(format('SELECT idem_complete(''mine'', token => %s, headers => %L)', :token, h)), pg_temp.state(format('SELECT idem_fail(''mine'', token => %s, headers => %L)', :token, h))
    FROM unnest(ARRAY['null', '1', 'true', '"a"', '{}', '[1]', '["a", "b"]', '[null]', '[{}]', '[[]]', '[["a"]]', '[["a", "b", "c"]]', '[["a", 1]]', '[[1, "a"]]',
                      '[["a", null]]', '[["a", true]]', '[["a", ["b"]]]', '[["a", {"b": "c"}]]', '[[["a", "b"]]]', '[["a", "b"], ["c"]]', '[["a", "b"], "c"]', '[["a", "b"], {"c": "d"}]',
                      '[[], ["a", "b"]]', '[["a", []]]', '[[[], []]]']) h;

--
-- What must not be null elsewhere
--
SELECT pg_temp.try($$SELECT idem_claim('k', takeover => NULL)$$);
SELECT pg_temp.try(format($$SELECT idem_fail('mine', token => %s, disposition => NULL)$$, :token));
SELECT pg_temp.try(format($$SELECT idem_checkpoint('mine', %s, NULL)$$, :token));
SELECT pg_temp.try($$SELECT idem_resolve('mine', NULL)$$);
SELECT pg_temp.try($$SELECT idem_resolve('mine', 'processing')$$);
SELECT pg_temp.try($$SELECT idem_resolve('mine', 'unknown')$$);
SELECT pg_temp.try($$SELECT idem_grant(NULL)$$);
SELECT pg_temp.try($$SELECT idem_grant(current_user::regrole, NULL)$$);
SELECT pg_temp.try($$SELECT idem_revoke(NULL)$$);

--
-- No such claim, settled, lost
--
SELECT pg_temp.try($$SELECT idem_complete('never')$$);
SELECT pg_temp.try($$SELECT idem_complete('never', token => 1, scope => 'elsewhere')$$, false);
SELECT pg_temp.try($$SELECT idem_fail('never')$$, false);
SELECT pg_temp.try($$SELECT idem_renew('never', 1)$$, false);
SELECT pg_temp.try($$SELECT idem_checkpoint('never', 1, 'c')$$, false);
SELECT pg_temp.try($$SELECT idem_resolve('never', 'completed')$$, false);
SELECT pg_temp.try(format($$SELECT idem_complete('done', '2', %s)$$, :done_token));
SELECT pg_temp.try(format($$SELECT idem_fail('done', '1', %s)$$, :done_token), false);
SELECT pg_temp.try(format($$SELECT idem_renew('done', %s)$$, :done_token), false);
SELECT pg_temp.try(format($$SELECT idem_checkpoint('done', %s, 'c')$$, :done_token), false);
SELECT pg_temp.try($$SELECT idem_resolve('done', 'failed')$$, false);
SELECT idem_fail('un', '1', c.token, disposition => 'unknown') FROM idem_claim('un') c;
SELECT pg_temp.try(format($$SELECT idem_complete('un', '1', %s)$$, k.token)) FROM idempotency_keys k WHERE k.key = 'un';
SELECT pg_temp.try(format($$SELECT idem_complete('mine', token => %s)$$, :token + 1000));
SELECT pg_temp.try($$SELECT idem_complete('mine')$$);
SELECT pg_temp.try($$SELECT idem_renew('mine', NULL)$$);
SELECT pg_temp.try($$SELECT idem_checkpoint('mine', NULL, 'c')$$);
-- what is missing else comes first
SELECT pg_temp.try($$SELECT idem_renew('nobody', NULL)$$);
SELECT pg_temp.try($$SELECT idem_checkpoint('nobody', NULL, 'c')$$);
BEGIN READ ONLY;
SELECT idem_renew('mine', NULL);
ROLLBACK;
SELECT pg_temp.try($$SELECT idem_fail('mine')$$, false);
SELECT pg_temp.try(format($$SELECT idem_fail('mine', token => %s)$$, -:token), false);
SELECT pg_temp.try(format($$SELECT idem_renew('mine', %s)$$, :token + 1000), false);
SELECT pg_temp.try(format($$SELECT idem_checkpoint('mine', %s, 'c')$$, :token + 1000), false);
-- What someone calls a key is quoted.
SELECT pg_temp.try($$SELECT idem_complete('a "key" with %s and %n')$$, false);

--
-- Too large
--
SET idempotency.max_response_size = '100B';
SELECT pg_temp.try(format($$SELECT idem_complete('mine', token => %s, body => repeat('b', 101)::bytea)$$, :token));
SELECT pg_temp.try(format($$SELECT idem_fail('mine', token => %s, body => repeat('b', 101)::bytea)$$, :token), false);
SELECT pg_temp.try(format($$SELECT idem_complete('mine', to_jsonb(repeat('r', 100)), %s)$$, :token), false);
SELECT pg_temp.try(format($$SELECT idem_complete('mine', token => %s, headers => jsonb_build_array(jsonb_build_array('h', repeat('h', 100))))$$, :token), false);
-- together
SELECT pg_temp.try(format($$SELECT idem_complete('mine', to_jsonb(repeat('r', 40)), %s, body => repeat('b', 60)::bytea)$$, :token), false);
-- compressed or not
SELECT pg_temp.try(format($$SELECT idem_complete('mine', token => %s, body => repeat('b', 1000000)::bytea)$$, :token), false);
SELECT pg_temp.try(format($$SELECT idem_checkpoint('mine', %s, 'c', to_jsonb(repeat('s', 100)))$$, :token));
SELECT pg_temp.try(format($$SELECT idem_checkpoint('mine', %s, repeat('c', 101))$$, :token), false);
SELECT pg_temp.try($$SELECT idem_resolve('mine', 'completed', to_jsonb(repeat('r', 100)))$$, false);
SELECT pg_temp.try($$SELECT idem_resolve('mine', 'completed', note => repeat('n', 101))$$);
-- The claim stays with its owner, who may say something shorter: the limit itself is allowed.
SELECT outcome, attempt FROM idem_claim('mine', '{"n": 1}');
SELECT idem_checkpoint('mine', :token, repeat('c', 100)) IS NOT NULL;
SELECT idem_complete('mine', token => :token, body => repeat('b', 100)::bytea);
RESET idempotency.max_response_size;
-- One megabyte unless set
SELECT token FROM idem_claim('mega') \gset
SELECT pg_temp.try(format($$SELECT idem_complete('mega', token => %s, body => decode(repeat('00', 1048577), 'hex'))$$, :token));
SELECT pg_temp.state(format($$SELECT idem_complete('mega', token => %s, body => decode(repeat('00', 1048576), 'hex'))$$, :token));
-- A replay is answered whatever the limit has become since.
SET idempotency.max_response_size = 0;
SELECT outcome, length(body) FROM idem_claim('mega');
SELECT pg_temp.state($$SELECT idem_complete('small', 'null', token) FROM idem_claim('small')$$), pg_temp.state($$SELECT idem_complete('small', token => token) FROM idem_claim('small')$$);
RESET idempotency.max_response_size;

--
-- What PostgreSQL itself refuses
--
SELECT pg_temp.state($$SELECT idem_claim('k', '{not json')$$), pg_temp.state($$SELECT idem_claim('k', '"\u0000"')$$), pg_temp.state($$SELECT idem_claim(convert_from('\xff', 'UTF8'))$$),
       pg_temp.state($$SELECT idem_fail('k', disposition => 'maybe')$$), pg_temp.state($$SELECT idem_claim('k', lease => 'soon')$$), pg_temp.state($$SELECT idem_claim()$$);
\set VERBOSITY sqlstate
BEGIN;
SELECT 1 / 0;
SELECT idem_claim('k');
SELECT idem_get('k');
ROLLBACK;

-- Nothing of all this has made a row.
SELECT count(*) FROM idempotency_keys WHERE key IN ('k', 'never');
