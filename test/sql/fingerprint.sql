--
-- fingerprint: equal if and only if the requests are equal as jsonb
--
TRUNCATE idempotency_keys;
\pset null -

-- 33 bytes: the version of the algorithm, and SHA-256
SELECT length(idem_fingerprint('{}')), get_byte(idem_fingerprint('{}'), 0) AS version;

-- Pinned: an algorithm that gives other digests must get another version, or
-- an upgrade would turn live keys into mismatches.
SELECT left(request, 50) AS request, idem_fingerprint(request::jsonb)
    FROM (VALUES ('null'), ('true'), ('false'), ('0'), ('1'), ('-1.50'), ('1e20'), ('123456789012345678901234567890.123456789'), ('1E-7'),
                 ('""'), ('"a"'), ('"\u00e4\u20ac\ud83d\ude00"'), ('[]'), ('[1, [2], {"a": null}]'), ('{}'), ('{"a": 1, "b": {"c": [true, "x"]}}'),
                 ('{"bb": 1, "a": 2, "ab": 3, "\u00e4": 4}'), ('"' || repeat('x', 127) || '"'), ('"' || repeat('x', 128) || '"'), ('"' || repeat('x', 20000) || '"')) v(request);

-- What is equal as jsonb, and what is not: all pairs of these
CREATE TEMP TABLE values_ (value jsonb);
INSERT INTO values_ VALUES
    ('null'), ('true'), ('false'), ('0'), ('-0'), ('0.0'), ('-0.0'), ('0e5'), ('1'), ('1.0'), ('1.00000'), ('1e0'), ('10e-1'), ('0.1e1'), ('-1'),
    ('100'), ('1e2'), ('1.0E+2'), ('10000'), ('1e4'), ('10000.0'), ('100000000'), ('1e8'), ('1E-7'), ('0.0000001'), ('1e-8'), ('0.1'), ('0.10'), ('0.01'),
    ('9007199254740991'), ('9007199254740992'), ('9007199254740993'), ('9007199254740993.0'), ('1e1000'), ('1e1001'), ('0.1e-999'),
    ('3.14159265358979323846'), ('3.14159265358979323847'), ('"1"'), ('"1.0"'), ('"null"'), ('"true"'), ('""'), ('" "'), ('"a"'), ('"A"'), ('"\u00e4"'), ('"a\u0308"'),
    ('"\t"'), ('"\\t"'), ('"a\u0001"'), ('"[]"'), ('"{}"'), ('[]'), ('{}'), ('[[]]'), ('[{}]'), ('[null]'), ('[[], []]'), ('[[[]]]'), ('[1]'), ('[1, 2]'),
    ('[2, 1]'), ('[1.0, 2]'), ('[12]'), ('["1", "2"]'), ('["12"]'), ('["1,2"]'), ('[[1], 2]'), ('[1, [2]]'), ('[[1, 2]]'), ('["a"]'), ('["a", "b"]'),
    ('["ab"]'), ('["a", ""]'), ('["", "a"]'), ('{"a": null}'), ('{"a": ""}'), ('{"a": []}'), ('{"a": {}}'), ('{"a": 0}'), ('{"a": false}'), ('{"a": 1}'),
    ('{"a": 1.0}'), ('{"a": "1"}'), ('{"a": [1]}'), ('{"A": 1}'), ('{" a": 1}'), ('{"a": 1, "b": 2}'), ('{"b": 2, "a": 1}'), ('{"a": 2, "b": 1}'),
    ('{"a": {"b": 1}}'), ('{"a": {"b": 1}, "c": 2}'), ('{"a": {"b": 1, "c": 2}}'), ('{"ab": 1}'), ('{"a.b": 1}'), ('{"a": "b"}'), ('["a", "b"]'),
    ('{"a": 1, "a": 2}'), ('{"a": 2}'), ('{"i": 1, "I": 2, "\u0131": 3, "z": 4, "\u00e4": 5}'), ('{"\u00e4": 5, "z": 4, "\u0131": 3, "I": 2, "i": 1}'), ('{"": 1}'), ('{"": null}');
SELECT a.value AS a, b.value AS b FROM values_ a, values_ b
    WHERE (a.value = b.value) <> (idem_fingerprint(a.value) = idem_fingerprint(b.value));
SELECT count(DISTINCT value) AS values, count(DISTINCT idem_fingerprint(value)) AS fingerprints FROM values_;

-- Spelled out
SELECT idem_fingerprint('{"a":1,"b":{"c":2,"d":3}}') = idem_fingerprint(' { "b" : {"d":3, "c":2 },
    "a":1 } ') AS key_order, idem_fingerprint('[1,2]') <> idem_fingerprint('[2,1]') AS array_order;
