--
-- fail: a claim that ends without success: final, to be retried, or unknown
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
\set result 'outcome, attempt, http_status, headers, response, body, retry_after > \'0\' AS retry'

CREATE FUNCTION pg_temp.version_of(name text) RETURNS text LANGUAGE sql AS
$$ SELECT concat_ws(' ', k.ctid, k.xmin, k.xmax, k) FROM idempotency_keys k WHERE k.key = name $$;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;

--
-- final, which is the default: stored and replayed like a success
--
SELECT token FROM idem_claim('final') \gset
SELECT idem_fail('final', '{"code": "card_declined"}', :token, http_status => 402, headers => '[["A","1"],["A","2"]]', body => '\x00');
SELECT :result FROM idem_claim('final');
SELECT :result FROM idem_claim('final', wait => '1 hour');
SELECT status, completed_at IS NOT NULL AS ended, expires_at - completed_at AS kept, lease_until FROM idem_get('final');

-- Server errors too, and failures that say nothing.
SELECT idem_fail('final-503', '{"code": "down"}', token, disposition => 'final', http_status => 503, body => 'sorry') FROM idem_claim('final-503');
SELECT idem_fail('final-null', token => token) FROM idem_claim('final-null');
SELECT idem_fail('final-json', 'null', token) FROM idem_claim('final-json');
SELECT k, :result FROM unnest('{final-503,final-null,final-json}'::text[]) k, idem_claim(k);

-- In the claim's transaction no token is asked for.
BEGIN;
SELECT outcome FROM idem_claim('final-here');
SELECT idem_fail('final-here', '1');
COMMIT;
SELECT :result FROM idem_claim('final-here');

-- A short ttl makes it free again soon.
SELECT idem_fail('final-short', '1', token, http_status => 400, ttl => '1 ms') FROM idem_claim('final-short', ttl => '1 day');
CALL pg_temp.pause(0.01);
SELECT :result FROM idem_claim('final-short');
SELECT idem_fail('final-ttl', '1', token, ttl => '30 s') FROM idem_claim('final-ttl');
SELECT expires_at - completed_at AS kept FROM idem_get('final-ttl');

-- retry_after counts with retry alone.
SELECT idem_fail('final-retry', '1', token, retry_after => '1 hour') FROM idem_claim('final-retry');
SELECT :result FROM idem_claim('final-retry');

--
-- retry: the next claim gets it, not before its time
--
SELECT token FROM idem_claim('retry') \gset
SELECT idem_checkpoint('retry', :token, 'sent', '[1]') IS NOT NULL AS noted;
SELECT idem_fail('retry', '{"code": "busy"}', :token, disposition => 'retry', http_status => 503, body => 'busy');
SELECT status, completed_at IS NOT NULL AS ended, expires_at - completed_at AS kept, response FROM idem_get('retry');
SELECT :result, checkpoint, state, token > :token AS newer, completed_at FROM idem_claim('retry');
SELECT status, http_status, response, body, completed_at FROM idem_get('retry');

-- Attempts count up until one succeeds.
SELECT idem_fail('retries', '1', token, disposition => 'retry') FROM idem_claim('retries');
SELECT idem_fail('retries', '2', token, disposition => 'retry') FROM idem_claim('retries');
SELECT idem_complete('retries', '3', token) FROM idem_claim('retries');
SELECT :result FROM idem_claim('retries');

-- Zero is no time at all; a wait doesn't change what the answer is.
SELECT idem_fail('retry-zero', '1', token, disposition => 'retry', retry_after => '0') FROM idem_claim('retry-zero');
SELECT outcome, attempt FROM idem_claim('retry-zero');
SELECT idem_fail('retry-later', '1', token, disposition => 'retry', retry_after => '1 hour') FROM idem_claim('retry-later');
SELECT :result, retry_after BETWEEN '59 min' AND '1 hour' AS about FROM idem_claim('retry-later', wait => '1 hour');
SELECT idem_fail('retry-soon', '1', token, disposition => 'retry', retry_after => '1 ms') FROM idem_claim('retry-soon');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt FROM idem_claim('retry-soon');

