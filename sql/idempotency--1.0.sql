/* sql/idempotency--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idempotency" to load this file. \quit

--
-- Types
--

CREATE TYPE idem_status AS ENUM ('processing', 'completed', 'failed', 'retryable', 'unknown');
COMMENT ON TYPE idem_status IS 'how the row of an idempotency key stands';

CREATE TYPE idem_outcome AS ENUM ('claimed', 'processing', 'completed', 'failed', 'retryable', 'unknown', 'mismatch');
COMMENT ON TYPE idem_outcome IS 'what idem_claim() answers';

CREATE TYPE idem_disposition AS ENUM ('final', 'retry', 'unknown');
COMMENT ON TYPE idem_disposition IS 'what is to become of a failed claim';

-- A named type, since the row of OUT parameters would be made anew from
-- pg_proc in each execution, which is a seventh of what a replay costs.
CREATE TYPE idem_claim_result AS (
    outcome idem_outcome,
    token bigint,
    attempt integer,
    http_status integer,
    headers jsonb,
    response jsonb,
    body bytea,
    checkpoint text,
    state jsonb,
    created_at timestamptz,
    completed_at timestamptz,
    expires_at timestamptz,
    retry_after interval
);
COMMENT ON TYPE idem_claim_result IS 'the row that idem_claim() returns';

CREATE TYPE idem_execute_result AS (
    outcome idem_outcome,
    token bigint,
    attempt integer,
    http_status integer,
    headers jsonb,
    response jsonb,
    body bytea,
    checkpoint text,
    state jsonb,
    created_at timestamptz,
    completed_at timestamptz,
    expires_at timestamptz,
    retry_after interval,
    replayed boolean
);
COMMENT ON TYPE idem_execute_result IS 'the row that idem_execute() returns';

--
-- The table.  Its columns are known to src/extension.h by their numbers.  What
-- a settlement leaves as it is comes first: the WAL of an update leaves out the
-- bytes that the versions have in common at either end.
--

CREATE TABLE idempotency_keys (
    created_at timestamptz NOT NULL,
    claimed_at timestamptz NOT NULL,
    token bigint NOT NULL,
    due_at timestamptz NOT NULL DEFAULT '-infinity',
    ttl interval NOT NULL,
    attempt integer NOT NULL,
    takeover boolean NOT NULL,
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    operation text COLLATE "C" NOT NULL,
    request_hash bytea,
    status idem_status NOT NULL,
    lease_until timestamptz,
    expires_at timestamptz NOT NULL,
    completed_at timestamptz,
    retry_at timestamptz,
    http_status integer,
    checkpoint text,
    state jsonb,
    headers jsonb,
    response jsonb,
    body bytea,
    resolved_by text,
    note text,
    PRIMARY KEY (scope, key)
) USING heap
-- Long results come and go at a rate that autovacuum's usual pace does not match.
WITH (toast.autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_cost_limit = 2000);
-- Where a sweep finds what has expired.  A settlement leaves due_at as it is, so
-- the index does not keep it from being a heap-only update.
CREATE INDEX idempotency_keys_due_at_idx ON idempotency_keys (due_at);

-- After the table: a claim locks that first, and DROP and ALTER EXTENSION lock their
-- objects in the order of pg_depend, which is mostly that of their creation.
CREATE SEQUENCE idempotency_keys_token_seq AS bigint
    MINVALUE 1 MAXVALUE 9007199254740991 NO CYCLE;
COMMENT ON SEQUENCE idempotency_keys_token_seq IS 'fencing tokens of idempotency_keys';

-- What every look reads stays in the row, uncompressed: at most 3.2 kB.
ALTER TABLE idempotency_keys
    ALTER COLUMN scope SET STORAGE PLAIN,
    ALTER COLUMN key SET STORAGE PLAIN,
    ALTER COLUMN operation SET STORAGE PLAIN,
    ALTER COLUMN request_hash SET STORAGE PLAIN;

COMMENT ON TABLE idempotency_keys IS 'one row per idempotency key; written through the functions idem_*';
COMMENT ON COLUMN idempotency_keys.created_at IS 'when the key was first claimed';
COMMENT ON COLUMN idempotency_keys.claimed_at IS 'when the current attempt was claimed';
COMMENT ON COLUMN idempotency_keys.token IS 'fencing token of the current attempt';
COMMENT ON COLUMN idempotency_keys.due_at IS 'from when on a sweep looks at the row; never after expires_at';
COMMENT ON COLUMN idempotency_keys.ttl IS 'how long the row is kept, from the claim and again from its settlement';
COMMENT ON COLUMN idempotency_keys.attempt IS 'number of the current attempt, from 1';
COMMENT ON COLUMN idempotency_keys.takeover IS 'whether another caller may take over when the lease ends';
COMMENT ON COLUMN idempotency_keys.scope IS 'the key''s name space, such as a tenant';
COMMENT ON COLUMN idempotency_keys.key IS 'the idempotency key';
COMMENT ON COLUMN idempotency_keys.operation IS 'what the request does; another operation is a mismatch';
COMMENT ON COLUMN idempotency_keys.request_hash IS 'the request''s fingerprint; null if it isn''t compared';
COMMENT ON COLUMN idempotency_keys.status IS 'how the key stands, but for what time alone changes';
COMMENT ON COLUMN idempotency_keys.lease_until IS 'until when the claim belongs to its owner';
COMMENT ON COLUMN idempotency_keys.expires_at IS 'from when on the key counts as absent; infinity while it is held';
COMMENT ON COLUMN idempotency_keys.completed_at IS 'when the current attempt was settled';
COMMENT ON COLUMN idempotency_keys.retry_at IS 'from when on a retryable key may be claimed again';
COMMENT ON COLUMN idempotency_keys.http_status IS 'HTTP status of the result';
COMMENT ON COLUMN idempotency_keys.checkpoint IS 'the last step an owner has reached';
COMMENT ON COLUMN idempotency_keys.state IS 'what goes with the checkpoint';
COMMENT ON COLUMN idempotency_keys.headers IS 'HTTP headers of the result, an array of [name, value]';
COMMENT ON COLUMN idempotency_keys.response IS 'the result, or the error, for SQL callers';
COMMENT ON COLUMN idempotency_keys.body IS 'the result byte for byte, for HTTP';
COMMENT ON COLUMN idempotency_keys.resolved_by IS 'the role that called idem_resolve()';
COMMENT ON COLUMN idempotency_keys.note IS 'the note given to idem_resolve()';

SELECT pg_catalog.pg_extension_config_dump('idempotency_keys', '');
SELECT pg_catalog.pg_extension_config_dump('idempotency_keys_token_seq', '');

--
-- The life of a key
--

CREATE FUNCTION idem_claim(
    key text,
    request jsonb DEFAULT NULL,
    scope text DEFAULT '',
    operation text DEFAULT '',
    request_hash bytea DEFAULT NULL,
    ttl interval DEFAULT NULL,
    lease interval DEFAULT NULL,
    wait interval DEFAULT '0',
    takeover boolean DEFAULT true
)
RETURNS idem_claim_result
AS 'MODULE_PATHNAME', 'idem_claim'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_claim(text, jsonb, text, text, bytea, interval, interval, interval, boolean)
    IS 'claim an idempotency key, or get the result of whoever had it first';

CREATE FUNCTION idem_complete(
    key text,
    response jsonb DEFAULT NULL,
    token bigint DEFAULT NULL,
    scope text DEFAULT '',
    http_status integer DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    body bytea DEFAULT NULL,
    ttl interval DEFAULT NULL
)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_complete'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_complete(text, jsonb, bigint, text, integer, jsonb, bytea, interval)
    IS 'store the result of a claimed key';

CREATE FUNCTION idem_fail(
    key text,
    error jsonb DEFAULT NULL,
    token bigint DEFAULT NULL,
    scope text DEFAULT '',
    disposition idem_disposition DEFAULT 'final',
    retry_after interval DEFAULT NULL,
    http_status integer DEFAULT NULL,
    headers jsonb DEFAULT NULL,
    body bytea DEFAULT NULL,
    ttl interval DEFAULT NULL
)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_fail'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_fail(text, jsonb, bigint, text, idem_disposition, interval, integer, jsonb, bytea, interval)
    IS 'end a claim without success: for good, to be retried, or with unknown outcome';

CREATE FUNCTION idem_renew(
    key text,
    token bigint,
    lease interval DEFAULT NULL,
    scope text DEFAULT ''
)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_renew'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_renew(text, bigint, interval, text)
    IS 'extend the lease of a claim; returns its new end';

CREATE FUNCTION idem_checkpoint(
    key text,
    token bigint,
    checkpoint text,
    state jsonb DEFAULT NULL,
    scope text DEFAULT '',
    lease interval DEFAULT NULL
)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_checkpoint'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_checkpoint(text, bigint, text, jsonb, text, interval)
    IS 'note how far the work on a claim has got; returns the end of the lease';

CREATE FUNCTION idem_get(
    key text,
    scope text DEFAULT '',
    OUT scope text,
    OUT key text,
    OUT operation text,
    OUT status idem_status,
    OUT attempt integer,
    OUT checkpoint text,
    OUT state jsonb,
    OUT http_status integer,
    OUT headers jsonb,
    OUT response jsonb,
    OUT body bytea,
    OUT created_at timestamptz,
    OUT lease_until timestamptz,
    OUT completed_at timestamptz,
    OUT expires_at timestamptz,
    OUT expired boolean
)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_get'
LANGUAGE C STABLE CALLED ON NULL INPUT PARALLEL RESTRICTED ROWS 1;
COMMENT ON FUNCTION idem_get(text, text)
    IS 'how an idempotency key stands; no row if there is none';

CREATE FUNCTION idem_resolve(
    key text,
    status idem_status,
    response jsonb DEFAULT NULL,
    scope text DEFAULT '',
    note text DEFAULT NULL
)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_resolve'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_resolve(text, idem_status, jsonb, text, text)
    IS 'settle a key without its token, as an administrator';

CREATE FUNCTION idem_forget(
    key text,
    scope text DEFAULT ''
)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_forget'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_forget(text, text)
    IS 'delete an idempotency key, as an administrator';

--
-- Whole jobs, and many keys at once
--

CREATE FUNCTION idem_execute(
    key text,
    command text,
    args jsonb DEFAULT NULL,
    scope text DEFAULT '',
    operation text DEFAULT '',
    ttl interval DEFAULT NULL,
    wait interval DEFAULT NULL,
    ignore text[] DEFAULT NULL
)
RETURNS idem_execute_result
AS 'MODULE_PATHNAME', 'idem_execute'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_execute(text, text, jsonb, text, text, interval, interval, text[])
    IS 'run an SQL command once per key, and return its result to every caller';

CREATE FUNCTION idem_once(
    key text,
    scope text DEFAULT '',
    ttl interval DEFAULT NULL
)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_once'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_once(text, text, interval)
    IS 'true for the first call with this key, such as a message''s number';

CREATE FUNCTION idem_once_many(
    keys text[],
    scope text DEFAULT '',
    ttl interval DEFAULT NULL
)
RETURNS SETOF text
AS 'MODULE_PATHNAME', 'idem_once_many'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_once_many(text[], text, interval)
    IS 'those of the keys that are seen for the first time, in the order of the array';

CREATE FUNCTION idem_claim_many(
    keys text[],
    requests jsonb[] DEFAULT NULL,
    scope text DEFAULT '',
    operation text DEFAULT '',
    ttl interval DEFAULT NULL,
    lease interval DEFAULT NULL,
    takeover boolean DEFAULT true,
    OUT ordinal integer,
    OUT key text,
    OUT outcome idem_outcome,
    OUT token bigint,
    OUT attempt integer,
    OUT http_status integer,
    OUT headers jsonb,
    OUT response jsonb,
    OUT body bytea,
    OUT checkpoint text,
    OUT state jsonb,
    OUT created_at timestamptz,
    OUT completed_at timestamptz,
    OUT expires_at timestamptz,
    OUT retry_after interval
)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_claim_many'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_claim_many(text[], jsonb[], text, text, interval, interval, boolean)
    IS 'claim many idempotency keys in one call; a row for each, in the order of the array';

CREATE FUNCTION idem_complete_many(
    keys text[],
    tokens bigint[],
    responses jsonb[] DEFAULT NULL,
    scope text DEFAULT '',
    ttl interval DEFAULT NULL
)
RETURNS bigint
AS 'MODULE_PATHNAME', 'idem_complete_many'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_complete_many(text[], bigint[], jsonb[], text, interval)
    IS 'store the results of many claims; returns how many were completed';

--
-- Names and fingerprints
--

CREATE FUNCTION idem_fingerprint(request jsonb, ignore text[] DEFAULT NULL)
RETURNS bytea
AS 'MODULE_PATHNAME', 'idem_fingerprint'
LANGUAGE C IMMUTABLE CALLED ON NULL INPUT PARALLEL SAFE;
COMMENT ON FUNCTION idem_fingerprint(jsonb, text[])
    IS 'SHA-256 fingerprint of a request, equal for requests that are equal as jsonb';

CREATE FUNCTION idem_key(VARIADIC parts text[])
RETURNS text
AS 'MODULE_PATHNAME', 'idem_key'
LANGUAGE C IMMUTABLE CALLED ON NULL INPUT PARALLEL SAFE;
COMMENT ON FUNCTION idem_key(text[])
    IS 'a key made of parts, such as {saga}:{step}';

CREATE FUNCTION idem_uuid(key text, scope text DEFAULT '')
RETURNS uuid
AS 'MODULE_PATHNAME', 'idem_uuid'
LANGUAGE C IMMUTABLE CALLED ON NULL INPUT PARALLEL SAFE;
COMMENT ON FUNCTION idem_uuid(text, text)
    IS 'the UUID (version 5) that stands for a key, for downstream APIs';

--
-- Cleaning up
--

CREATE FUNCTION idem_sweep(batch_size integer DEFAULT NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'idem_sweep'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_sweep(integer)
    IS 'delete one batch of expired rows; returns how many';

CREATE PROCEDURE idem_sweep_all(
    batch_size integer DEFAULT NULL,
    max_batches integer DEFAULT NULL,
    pause interval DEFAULT NULL
)
AS 'MODULE_PATHNAME', 'idem_sweep_all'
LANGUAGE C;
COMMENT ON PROCEDURE idem_sweep_all(integer, integer, interval)
    IS 'delete expired rows, each batch in its own transaction, until none is left';

CREATE FUNCTION idem_schedule(schedule text DEFAULT '0 * * * *', database name DEFAULT NULL)
RETURNS bigint
AS 'MODULE_PATHNAME', 'idem_schedule'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_schedule(text, name)
    IS 'make pg_cron sweep a database; returns the job''s id';

CREATE FUNCTION idem_unschedule(database name DEFAULT NULL)
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_unschedule'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_unschedule(name)
    IS 'remove the pg_cron job that sweeps a database';

CREATE FUNCTION idem_start_worker()
RETURNS integer
AS 'MODULE_PATHNAME', 'idem_start_worker'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_start_worker()
    IS 'start the background worker if it does not run; returns its process ID';

CREATE FUNCTION idem_stop_worker()
RETURNS boolean
AS 'MODULE_PATHNAME', 'idem_stop_worker'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_stop_worker()
    IS 'stop the background worker until it is started again, or the server is';

--
-- Seeing what it does
--

CREATE FUNCTION idem_stats(
    OUT claims bigint,
    OUT takeovers bigint,
    OUT replays bigint,
    OUT processing bigint,
    OUT mismatches bigint,
    OUT completions bigint,
    OUT failures bigint,
    OUT lost bigint,
    OUT once_first bigint,
    OUT once_again bigint,
    OUT swept_rows bigint,
    OUT sweep_runs bigint,
    OUT last_sweep_at timestamptz,
    OUT last_sweep_duration interval,
    OUT last_sweep_rows bigint,
    OUT sweep_errors bigint,
    OUT last_sweep_error text,
    OUT stats_reset timestamptz,
    OUT reused_after_expiry bigint
)
RETURNS record
AS 'MODULE_PATHNAME', 'idem_stats'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL RESTRICTED;
COMMENT ON FUNCTION idem_stats() IS 'this database''s counters; see view idempotency_stats';

CREATE VIEW idempotency_stats AS SELECT s.* FROM idem_stats() s;
COMMENT ON VIEW idempotency_stats IS 'what the extension has done in this database since stats_reset';

CREATE FUNCTION idem_stats_reset()
RETURNS void
AS 'MODULE_PATHNAME', 'idem_stats_reset'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL RESTRICTED;
COMMENT ON FUNCTION idem_stats_reset() IS 'set this database''s counters to zero';

CREATE FUNCTION idem_summary(
    OUT processing bigint,
    OUT completed bigint,
    OUT failed bigint,
    OUT retryable bigint,
    OUT unknown bigint,
    OUT expired bigint,
    OUT oldest_expired_age interval,
    OUT table_bytes bigint,
    OUT index_bytes bigint,
    OUT total_bytes bigint,
    OUT stuck bigint
)
RETURNS record
AS 'MODULE_PATHNAME', 'idem_summary'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL RESTRICTED;
COMMENT ON FUNCTION idem_summary() IS 'what is in the table; see view idempotency_summary';

-- On a function, not on the table: a view would keep the table from being altered.
CREATE VIEW idempotency_summary AS SELECT s.* FROM idem_summary() s;
COMMENT ON VIEW idempotency_summary IS 'the rows of idempotency_keys by status, and their size; reads the whole table';

CREATE FUNCTION idem_health(
    OUT item text,
    OUT level text,
    OUT value numeric,
    OUT threshold numeric,
    OUT message text
)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_health'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL RESTRICTED ROWS 9;
COMMENT ON FUNCTION idem_health() IS 'what an administrator should see to, and what is well';

--
-- Privileges
--

CREATE FUNCTION idem_grant(role regrole, admin boolean DEFAULT false)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_grant'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_grant(regrole, boolean)
    IS 'let a role use idempotency keys, or administer them';

CREATE FUNCTION idem_revoke(role regrole)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_revoke'
LANGUAGE C VOLATILE CALLED ON NULL INPUT PARALLEL UNSAFE;
COMMENT ON FUNCTION idem_revoke(regrole)
    IS 'take back what idem_grant() gave';

-- Nobody but the owner has rights on what was made here, whatever default
-- privileges there are (ALTER DEFAULT PRIVILEGES), and everybody on three functions
-- and the types that results have.
DO $do$
DECLARE
    path text := pg_catalog.current_setting('search_path');
    revocation text;
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    FOR revocation IN
        SELECT format('REVOKE ALL ON %s %s FROM %s', o.kind, o.name,
                      CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
          FROM pg_extension e,
               LATERAL (SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END, c.oid::regclass::text,
                               c.relowner, c.relacl, c.tableoid, c.oid
                          FROM pg_class c
                        UNION ALL
                        SELECT 'ROUTINE', p.oid::regprocedure::text, p.proowner,
                               coalesce(p.proacl, acldefault('f', p.proowner)), p.tableoid, p.oid
                          FROM pg_proc p) o(kind, name, owner, acl, class, object),
               LATERAL (SELECT DISTINCT x.grantee FROM aclexplode(o.acl) x) a
         WHERE e.extname = 'idempotency' AND a.grantee <> o.owner AND
               EXISTS (SELECT FROM pg_depend d
                        WHERE d.classid = o.class AND d.objid = o.object AND d.deptype = 'e' AND
                              d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid)
    LOOP
        EXECUTE revocation;
    END LOOP;
    PERFORM set_config('search_path', path, true);
END $do$;

GRANT EXECUTE ON FUNCTION idem_fingerprint, idem_key, idem_uuid TO PUBLIC;
GRANT USAGE ON TYPE idem_status, idem_outcome, idem_disposition, idem_claim_result, idem_execute_result TO PUBLIC;