SELECT count(DISTINCT idem_fingerprint(v::jsonb)) AS one FROM unnest('{1,1.0,1e0,10e-1}'::text[]) v;
SELECT count(DISTINCT idem_fingerprint(v::jsonb)) AS one FROM unnest('{0,-0,0.0,-0.0}'::text[]) v;
SELECT count(DISTINCT idem_fingerprint(v::jsonb)) AS three FROM unnest('{1,"\"1\"","\"1.0\""}'::text[]) v;
SELECT count(DISTINCT idem_fingerprint(v::jsonb)) AS five FROM unnest('{"{}","{\"a\":null}","{\"a\":\"\"}","{\"a\":[]}","null"}'::text[]) v;
SELECT idem_fingerprint('9007199254740993') <> idem_fingerprint('9007199254740992') AS more_than_a_double;
SELECT idem_fingerprint('{"a":1,"a":2}') = idem_fingerprint('{"a":2}') AS last_one_counts;

-- However it came about
SELECT idem_fingerprint(to_jsonb(1.10::numeric)) = idem_fingerprint('1.1') AS numeric_, idem_fingerprint(to_jsonb(1e10::float8)) = idem_fingerprint('10000000000') AS double,
       idem_fingerprint(jsonb_build_object('b', 1, 'a', '{2,3}'::int[])) = idem_fingerprint('{"a":[2,3],"b":1}') AS built,
       idem_fingerprint('{"a":1,"b":2,"c":3}'::jsonb - 'b') = idem_fingerprint('{"a":1,"c":3}') AS taken_from,
       idem_fingerprint('{"a":{"b":[1.0]}}'::jsonb -> 'a' -> 'b') = idem_fingerprint('[1]') AS part,
       idem_fingerprint('["x"]'::jsonb -> 0) = idem_fingerprint('"x"') AS scalar;

-- 10 000 random pairs, of which each differs in one byte alone
SELECT setseed(0.5);
SELECT count(*) AS pairs, count(*) FILTER (WHERE idem_fingerprint(a) = idem_fingerprint(b)) AS same,
       count(*) FILTER (WHERE idem_fingerprint(a) <> idem_fingerprint(a2)) AS unstable
    FROM (SELECT jsonb_build_object('id', i, 'note', p || 'a') AS a, jsonb_build_object('id', i, 'note', p || 'b') AS b,
                 jsonb_build_object('note', p || 'a', 'id', i::numeric(20, 5)) AS a2
          FROM (SELECT i, repeat(md5(random()::text), i % 20) AS p FROM generate_series(1, 10000) i) r) s;
-- The last byte of a long one, the last element, the last key
SELECT idem_fingerprint(to_jsonb(repeat('x', 1000000) || 'a')) <> idem_fingerprint(to_jsonb(repeat('x', 1000000) || 'b')) AS byte,
       idem_fingerprint(to_jsonb(repeat('x', 1000000))) <> idem_fingerprint(to_jsonb(repeat('x', 1000001))) AS length,
       idem_fingerprint((SELECT jsonb_agg(i) FROM generate_series(1, 10000) i)) <> idem_fingerprint((SELECT jsonb_agg(i) FROM generate_series(1, 10001) i)) AS element,
       idem_fingerprint((SELECT jsonb_object_agg(i, 0) FROM generate_series(1, 10000) i)) <> idem_fingerprint((SELECT jsonb_object_agg(i, i / 10000) FROM generate_series(1, 10000) i)) AS value;

-- 5 000 deep works, and with too little stack it is refused as by any function
SELECT idem_fingerprint((repeat('[', 5000) || repeat(']', 5000))::jsonb) <> idem_fingerprint((repeat('[', 4999) || repeat(']', 4999))::jsonb) AS arrays,
       idem_fingerprint((repeat('{"a":', 2000) || '1' || repeat('}', 2000))::jsonb) <> idem_fingerprint((repeat('{"a":', 2000) || '2' || repeat('}', 2000))::jsonb) AS objects;
CREATE TEMP TABLE deep AS SELECT (repeat('[', 5000) || repeat(']', 5000))::jsonb AS request;
SELECT outcome FROM deep, idem_claim('deep', request);
SELECT outcome FROM deep, idem_claim('deep', request);
SELECT outcome FROM deep, idem_claim('deep', jsonb_build_array(request));
\set VERBOSITY sqlstate
SET max_stack_depth = '100kB';
SELECT length(idem_fingerprint(request)) FROM deep;
SELECT outcome FROM deep, idem_claim('too deep', request);
RESET max_stack_depth;
\set VERBOSITY default
SELECT count(*) FROM idem_get('too deep');

