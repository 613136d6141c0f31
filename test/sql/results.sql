--
-- results: what goes in comes out, byte for byte, and nothing is taken for nothing else
--
TRUNCATE idempotency_keys;
\pset null -

-- So many bytes that don't compress, the same ones every time.
CREATE FUNCTION pg_temp.noise(bytes int) RETURNS bytea LANGUAGE sql IMMUTABLE AS
$$ SELECT substr(decode(string_agg(md5(i::text), ''), 'hex'), 1, bytes) FROM generate_series(0, bytes / 16) i $$;
-- Claims the key, completes it, and has it replayed.
CREATE FUNCTION pg_temp.replay(key text, response jsonb, http_status int, headers jsonb, body bytea,
                               OUT outcome text, OUT http_status_ int, OUT headers_ jsonb, OUT response_ jsonb, OUT body_ bytea)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM idem_claim(key);
    PERFORM idem_complete(key, response, http_status => http_status, headers => headers, body => body);
    SELECT c.outcome, c.http_status, c.headers, c.response, c.body INTO outcome, http_status_, headers_, response_, body_
        FROM idem_claim(key) c;
END $$;

--
-- body: any bytes, from none to a megabyte
--
CREATE TEMP TABLE bodies (name text, body bytea);
INSERT INTO bodies VALUES
    ('none', NULL), ('empty', ''), ('zero', '\x00'), ('ff', '\xff'), ('zeros', '\x000000'), ('not UTF-8', '\xc328a0a1e228a1f0288c28'),
    ('text', 'plain text'), ('CR LF', E'a\r\nb\r\n'), ('backslashes', '\\134\\000'),
    ('all bytes', (SELECT string_agg(set_byte('\x00', 0, i), '' ORDER BY i) FROM generate_series(0, 255) i)),
    ('1 kB zeros', decode(repeat('00', 1000), 'hex')), ('4 kB', pg_temp.noise(4096)), ('100 kB', pg_temp.noise(102400)),
    ('100 kB ff', decode(repeat('ff', 102400), 'hex')), ('1 MB', pg_temp.noise(1048576));
SELECT name, length(body) AS bytes, r.outcome, r.body_ IS NOT DISTINCT FROM body AS same
    FROM bodies, pg_temp.replay('body ' || name, NULL, NULL, NULL, body) r;
-- In another transaction, and as idem_get shows it
SELECT count(*), bool_and(c.body IS NOT DISTINCT FROM b.body) AS replayed, bool_and(g.body IS NOT DISTINCT FROM b.body) AS got
    FROM bodies b, idem_claim('body ' || name) c, idem_get('body ' || name) g;
SELECT name FROM bodies b, idem_claim('body ' || name) c WHERE c.body IS NULL;

--
-- response: SQL null, JSON null, and the empty ones, are all different
--
CREATE TEMP TABLE responses (name text, response jsonb);
INSERT INTO responses VALUES
    ('none', NULL), ('null', 'null'), ('object', '{}'), ('array', '[]'), ('string', '""'), ('zero', '0'), ('false', 'false'),
    ('nulls', '{"a": null}'), ('spelling', '[1, 1.0, 1.00, 1e2, -0, 12345678901234567890.123456789]'),
    ('text', '"\u00e4\ud83d\ude00\t\\ \" /"'), ('nested', '{"b": [{"c": {}}], "a": [[], [null]]}'),
    ('4 kB', to_jsonb(encode(pg_temp.noise(2048), 'hex'))), ('100 kB', to_jsonb(encode(pg_temp.noise(51200), 'hex'))),
    ('100 kB wide', (SELECT jsonb_object_agg(i, md5(i::text)) FROM generate_series(1, 2300) i)),
    ('100 kB same', to_jsonb(repeat('x', 102400)));
SELECT name, r.response_ IS NOT DISTINCT FROM response AS same, r.response_::text IS NOT DISTINCT FROM response::text AS same_text,
       CASE WHEN length(response::text) < 80 THEN r.response_ END AS response
    FROM responses, pg_temp.replay('response ' || name, response, NULL, NULL, NULL) r;
