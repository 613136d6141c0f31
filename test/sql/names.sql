--
-- names: idem_key and idem_uuid, which never give two things the same name
--
TRUNCATE idempotency_keys;
\pset null -

--
-- idem_key
--
SELECT idem_key('order-123', 'ChargePayment');
SELECT idem_key('order-123'), idem_key('a', 'b', 'c', 'd'), idem_key(VARIADIC '{x,y}');
SELECT parts, idem_key(VARIADIC parts) AS key
    FROM (VALUES (ARRAY['a', 'b:c']), (ARRAY['a:b', 'c']), (ARRAY['a', 'b', 'c']), (ARRAY['a\', 'b']), (ARRAY['a\:b']), (ARRAY['a', '\b']),
                 (ARRAY['']), (ARRAY['', '']), (ARRAY['a', '']), (ARRAY['', 'a']), (ARRAY[' a ', 'B']), (ARRAY[E'\u00e4', E'\u20ac:'])) v(parts);

-- The escapes can be undone: all arrays of up to four of these parts
CREATE FUNCTION pg_temp.split(key text) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    parts text[] := '{}';
    part text := '';
    escaped boolean := false;
    c text;
BEGIN
    FOREACH c IN ARRAY regexp_split_to_array(key, '') LOOP
        IF escaped OR c NOT IN (':', '\') THEN part := part || c; escaped := false;
        ELSIF c = '\' THEN escaped := true;
        ELSE parts := parts || part; part := '';
        END IF;
    END LOOP;
    RETURN parts || part;
END $$;
CREATE TEMP TABLE parts AS
    WITH RECURSIVE p(part) AS (VALUES (''), ('a'), (':'), ('\'), ('a:'), ('\:'), ('::'), ('\\')),
    lists(list) AS (SELECT ARRAY[part] FROM p UNION ALL SELECT list || part FROM lists, p WHERE cardinality(list) < 4)
    SELECT list, idem_key(VARIADIC list) AS key FROM lists;
SELECT count(DISTINCT list) AS lists, count(DISTINCT key COLLATE "C") AS keys FROM parts;
SELECT list, key FROM parts WHERE pg_temp.split(key) <> list LIMIT 5;

-- and many at random.
SELECT setseed(0.25);
CREATE TEMP TABLE random_parts AS
    SELECT (SELECT array_agg((SELECT coalesce(string_agg(substr(E':\\ab\u00e4| ', 1 + (random() * 6)::int, 1), ''), '')
                              FROM generate_series(1, (random() * 4 + 0 * n + 0 * i)::int)))
            FROM generate_series(1, 1 + (random() * 4 + 0 * i)::int) n) AS list
    FROM generate_series(1, 20000) i;
SELECT count(*) = 20000 AS enough, count(DISTINCT list) > 15000 AS varied, count(DISTINCT list) = count(DISTINCT idem_key(VARIADIC list) COLLATE "C") AS injective
    FROM random_parts;
SELECT list, idem_key(VARIADIC list) FROM random_parts WHERE pg_temp.split(idem_key(VARIADIC list)) <> list LIMIT 5;

-- It may be longer than a key can be; claiming it is what is refused.
SELECT length(idem_key(repeat('a', 200), repeat(':', 200)));
SELECT outcome FROM idem_claim(idem_key('order-123', 'ChargePayment'), scope => 'names');

-- Refused
SELECT idem_key(VARIADIC '{}');
SELECT idem_key(VARIADIC NULL);
SELECT idem_key(NULL);
SELECT idem_key('a', NULL, 'b');

--
-- idem_uuid: version 5 of "{bytes of scope}:{scope}{key}" in namespace
-- 794d6e52-8004-4d0d-8979-8872ea81aa61.  (These are what Python's uuid5 gives.)
--
SELECT key, left(scope, 10) AS scope, idem_uuid(key, scope) AS uuid, idem_uuid(key, scope) = expected::uuid AS as_expected
    FROM (VALUES ('order-123:ChargePayment', '', 'b480ca3f-80ec-58da-9575-197b3d1ffb0d'),
                 ('order-123:ChargePayment', 'tenant-1', '978ca1d9-86b1-5c6c-a1f3-47bf7dc3e0f9'),
                 ('a', 'bc', '2746746b-43d8-57a1-88c8-87273f5a9cad'),
                 ('ab', 'c', '9fd1a015-19cb-5327-b473-23cb264e9c61'),
                 (E'\u00e4\u20ac', E'\u00fc', 'a6ec43fd-b182-5330-a022-84022d80f65e'),
                 ('1:a', '', '0c2d0bd0-58db-54a1-a7a8-85b56d2a67f0'),
                 ('k', repeat('x', 255), 'be33a64d-c89e-56e1-926c-029e9ec3b910')) v(key, scope, expected);
SELECT idem_uuid('order-123:ChargePayment') = idem_uuid('order-123:ChargePayment', '') AS default_scope;

-- Version and variant of RFC 9562, and no two alike
SELECT count(*), count(DISTINCT u) AS different, bool_and(substr(u::text, 15, 1) = '5') AS version, bool_and(substr(u::text, 20, 1) IN ('8', '9', 'a', 'b')) AS variant
    FROM generate_series(1, 10000) i, idem_uuid('key-' || i, 'scope-' || i % 7) u;
SELECT count(*) AS pairs, count(DISTINCT idem_uuid(substr(t, n + 1), substr(t, 1, n))) AS different
    FROM unnest('{"1:1:1:1:","0:0:0:0:","11111111","a:b:c:d:"}'::text[]) t, generate_series(0, 8) n WHERE n < length(t);

-- It depends on its arguments alone, and may be in an index.
SET idempotency.scope = 'tenant-1';
SELECT idem_uuid('order-123:ChargePayment') = 'b480ca3f-80ec-58da-9575-197b3d1ffb0d' AS same, idem_key('a', 'b');
RESET idempotency.scope;
CREATE TEMP TABLE payments (key text);
CREATE INDEX ON payments (idem_uuid(key));
CREATE INDEX ON payments (idem_key('payment', key));

-- Refused
SELECT idem_uuid(NULL);
SELECT idem_uuid('');
SELECT idem_uuid('k', NULL);
SELECT idem_uuid(repeat('k', 256));
SELECT idem_uuid('k', repeat('s', 256));