--
-- ignore: paths that are left out
--
CREATE TEMP TABLE ignored (request jsonb, ignore text[], same_as jsonb);
INSERT INTO ignored VALUES
    ('{"a": 1, "ts": 2}', '{ts}', '{"a": 1}'),
    ('{"a": 1, "ts": {"b": [2]}}', '{ts}', '{"a": 1}'),
    ('{"a": 1}', '{ts}', '{"a": 1}'),
    ('{"ts": 1}', '{ts}', '{}'),
    ('{"a": 1, "client": {"id": 5, "trace_id": 6}}', '{client.trace_id}', '{"a": 1, "client": {"id": 5}}'),
    ('{"a": 1, "client": {"trace_id": 6}}', '{client.trace_id}', '{"a": 1, "client": {}}'),
    ('{"a": 1, "client": 5}', '{client.trace_id}', '{"a": 1, "client": 5}'),
    ('{"a": 1, "trace_id": 5}', '{client.trace_id}', '{"a": 1, "trace_id": 5}'),
    ('{"a": 1, "ts": 2, "client": {"trace_id": 6}}', '{ts,client.trace_id}', '{"a": 1, "client": {}}'),
    ('{"a": 1, "b": {"ts": 2}}', '{ts}', '{"a": 1, "b": {"ts": 2}}'),
    ('{"items": [{"id": 1, "ts": 2}, {"id": 2, "ts": 3}, [{"ts": 4}]]}', '{items.ts}', '{"items": [{"id": 1}, {"id": 2}, [{}]]}'),
    ('[{"ts": 1}, {"ts": 2}]', '{ts}', '[{}, {}]'),
    ('{"a": {"b": 1, "c": 2}}', '{a,a.b}', '{}'),
    ('{"a": {"b": 1, "c": 2}}', '{a.b,a.c}', '{"a": {}}'),
    ('{"a": {"b": {"c": 1, "d": 2}}, "b": {"c": 3}}', '{a.b.c}', '{"a": {"b": {"d": 2}}, "b": {"c": 3}}'),
    ('{"a.b": 1, "a": {"b": 2}}', '{a.b}', '{"a.b": 1, "a": {}}'),
    ('{"a.b": 1, "a": {"b": 2}}', '{a\\.b}', '{"a": {"b": 2}}'),
    ('{"a\\b": 1, "ab": 2}', '{a\\\\b}', '{"ab": 2}'),
    ('{"": 1, "a": 2}', '{""}', '{"a": 2}'),
    ('{"a": {"": 1, "b": 2}}', '{a.}', '{"a": {"b": 2}}'),
    ('{"\u00e4": 1, "b": 2}', '{ä}', '{"b": 2}'),
    ('{"a": 1, "A": 2}', '{a}', '{"A": 2}'),
    ('{"a": 1, "ab": 2, "b": 3}', '{a}', '{"ab": 2, "b": 3}'),
    ('{"0": 1, "b": [2, 3]}', '{0}', '{"b": [2, 3]}'),
    ('"ts"', '{ts}', '"ts"'),
    ('["ts"]', '{ts}', '["ts"]'),
    ('{"a": 1}', '{}', '{"a": 1}'),
    ('{"a": 1}', NULL, '{"a": 1}');
SELECT request, ignore, same_as, idem_fingerprint(request, ignore) = idem_fingerprint(same_as) AS same FROM ignored;
-- The order of the paths, and how often one is given, make no difference.
SELECT idem_fingerprint('{"a":1,"b":2,"c":3}', '{a,b}') = idem_fingerprint('{"a":5,"b":6,"c":3}', '{b,a,b}') AS same;
-- What is left out is left out of the whole, not of what it is compared with.
SELECT idem_fingerprint('{"a": 1, "ts": 2}', '{ts}') <> idem_fingerprint('{"a": 1, "ts": 2}') AS differs;
-- The way to use it
SELECT outcome FROM idem_claim('ignoring', request_hash => idem_fingerprint('{"amount": 10, "ts": 1}', '{ts}'));
SELECT outcome FROM idem_claim('ignoring', request_hash => idem_fingerprint('{"amount": 10, "ts": 2}', '{ts}'));
SELECT outcome FROM idem_claim('ignoring', request_hash => idem_fingerprint('{"amount": 11, "ts": 2}', '{ts}'));

-- It is immutable: a generated column or an index may use it.
CREATE TEMP TABLE requests (request jsonb, fingerprint bytea GENERATED ALWAYS AS (idem_fingerprint(request, '{ts}')) STORED);
CREATE INDEX ON requests (idem_fingerprint(request));
INSERT INTO requests VALUES ('{"a": 1, "ts": 2}'), ('{"a": 1.0, "ts": 3}'), ('{"a": 2}');
SELECT count(DISTINCT fingerprint) FROM requests;

-- Refused
SELECT idem_fingerprint(NULL);
SELECT idem_fingerprint('{}', '{a,NULL}');
SELECT idem_fingerprint('{}', '{"a\\"}');