SELECT count(*), bool_and(c.response::text IS NOT DISTINCT FROM r.response::text) AS replayed
    FROM responses r, idem_claim('response ' || name) c;
SELECT name, jsonb_typeof(c.response) FROM responses, idem_claim('response ' || name) c WHERE length(c.response::text) < 5 OR c.response IS NULL;

--
-- headers: pairs in their order, with repeated names, in the case they came in
--
SELECT headers, r.headers_ AS replayed, r.headers_::text IS NOT DISTINCT FROM headers::text AS same
    FROM (VALUES (NULL::jsonb), ('[]'), ('[["Set-Cookie","a=1"],["Set-Cookie","b=2"]]'), ('[["Set-Cookie","b=2"],["Set-Cookie","a=1"]]'),
                 ('[["content-type","x"],["Content-Type","X"],["CONTENT-TYPE",""]]'), ('[["Z","1"],["A","2"],["M","3"]]'), ('[["",""]]'),
                 ('[["X-Text","\u00e4 \" \\"]]')) v(headers),
         pg_temp.replay('headers ' || coalesce(headers::text, 'none'), NULL, NULL, headers, NULL) r;
SELECT r.headers_ = h AS same, jsonb_array_length(r.headers_)
    FROM (SELECT jsonb_agg(jsonb_build_array('X-' || i % 7, md5(i::text)) ORDER BY i) FROM generate_series(1, 1000) i) v(h),
         pg_temp.replay('headers many', NULL, NULL, h, NULL) r;

--
-- http_status: each one is kept as it is
--
SELECT count(*) AS all_of_them FROM generate_series(100, 599) s, pg_temp.replay('status ' || s, NULL, s, NULL, NULL) r WHERE r.http_status_ = s;
SELECT outcome, http_status_ FROM pg_temp.replay('status none', NULL, NULL, NULL, NULL);
-- A completion with an error's status is a completion.
SELECT outcome, http_status_ FROM pg_temp.replay('an error', '{"code": "declined"}', 402, NULL, NULL);

--
-- Results that lie in another table's toast, which then goes away
--
CREATE TABLE results_source (name text, body bytea, response jsonb, headers jsonb);
ALTER TABLE results_source SET (toast_tuple_target = 128);
ALTER TABLE results_source ALTER name SET STORAGE EXTERNAL, ALTER body SET STORAGE EXTERNAL, ALTER headers SET STORAGE EXTERNAL;
INSERT INTO results_source
    SELECT repeat(c, 250), pg_temp.noise(n), to_jsonb(repeat(c, n)), jsonb_build_array(jsonb_build_array('X', repeat(c, n)))
    FROM (VALUES ('a', 300), ('b', 4096), ('c', 102400)) v(c, n);
SELECT pg_relation_size(reltoastrelid) > 0 AS toasted FROM pg_class WHERE relname = 'results_source';
CREATE TEMP TABLE expected AS SELECT left(name, 1) AS name, md5(body) AS body, md5(response::text) AS response, md5(headers::text) AS headers FROM results_source;
DO $$
DECLARE s results_source; t bigint;
BEGIN
    FOR s IN SELECT * FROM results_source LOOP
        SELECT token INTO t FROM idem_claim(s.name, s.response, scope => s.name, operation => s.name, request_hash => substr(s.body, 1, 64));
        PERFORM idem_checkpoint(s.name, t, s.name, s.response, scope => s.name);
        PERFORM idem_complete(s.name, s.response, t, s.name, 200, s.headers, s.body);
    END LOOP;
END $$;
-- straight from the column, without a variable between
SELECT count(*) FROM (SELECT idem_claim('direct ' || left(name, 1)) FROM results_source) c;
SELECT idem_complete('direct ' || left(name, 1), response, k.token, headers => headers, body => body)
    FROM results_source JOIN LATERAL (SELECT token FROM idempotency_keys WHERE key = 'direct ' || left(name, 1)) k ON true;
