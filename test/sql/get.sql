--
-- get: how a key stands, column by column, in every state
--
TRUNCATE idempotency_keys;
\pset null -
\pset expanded on

CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;
-- Every column; an instant as what it is in relation to the others.
CREATE FUNCTION pg_temp.show(key text, scope text DEFAULT '')
    RETURNS TABLE (scope_ text, key_ text, operation text, status text, attempt int, checkpoint text, state jsonb, http_status int,
                   headers jsonb, response jsonb, body bytea, created text, lease_until text, completed text, expires text, expired boolean)
    LANGUAGE sql AS $$
    SELECT g.scope, g.key, g.operation, g.status::text, g.attempt, g.checkpoint, g.state, g.http_status, g.headers, g.response, g.body,
           CASE WHEN g.created_at <= clock_timestamp() THEN 'past' ELSE 'future' END,
           CASE WHEN g.lease_until > clock_timestamp() THEN 'future' WHEN g.lease_until > g.created_at THEN 'past' WHEN g.lease_until IS NOT NULL THEN 'too early' END,
           CASE WHEN g.completed_at > clock_timestamp() THEN 'future' WHEN g.completed_at >= g.created_at THEN 'past' WHEN g.completed_at IS NOT NULL THEN 'too early' END,
           CASE WHEN g.expires_at = 'infinity' THEN 'never' WHEN g.expires_at > clock_timestamp() THEN 'future' WHEN g.expires_at > g.created_at THEN 'past' END,
           g.expired
    FROM idem_get($1, $2) g $$;

-- Nothing there: no row
SELECT * FROM idem_get('none');
SELECT count(*) FROM idem_get('none');
SELECT * FROM idem_claim('g', scope => 'a'), pg_temp.show('g');

-- The columns, their order and their types
CREATE TEMP TABLE shape AS SELECT * FROM idem_get('none');
\pset expanded off
SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'shape'::regclass AND attnum > 0 ORDER BY attnum;
\pset expanded on

-- processing
SELECT token FROM idem_claim('claimed', '{"secret": 1}', scope => 'shop', operation => 'charge') \gset
SELECT * FROM pg_temp.show('claimed', 'shop');
SELECT idem_checkpoint('claimed', :token, 'sent', '{"id": 3}', 'shop') IS NOT NULL AS noted;
SELECT * FROM pg_temp.show('claimed', 'shop');

-- its lease has ended: processing still, for it is its owner's until taken over
SELECT idem_renew('claimed', :token, '1 ms', 'shop') IS NOT NULL AS renewed;
CALL pg_temp.pause(0.01);
SELECT * FROM pg_temp.show('claimed', 'shop');

-- completed
SELECT idem_complete('claimed', '{"receipt": 7}', :token, 'shop', 201, '[["Location","/7"]]', '\x00ff');
SELECT * FROM pg_temp.show('claimed', 'shop');

-- failed
SELECT idem_fail('failed', '{"code": "declined"}', token, http_status => 402) FROM idem_claim('failed');
SELECT * FROM pg_temp.show('failed');

-- retryable, and what is left of it once it is claimed again
SELECT idem_fail('retry', '{"code": "busy"}', token, disposition => 'retry', http_status => 503) FROM idem_claim('retry');
SELECT * FROM pg_temp.show('retry');
SELECT c.outcome FROM idem_claim('retry') c;
SELECT * FROM pg_temp.show('retry');

-- unknown, by its owner's word, and because the lease has ended
SELECT idem_fail('unknown', '{"code": "timeout"}', token, disposition => 'unknown') FROM idem_claim('unknown');
SELECT * FROM pg_temp.show('unknown');
SELECT idem_renew('held', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('held', takeover => false);
CALL pg_temp.pause(0.01);
SELECT * FROM pg_temp.show('held');

-- expired: there, until it is swept or claimed again
SELECT idem_complete('expired', '1', token, ttl => '1 ms') FROM idem_claim('expired');
CALL pg_temp.pause(0.01);
SELECT * FROM pg_temp.show('expired');
SELECT idem_renew('left', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('left', ttl => '1 ms');
CALL pg_temp.pause(0.01);
SELECT * FROM pg_temp.show('left');

-- It sees what its own transaction has done, statement by statement.
\pset expanded off
BEGIN;
SELECT c.outcome, g.status FROM idem_claim('own') c, idem_get('own') g;
SELECT c.done, g.status, g.response FROM (SELECT idem_complete('own', '1') AS done) c, idem_get('own') g;
SELECT status, response FROM idem_get('own');
SAVEPOINT here;
SELECT idem_forget('own');
SELECT count(*) FROM idem_get('own');
ROLLBACK TO here;
SELECT status, response FROM idem_get('own');
ROLLBACK;
SELECT count(*) FROM idem_get('own');

-- Inside other queries
SELECT k, (SELECT status FROM idem_get(k)) AS status FROM unnest('{failed,none,unknown}'::text[]) k;
SELECT k, g.status FROM unnest('{failed,none,unknown}'::text[]) k LEFT JOIN idem_get(k) g ON true;
SELECT idem_get('none') IS NULL AS no_row;
SELECT (idem_get('failed')).status;

-- No key is an error, not no row.
\set VERBOSITY sqlstate
SELECT * FROM idem_get(NULL);
SELECT * FROM idem_get('');
SELECT * FROM idem_get('failed', NULL);
