--
-- settings: what they are, their bounds, and that they do something
--
TRUNCATE idempotency_keys;
\pset null -
LOAD 'idempotency';
-- (The worker's are the server's, which may have set them.)
SELECT name, CASE context WHEN 'sighup' THEN boot_val ELSE setting END AS setting, unit, context, vartype, min_val, max_val, boot_val FROM pg_settings WHERE name LIKE 'idempotency.%' AND context <> 'postmaster' ORDER BY name COLLATE "C";
SELECT name FROM pg_settings WHERE name LIKE 'idempotency.%' AND (short_desc IS NULL OR short_desc !~ '^[A-Z].*\.$');

-- The prefix is reserved: a misspelt setting is an error, not silence.
SET idempotency.defualt_ttl = '1h';
SELECT set_config('idempotency.x', '1', false);
SHOW idempotency.x;
SELECT current_setting('idempotency.x', true);

-- Units and bounds
\set VERBOSITY sqlstate
SET idempotency.default_ttl = '90min';
SHOW idempotency.default_ttl;
SET idempotency.default_ttl = 90;
SHOW idempotency.default_ttl;
SET idempotency.default_ttl = 0;
SET idempotency.default_ttl = -1;
SET idempotency.default_ttl = '3000000000 s';
SET idempotency.default_ttl = 'soon';
SET idempotency.default_ttl = '10MB';
SET idempotency.default_lease = '1500ms';
SHOW idempotency.default_lease;
SET idempotency.default_lease = 250;
SHOW idempotency.default_lease;
SET idempotency.default_lease = 0;
SET idempotency.default_lease = '-1s';
SET idempotency.default_lease = '30d';
SET idempotency.max_response_size = '64kB';
SHOW idempotency.max_response_size;
SET idempotency.max_response_size = 0;
SET idempotency.max_response_size = -1;
SET idempotency.max_response_size = '2GB';
SET idempotency.durable = off;
SHOW idempotency.durable;
SET idempotency.durable = maybe;
SET idempotency.scope = 'tenant-1';
SHOW idempotency.scope;
DO $$ BEGIN PERFORM set_config('idempotency.scope', repeat('s', 255), false), set_config('idempotency.scope', repeat(E'\U0001f600', 255), false); END $$;
-- A scope that no call would take is none to be confined to.
SELECT set_config('idempotency.scope', repeat('s', 256), false);
\set VERBOSITY default
RESET ALL;
SHOW idempotency.default_ttl;
SHOW idempotency.default_lease;
SHOW idempotency.max_response_size;
SHOW idempotency.durable;
SHOW idempotency.scope;

-- What they do: each is the default of an argument, which goes first.
\set kept 'key, expires_at - created_at AS ttl, lease_until - created_at AS lease'
SELECT outcome FROM idem_claim('set-default');
SET idempotency.default_ttl = '1h';
SET idempotency.default_lease = '90s';
SELECT outcome FROM idem_claim('set-own');
SELECT outcome FROM idem_claim('set-argument', ttl => '2h', lease => '10s');
SELECT outcome FROM idem_claim('set-null', ttl => NULL, lease => NULL);
-- A lease that is longer than the ttl
SET idempotency.default_lease = '2h';
SELECT outcome FROM idem_claim('set-long');
RESET idempotency.default_ttl;
RESET idempotency.default_lease;
SELECT :kept FROM unnest('{set-default,set-own,set-argument,set-null,set-long}'::text[]) k, idem_get(k);
-- The largest there are
SET idempotency.default_ttl = 2147483647;
SET idempotency.default_lease = 2147483647;
SELECT outcome FROM idem_claim('set-largest');
SELECT key, extract(epoch FROM expires_at - created_at)::bigint AS ttl, extract(epoch FROM lease_until - created_at) AS lease FROM idem_get('set-largest');
RESET ALL;

-- For one transaction, one function, one role, one database
BEGIN;
SET LOCAL idempotency.default_lease = '10s';
SELECT outcome FROM idem_claim('set-local');
COMMIT;
CREATE FUNCTION pg_temp.claim(k text) RETURNS text LANGUAGE sql SET idempotency.default_lease = '20s' AS 'SELECT outcome::text FROM idem_claim(k)';
SELECT pg_temp.claim('set-function');
SELECT outcome FROM idem_claim('set-after');
SELECT key, lease_until - created_at AS lease FROM unnest('{set-local,set-function,set-after}'::text[]) k, idem_get(k);
SELECT current_database() AS db \gset
ALTER DATABASE :"db" SET idempotency.default_lease = '30s';
\c
SELECT outcome FROM idem_claim('set-database');
SELECT key, lease_until - created_at AS lease FROM idem_get('set-database');
ALTER DATABASE :"db" RESET idempotency.default_lease;
\c

-- Anybody may set what concerns his own calls; the scope is for a superuser,
-- or whoever was granted it.
CREATE ROLE regress_idem_settings;
SELECT idem_grant('regress_idem_settings');
SET ROLE regress_idem_settings;
SET idempotency.default_ttl = '1h';
SET idempotency.default_lease = '1min';
SET idempotency.max_response_size = '1kB';
SET idempotency.durable = off;
SET idempotency.scope = 'tenant-1';
SET idempotency.scope = '';
SELECT set_config('idempotency.scope', 'tenant-1', true);
SHOW idempotency.scope;
RESET ROLE;
RESET ALL;
GRANT SET ON PARAMETER idempotency.scope TO regress_idem_settings;
SET ROLE regress_idem_settings;
SET idempotency.scope = 'tenant-1';
SELECT outcome FROM idem_claim('set-scope');
SELECT scope, key FROM idem_get('set-scope');
RESET idempotency.scope;
RESET ROLE;
REVOKE SET ON PARAMETER idempotency.scope FROM regress_idem_settings;
SELECT idem_revoke('regress_idem_settings');
DROP ROLE regress_idem_settings;
