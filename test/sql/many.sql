--
-- many: idem_claim_many and idem_complete_many
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set shown 'ordinal, key, outcome, token IS NOT NULL AS token, attempt, response'
SET statement_timeout = '60s';

CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;
CREATE FUNCTION pg_temp.versions() RETURNS text LANGUAGE sql AS
$$ SELECT md5(string_agg(concat_ws(' ', k.ctid, k.xmin, k.xmax, k), E'\n' ORDER BY scope, key)) FROM idempotency_keys k $$;

--
-- A row for each key, in the order of the array
--
SELECT :shown FROM idem_claim_many('{z,a,m,B,b}');
SELECT :shown FROM idem_claim_many('{b,z,new,a}');
SELECT ordinal, key, lag(token) OVER (ORDER BY key COLLATE "C") < token AS in_byte_order FROM idempotency_keys k JOIN unnest('{z,a,m,B,b}'::text[]) WITH ORDINALITY u(key, ordinal) USING (key) ORDER BY 1;
SELECT * FROM idem_claim_many('{}');
SELECT :shown FROM idem_claim_many('[5:6]={l1,l2}');
SELECT :shown FROM idem_claim_many('{{d1,d2},{d3,d1}}');
-- All of idem_claim's columns
SELECT idem_complete('all', '"r"', token, http_status => 201, headers => '[["A","1"]]', body => '\x00ff') FROM idem_claim('all', '1');
SELECT ordinal, key, outcome, token, attempt, http_status, headers, response, body, checkpoint, state, created_at <= completed_at AS times, expires_at - completed_at AS kept, retry_after FROM idem_claim_many('{all}');
SELECT to_jsonb(m) - '{ordinal,key}'::text[] = to_jsonb(c) AS same FROM idem_claim_many('{all}') m, idem_claim('all') c;
SELECT idem_checkpoint('all-2', token, 'sent', '{"id": 3}', lease => '1 ms') IS NOT NULL AS noted FROM idem_claim('all-2');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt, checkpoint, state, completed_at, expires_at > created_at AS expires, retry_after FROM idem_claim_many('{all-2}');
SELECT outcome, token, attempt, completed_at, retry_after > '0' AS retry FROM idem_claim_many('{all-2}');

-- A key twice: the first place has it.
SELECT :shown FROM idem_claim_many('{twice,other,twice,twice}');
SELECT :shown FROM idem_claim_many('{all,all}');
SELECT :shown FROM idem_claim_many('{other-twice,z-twice,other-twice}', '{1,1,2}');
SELECT count(*) FROM idempotency_keys WHERE key LIKE '%twice';
-- The requests go with the keys.
SELECT :shown FROM idem_claim_many('{r2,r1,r3,r4}', '{"{\"n\": 2}","{\"n\": 1}",NULL,null}');
SELECT key, request_hash = idem_fingerprint('{"n": 1}') AS n1, request_hash = idem_fingerprint('{"n": 2}') AS n2 FROM idempotency_keys WHERE key ~ '^r[1-4]' ORDER BY key;
SELECT :shown FROM idem_claim_many('{r1,r2,r1,r3,r2}', ARRAY['{"n": 1.0}', '{"n": 2}', '{"n": 2}', '{"n": 3}', NULL]::jsonb[]);
SELECT :shown FROM idem_claim_many('{r5,r6}', ARRAY['null', '{}']::jsonb[]);
SELECT :shown FROM idem_claim_many('{r5,r6}', ARRAY['{}', '{}']::jsonb[]);
-- The other arguments go for all of them.
SELECT :shown FROM idem_claim_many('{o1,o2}', NULL, 'tenant', 'charge', '2 days', '1 hour', false);
SELECT key, operation, lease_until - created_at AS lease, expires_at FROM unnest('{o1,o2}'::text[]) k, idem_get(k, 'tenant');
SELECT :shown FROM idem_claim_many('{o1,o2}', scope => 'tenant');
SELECT :shown FROM idem_claim_many('{o1,o2}', scope => 'tenant', operation => 'charge');
SELECT count(*) FROM unnest('{o1,o2}'::text[]) k, idem_get(k);
SELECT ttl, takeover FROM idempotency_keys WHERE scope = 'tenant';
SELECT expires_at - created_at AS kept FROM idem_claim_many('{o3}', ttl => '2 days');
SELECT expires_at - created_at AS kept, lease_until - created_at AS lease FROM idem_get('z');