SELECT count(*), bool_and(c.outcome = 'completed' AND c.body = s.body AND c.response = s.response AND c.headers = s.headers) AS same
    FROM results_source s, idem_claim(name, response, name, name, substr(body, 1, 64)) c;
SELECT count(*), bool_and(c.outcome = 'mismatch') FROM results_source s, idem_claim(name, scope => name, operation => name, request_hash => substr(body, 2, 64)) c;
DELETE FROM results_source;
VACUUM results_source;
DROP TABLE results_source;
SELECT e.name, md5(c.body) = e.body AS body, md5(c.response::text) = e.response AS response, md5(c.headers::text) = e.headers AS headers,
       md5(d.body) = e.body AND md5(d.response::text) = e.response AND md5(d.headers::text) = e.headers AS direct,
       g.checkpoint = repeat(e.name, 250) AND md5(g.state::text) = e.response AS state
    FROM expected e, idem_claim(repeat(name, 250), scope => repeat(name, 250), operation => repeat(name, 250)) c, idem_claim('direct ' || name) d,
         idem_get(repeat(name, 250), repeat(name, 250)) g;

-- What a caller has kept is his, when the key is long gone.
CREATE TABLE results_kept AS SELECT c.* FROM idem_claim('direct c') c;
SELECT idem_forget('direct c');
VACUUM idempotency_keys;
SELECT md5(k.body) = e.body AS body, md5(k.response::text) = e.response AS response, md5(k.headers::text) = e.headers AS headers
    FROM results_kept k, expected e WHERE e.name = 'c';
DROP TABLE results_kept;

--
-- A long state lives through take-over, renewal and completion
--
SELECT token AS token1 FROM idem_claim('state') \gset
SELECT idem_checkpoint('state', :token1, repeat('c', 10000), to_jsonb(encode(pg_temp.noise(51200), 'hex')), lease => '1 ms') IS NOT NULL AS noted;
DO $$ BEGIN PERFORM pg_sleep(0.01); END $$;
SELECT token AS token2, checkpoint = repeat('c', 10000) AS checkpoint, state = to_jsonb(encode(pg_temp.noise(51200), 'hex')) AS state
    FROM idem_claim('state') \gset
\echo :checkpoint :state
SELECT idem_renew('state', :token2, '1 hour') IS NOT NULL AS renewed;
SELECT idem_complete('state', '1', :token2, body => pg_temp.noise(51200));
VACUUM idempotency_keys;
SELECT checkpoint = repeat('c', 10000) AS checkpoint, state = to_jsonb(encode(pg_temp.noise(51200), 'hex')) AS state,
       body = pg_temp.noise(51200) AS body FROM idem_get('state');
-- and a long result through the roll-back of its successor.
SELECT idem_complete('successor', token => token, body => pg_temp.noise(51200), ttl => '1 ms') FROM idem_claim('successor');
DO $$ BEGIN PERFORM pg_sleep(0.01); END $$;
BEGIN;
SELECT outcome, body FROM idem_claim('successor');
SELECT idem_complete('successor', body => '\x00');
ROLLBACK;
VACUUM idempotency_keys;
SELECT body = pg_temp.noise(51200) AS body FROM idem_get('successor');

-- Compared as a whole, wherever it is stored
SELECT token FROM idem_claim('compared') \gset
SELECT idem_complete('compared', to_jsonb(repeat('x', 102400)), :token, body => pg_temp.noise(102400));
SELECT idem_complete('compared', to_jsonb(repeat('x', 102400)), :token, body => pg_temp.noise(102400));
\set VERBOSITY sqlstate
SELECT idem_complete('compared', to_jsonb(repeat('x', 102400)), :token, body => set_byte(pg_temp.noise(102400), 102399, 0));
SELECT idem_complete('compared', to_jsonb(repeat('x', 102399) || 'y'), :token, body => pg_temp.noise(102400));