-- The row outlives the time until the retry, and keeps its count.
SELECT idem_fail('retry-kept', '1', token, disposition => 'retry', retry_after => '2 hours', ttl => '1 s') FROM idem_claim('retry-kept');
SELECT expires_at - completed_at > '2 hours' AS kept FROM idem_get('retry-kept');
SELECT outcome, attempt FROM idem_claim('retry-kept');
SELECT idem_fail('retry-ttl', '1', token, disposition => 'retry', ttl => '3 hours') FROM idem_claim('retry-ttl');
SELECT expires_at - completed_at AS kept FROM idem_get('retry-ttl');
-- The next claim brings its own ttl along.
SELECT outcome, attempt, expires_at - clock_timestamp() BETWEEN '23 h' AND '24 h' AS a_day FROM idem_claim('retry-ttl');

-- Past the retention it starts again at 1.
SELECT idem_fail('retry-gone', '1', token, disposition => 'retry', ttl => '1 ms') FROM idem_claim('retry-gone');
CALL pg_temp.pause(0.01);
SELECT outcome, attempt, checkpoint FROM idem_claim('retry-gone');

--
-- unknown: held until it is resolved, whatever ttl and lease say
--
SELECT token FROM idem_claim('unknown', lease => '1 hour', ttl => '1 ms') \gset
SELECT idem_fail('unknown', '{"code": "timeout"}', :token, disposition => 'unknown', ttl => '1 ms', retry_after => '1 ms');
CALL pg_temp.pause(0.01);
SELECT :result, token, expires_at FROM idem_claim('unknown');
SELECT status, expired, expires_at FROM idem_get('unknown');
-- Not even its owner can settle it any more.
SELECT idem_complete('unknown', '1', :token);
SELECT idem_fail('unknown', '{"code": "timeout"}', :token);
SELECT idem_fail('unknown', '{"code": "timeout"}', :token, disposition => 'unknown');
SELECT outcome FROM idem_claim('unknown');

--
-- Once more: the same is no news, and anything else is refused
--
SELECT token FROM idem_claim('again') \gset
SELECT idem_fail('again', '1', :token, http_status => 400, headers => '[]', body => '');
SELECT pg_temp.version_of('again') AS version \gset
SELECT idem_fail('again', '1', :token, http_status => 400, headers => '[]', body => '');
SELECT idem_fail('again', '1', :token, http_status => 400, headers => '[]', body => '', ttl => '1 min', retry_after => '1 min');
SELECT idem_fail('again', '2', :token, http_status => 400, headers => '[]', body => '');
SELECT idem_fail('again', '1', :token, http_status => 401, headers => '[]', body => '');
SELECT idem_fail('again', '1', :token, http_status => 400, body => '');
SELECT idem_fail('again', '1', :token, http_status => 400, headers => '[]');
SELECT idem_fail('again', '1', :token, http_status => 400, headers => '[]', body => '', disposition => 'retry');
SELECT idem_fail('again', '1', :token, http_status => 400, headers => '[]', body => '', disposition => 'unknown');
SELECT idem_complete('again', '1', :token, http_status => 400, headers => '[]', body => '');
SELECT idem_fail('again', '1', :token + 1, http_status => 400, headers => '[]', body => '');
SELECT pg_temp.version_of('again') = :'version' AS untouched;
SELECT token FROM idem_claim('again-retry') \gset
SELECT idem_fail('again-retry', '1', :token, disposition => 'retry', retry_after => '1 hour');
SELECT idem_fail('again-retry', '1', :token, disposition => 'retry', retry_after => '1 hour');
SELECT idem_fail('again-retry', '2', :token, disposition => 'retry', retry_after => '1 hour');
SELECT idem_fail('again-retry', '1', :token);

--
-- Not the owner
--
SELECT token FROM idem_claim('not-mine') \gset
SELECT pg_temp.version_of('not-mine') AS version \gset
SELECT idem_fail('not-mine', '1');
SELECT idem_fail('not-mine', '1', :token + 1);
SELECT idem_fail('not-mine', '1', :token, 'elsewhere');
SELECT idem_fail('never', '1', :token);
SELECT pg_temp.version_of('not-mine') = :'version' AS untouched;

-- A transaction that has failed can't say so.
BEGIN;
SELECT 1 / 0;
SELECT idem_fail('not-mine', '1', :token);
ROLLBACK;
SELECT idem_fail('not-mine', '1', :token);