-- Part of the batch is known: each has its own outcome, and nothing is rolled back.
SELECT idem_complete(k, to_jsonb(k), token) FROM unnest('{p-done-1,p-done-2,p-done-3}'::text[]) k, idem_claim(k, '1');
SELECT outcome FROM idem_claim('p-open', '1', lease => '1 hour');
SELECT idem_fail('p-failed', '"no"', token) FROM idem_claim('p-failed', '1');
SELECT idem_fail('p-unknown', token => token, disposition => 'unknown') FROM idem_claim('p-unknown', '1');
SELECT idem_fail('p-retry', token => token, disposition => 'retry') FROM idem_claim('p-retry', '1');
SELECT idem_fail('p-later', token => token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('p-later', '1');
SELECT idem_renew('p-ended', token, '1 ms') IS NOT NULL AS renewed FROM idem_claim('p-ended', '1');
SELECT idem_complete('p-expired', '"old"', token, ttl => '1 ms') FROM idem_claim('p-expired', '1');
SELECT idem_renew('p-held', token, '1 ms') IS NOT NULL AS renewed FROM idem_claim('p-held', '1', takeover => false);
SELECT idem_once('p-once');
CALL pg_temp.pause(0.01);
SELECT :shown, retry_after > '0' AS retry FROM idem_claim_many('{p-done-3,p-new,p-later,p-done-1,p-new-2,p-open,p-retry,p-failed,p-ended,p-unknown,p-done-2,p-expired,p-held,p-once,p-done-2}'::text[],
    '{1,1,1,1,1,1,1,1,1,1,2,1,1,null,1}');
SELECT key, status, attempt FROM unnest('{p-done-1,p-done-2,p-done-3,p-open,p-new,p-new-2,p-failed,p-retry,p-ended,p-expired}'::text[]) k, idem_get(k);

-- In one transaction with what it claims
BEGIN;
SELECT outcome FROM idem_claim('t1');
SELECT :shown FROM idem_claim_many('{t2,t1}');
SAVEPOINT a;
SELECT :shown FROM idem_claim_many('{t3,t2}');
ROLLBACK TO a;
SELECT :shown FROM idem_claim_many('{t3,t2}');
SELECT idem_complete('t2', '2'), idem_complete('t3', '3');
SELECT :shown FROM idem_claim_many('{t1,t2,t3}');
ROLLBACK;
SELECT count(*) FROM idempotency_keys WHERE key ~ '^t[1-3]';
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outcome, count(*) FROM idem_claim_many('{s1,all,s2,s1}') GROUP BY outcome ORDER BY outcome;
COMMIT;
-- Anywhere in a query
SELECT (idem_claim_many('{q1,q1,all}')).outcome;
SELECT u.n, c.ordinal, c.key, c.outcome FROM unnest('{1,2}'::int[]) u(n), LATERAL idem_claim_many(ARRAY['q2', 'q' || u.n + 2]) c;
CREATE TABLE jobs AS SELECT 'job-' || i AS job FROM generate_series(1, 5) i;
CREATE VIEW jobs_mine AS SELECT job, c.outcome FROM idem_claim_many((SELECT array_agg(job ORDER BY job) FROM jobs)) c JOIN jobs ON job = c.key;
SELECT * FROM jobs_mine ORDER BY job;
SELECT * FROM jobs_mine ORDER BY job;
DROP VIEW jobs_mine;
DROP TABLE jobs;
DO $$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT * FROM idem_claim_many('{l3,l4,l3}') LOOP
        IF r.outcome = 'claimed' THEN PERFORM idem_complete(r.key, to_jsonb(r.ordinal)); END IF;
    END LOOP;
END $$;
SELECT :shown FROM idem_claim_many('{l4,l3}');

-- A thousand at once
SELECT outcome, count(*), min(ordinal), max(ordinal) FROM idem_claim_many((SELECT array_agg('bulk-' || i * 7919 % 1000 ORDER BY i) FROM generate_series(1, 1000) i)) GROUP BY outcome;
SELECT outcome, count(*), bool_and(key = 'bulk-' || ordinal * 17 % 1000) AS in_input_order FROM idem_claim_many((SELECT array_agg('bulk-' || i * 17 % 1000 ORDER BY i) FROM generate_series(1, 1500) i)) GROUP BY outcome;
SELECT idem_complete_many(array_agg(key ORDER BY key), array_agg(token ORDER BY key), array_agg(to_jsonb(key) ORDER BY key)) FROM idempotency_keys WHERE key LIKE 'bulk-%';
SELECT outcome, count(*), bool_and(response = to_jsonb(key)) AS theirs FROM idem_claim_many((SELECT array_agg('bulk-' || i ORDER BY i) FROM generate_series(0, 1099) i)) GROUP BY outcome ORDER BY outcome;
-- Long results of which each has its own
SELECT idem_complete_many('{long-1,long-2,long-3}', array_agg(token ORDER BY ordinal), array_agg(to_jsonb((SELECT string_agg(md5(ordinal || ' ' || i), '') FROM generate_series(1, 1000) i)) ORDER BY ordinal)) FROM idem_claim_many('{long-1,long-2,long-3}');
SELECT key, length(response #>> '{}'), left(response #>> '{}', 32) = md5(substr(key, 6) || ' 1') AS its_own FROM idem_claim_many('{long-3,long-1,long-2,long-1}');

-- In a read-only transaction: what is known, all or nothing
BEGIN READ ONLY;
SELECT :shown FROM idem_claim_many('{all,p-open,p-done-2,p-unknown,p-later}', '{1,1,2,1,1}');
SAVEPOINT a;
SELECT :shown FROM idem_claim_many('{all,new-1}');
ROLLBACK TO a;
\set VERBOSITY default
SELECT :shown FROM idem_claim_many('{all,new-1}');
\set VERBOSITY sqlstate
ROLLBACK TO a;
SELECT idem_complete_many('{all}', '{1}');
ROLLBACK;

--
-- Refused: the whole batch
--
SELECT pg_temp.versions() AS versions \gset
SELECT last_value AS last_token FROM idempotency_keys_token_seq \gset
\set VERBOSITY default
SELECT * FROM idem_claim_many(NULL);
SELECT * FROM idem_claim_many('{bad-1,NULL}');
SELECT * FROM idem_claim_many('{"",bad-1}');
SELECT * FROM idem_claim_many('{bad-1,bad-2}', '{1}');
SELECT * FROM idem_claim_many('{bad-1}', '{1,2}');
\set VERBOSITY sqlstate
SELECT * FROM idem_claim_many('{bad-1}', '{}');
SELECT * FROM idem_claim_many('{}', '{1}');
SELECT * FROM idem_claim_many(ARRAY['bad-1', repeat('k', 256)]);
SELECT * FROM idem_claim_many('{bad-1}', scope => NULL);
SELECT * FROM idem_claim_many('{bad-1}', scope => repeat('s', 256));
SELECT * FROM idem_claim_many('{bad-1}', operation => NULL);
SELECT * FROM idem_claim_many('{bad-1}', operation => repeat('o', 256));
SELECT * FROM idem_claim_many('{bad-1}', ttl => '0');
SELECT * FROM idem_claim_many('{bad-1}', ttl => '178000000 years');
SELECT * FROM idem_claim_many('{bad-1}', lease => '0');
SELECT * FROM idem_claim_many('{bad-1}', lease => '-1 s');
SELECT * FROM idem_claim_many('{bad-1}', takeover => NULL);
SELECT * FROM idem_claim_many('{}', lease => '0');
SELECT pg_temp.versions() = :'versions' AS untouched, last_value = :last_token AS no_token_drawn FROM idempotency_keys_token_seq;

--
-- idem_complete_many: how many are new
--
SELECT array_agg(token ORDER BY ordinal) AS tokens FROM idem_claim_many('{c1,c2,c3}') \gset
SELECT idem_complete_many('{c1,c3}', ARRAY[(:'tokens'::bigint[])[1], (:'tokens'::bigint[])[3]], '{"\"one\"","{\"three\": 3}"}');
SELECT key, status, response, lease_until > now() AS lease, extract(epoch FROM expires_at - completed_at)::int AS kept FROM unnest('{c1,c2,c3}'::text[]) k, idem_get(k);
SELECT pg_temp.versions() AS versions \gset
SELECT idem_complete_many('{c3,c1}', ARRAY[(:'tokens'::bigint[])[3], (:'tokens'::bigint[])[1]], '{"{\"three\": 3}","\"one\""}');
SELECT pg_temp.versions() = :'versions' AS untouched;
SELECT idem_complete_many('{c3,c2,c2,c1,c2}', (SELECT array_agg((:'tokens'::bigint[])[i]) FROM unnest('{3,2,2,1,2}'::int[]) i), '{"{\"three\": 3.0}",2,2,"\"one\"",2}');
SELECT :shown FROM idem_claim_many('{c1,c2,c3}');
SELECT idem_complete_many('{}', '{}'), idem_complete_many('{}', NULL, '{}'), idem_complete_many('{}', '{}', NULL);
-- Nothings that differ
SELECT array_agg(token ORDER BY ordinal) AS tokens FROM idem_claim_many('{n1,n2,n3}') \gset
SELECT idem_complete_many('{n1,n2,n3}', :'tokens', ARRAY[NULL, 'null', '{}']::jsonb[]);
SELECT :shown FROM idem_claim_many('{n1,n2,n3}');
SELECT idem_complete_many('{n1}', :'tokens'::bigint[], NULL);
SELECT idem_complete_many('{n1}', (:'tokens'::bigint[])[1:1], NULL), idem_complete_many('{n1}', (:'tokens'::bigint[])[1:1]);
SELECT idem_complete_many('{n2}', (:'tokens'::bigint[])[2:2]);
SELECT idem_complete_many('{n1,n2}', (:'tokens'::bigint[])[1:2], '{null,NULL}');
-- All without a response
SELECT idem_complete_many(array_agg(key), array_agg(token)) FROM idem_claim_many('{w1,w2}');
SELECT :shown FROM idem_claim_many('{w1,w2}');
-- Scope and ttl
SELECT array_agg(token ORDER BY ordinal) AS tokens FROM idem_claim_many('{c1,c2}', scope => 'tenant', ttl => '3 hours') \gset
SELECT idem_complete_many('{c1,c2}', :'tokens', scope => 'other');
SELECT idem_complete_many('{c1}', (:'tokens'::bigint[])[1:1], NULL, 'tenant', '90 s'), idem_complete_many('{c2}', (:'tokens'::bigint[])[2:2], scope => 'tenant');
SELECT key, status, extract(epoch FROM expires_at - completed_at)::int AS kept FROM unnest('{c1,c2}'::text[]) k, idem_get(k, 'tenant');

-- Without tokens: what this transaction has claimed
BEGIN;
SELECT count(*) FROM idem_claim_many('{own1,own2,own3}');
SELECT idem_complete_many('{own2,own1}', NULL, '{2,1}'), idem_complete_many('{own1}', NULL, '{1}');
SAVEPOINT a;
SELECT idem_complete_many('{own3,c2,own2}', ARRAY[NULL, NULL, NULL]::bigint[], '{3,2,2}');
ROLLBACK TO a;
SELECT idem_complete_many('{own3,all-2,own2}', ARRAY[NULL, token, NULL]::bigint[], '{3,2,2}') FROM idempotency_keys WHERE key = 'all-2';
COMMIT;
SELECT :shown FROM idem_claim_many('{own1,own2,own3,all-2}');
SELECT count(*) FROM idem_claim_many('{left1,left2}');
SELECT idem_complete_many('{left1,left2}', NULL);
SELECT idem_complete_many('{left1,left2}', '{NULL,NULL}');
SELECT idem_complete_many('{left1,left2}', array_agg(CASE key WHEN 'left1' THEN token END ORDER BY key)) FROM idempotency_keys WHERE key LIKE 'left_';
SELECT status FROM unnest('{left1,left2}'::text[]) k, idem_get(k);
-- In one statement with the claims
SELECT idem_complete_many(array_agg(key ORDER BY ordinal), array_agg(token ORDER BY ordinal), array_agg(to_jsonb(ordinal) ORDER BY ordinal)) FROM idem_claim_many('{st1,c1,st2}') WHERE outcome = 'claimed';
SELECT :shown FROM idem_claim_many('{st1,st2}');

--
-- All or nothing: one that can't be completed keeps all of them from it
--
SELECT array_agg(token ORDER BY ordinal) AS tokens FROM idem_claim_many('{e1,e2,e3}', lease => '1 hour') \gset
\set VERBOSITY default
SELECT idem_complete_many('{e1,e2,e-none}', :'tokens', '{1,2,3}');
SELECT idem_complete_many('{e1,e2,e3}', ARRAY[(:'tokens'::bigint[])[1], 1, (:'tokens'::bigint[])[3]]);
\set VERBOSITY sqlstate
SELECT idem_complete_many('{e-none,e2,e3}', :'tokens', '{1,2,3}');
SELECT idem_complete_many('{e1,c1,e3}', ARRAY[(:'tokens'::bigint[])[1], (SELECT token FROM idempotency_keys WHERE key = 'c1' AND scope = ''), (:'tokens'::bigint[])[3]], '{1,2,3}');
SELECT idem_complete_many('{e1,p-failed,e3}', ARRAY[(:'tokens'::bigint[])[1], (SELECT token FROM idempotency_keys WHERE key = 'p-failed'), (:'tokens'::bigint[])[3]], '{1,2,3}');
SELECT idem_complete_many('{e1,e2,e1}', (SELECT array_agg((:'tokens'::bigint[])[i]) FROM unnest('{1,2,1}'::int[]) i), '{1,2,3}');
SELECT idem_complete_many('{e1,e2}', (:'tokens'::bigint[])[1:2], ARRAY['1', to_jsonb(repeat('x', 1048577))]);
SELECT idem_complete_many('{e1,e2}', :'tokens');
SELECT idem_complete_many('{e1,e2,e3}', :'tokens', '{1,2}');
SELECT idem_complete_many('{e1,e2,e3}', :'tokens', '{}');
SELECT idem_complete_many(NULL, :'tokens');
SELECT idem_complete_many('{e1,NULL,e3}', :'tokens');
SELECT idem_complete_many('{e1,e2,""}', :'tokens');
SELECT idem_complete_many('{e1,e2,e3}', :'tokens', scope => NULL);
SELECT idem_complete_many('{e1,e2,e3}', :'tokens', ttl => '0');
SELECT idem_complete_many('{e1,e2,e3}', :'tokens', ttl => '-1 s');
\set VERBOSITY default
SELECT idem_complete_many(NULL, :'tokens');
SELECT idem_complete_many('{e1,e2,NULL}', :'tokens');
SELECT idem_complete_many('{e1,e2}', :'tokens');
SELECT idem_complete_many('{e1,e2,e3}', :'tokens', '{1,2}');
\set VERBOSITY sqlstate
SELECT bool_and(status = 'processing' AND response IS NULL AND completed_at IS NULL) AS open FROM unnest('{e1,e2,e3}'::text[]) k, idem_get(k);
-- Caught, nothing of it is left either.
BEGIN;
SAVEPOINT a;
SELECT idem_complete_many('{e1,e2,e-none}', :'tokens', '{1,2,3}');
ROLLBACK TO a;
SELECT bool_and(status = 'processing') AS open FROM unnest('{e1,e2,e3}'::text[]) k, idem_get(k);
SELECT idem_complete_many('{e3,e2,e1}', (SELECT array_agg((:'tokens'::bigint[])[i]) FROM unnest('{3,2,1}'::int[]) i), '{3,2,1}');
COMMIT;
SELECT :shown FROM idem_claim_many('{e1,e2,e3}');
-- An ended lease is still its owner's, one that was taken over isn't.
SELECT array_agg(token ORDER BY ordinal) AS tokens FROM idem_claim_many('{v1,v2}', lease => '1 ms') \gset
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('v2');
SELECT idem_complete_many('{v1,v2}', :'tokens');
SELECT idem_complete_many('{v1}', (:'tokens'::bigint[])[1:1]);
-- An expired one counts as absent.
SELECT array_agg(token ORDER BY ordinal) AS tokens FROM idem_claim_many('{x1,x2}', lease => '1 ms', ttl => '1 ms') \gset
CALL pg_temp.pause(0.01);
SELECT idem_complete_many('{x1,x2}', :'tokens');
SELECT :shown FROM idem_claim_many('{x1,x2}');
