--
-- altered: what somebody does to the table is honoured or refused, and never ignored
--
TRUNCATE idempotency_keys;
\pset null -
\set VERBOSITY sqlstate
SELECT idem_complete('done', '"old"', token) FROM idem_claim('done', '{"n": 1}');
SELECT token AS done_token FROM idempotency_keys WHERE key = 'done' \gset
SELECT token AS open_token FROM idem_claim('open') \gset

-- One call of each kind; the work on a key in one transaction.
CREATE FUNCTION use_it(k text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    c record;
    t bigint;
    answer text;
BEGIN
    SELECT outcome, response, attempt INTO c FROM idem_claim('done', '{"n": 1}');
    answer := concat_ws(' ', c.outcome, c.response);
    SELECT outcome, attempt, token INTO c FROM idem_claim(k);
    answer := concat_ws(', ', answer, concat_ws(' ', c.outcome, c.attempt));
    t := c.token;
    PERFORM idem_checkpoint(k, t, 'x', '1'), idem_renew(k, t, '1 hour');
    PERFORM idem_fail(k, disposition => 'retry');
    SELECT outcome, attempt INTO c FROM idem_claim(k);
    answer := concat_ws(', ', answer, concat_ws(' ', c.outcome, c.attempt));
    PERFORM idem_complete(k, '2');
    SELECT status, response INTO c FROM idem_get(k);
    answer := concat_ws(', ', answer, concat_ws(' ', c.status, c.response));
    answer := concat_ws(', ', answer, (SELECT string_agg(concat_ws(' ', ordinal, outcome), ' ') FROM idem_claim_many(ARRAY[k || '-2', 'done', k || '-1'])));
    answer := concat_ws(', ', answer, idem_complete_many(ARRAY[k || '-1', k || '-2'], NULL, '{3,4}'));
    answer := concat_ws(', ', answer, (SELECT string_agg(concat_ws(' ', outcome, response), ' ') FROM idem_claim_many(ARRAY[k || '-2', k || '-1'])));
    answer := concat_ws(', ', answer, (SELECT concat_ws(' ', e.outcome, e.response, f.outcome) FROM idem_execute(k || '-3', 'SELECT 5') e, idem_execute(k || '-4', 'SELECT 1/0') f));
    answer := concat_ws(', ', answer, concat_ws(' ', idem_once(k || '-5'), idem_once(k || '-5'), (SELECT array_agg(o) FROM idem_once_many(ARRAY[k || '-6', k || '-5']) o) = ARRAY[k || '-6']));
    PERFORM idem_forget(k), idem_forget(k || '-1'), idem_forget(k || '-2'), idem_forget(k || '-3'), idem_forget(k || '-4'), idem_forget(k || '-5'), idem_forget(k || '-6');
    RETURN concat_ws(', ', answer, (SELECT outcome FROM idem_claim(k)));
END $$;
SELECT use_it('before') AS well \gset
\echo :well

-- What a change makes of the calls: each undone again, and then all is well.
CREATE FUNCTION try_change(change text, OUT use text, OUT replay text, OUT get text, OUT complete text, OUT after text) LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        EXECUTE change;
        BEGIN use := use_it('changed'); IF use = (SELECT well FROM before_change) THEN use := 'well'; END IF; EXCEPTION WHEN OTHERS THEN use := SQLSTATE; END;
        BEGIN SELECT outcome INTO replay FROM idem_claim('done'); EXCEPTION WHEN OTHERS THEN replay := SQLSTATE; END;
        BEGIN SELECT status INTO get FROM idem_get('done'); EXCEPTION WHEN OTHERS THEN get := SQLSTATE; END;
        BEGIN complete := idem_complete('open', token => (SELECT token FROM before_change)); EXCEPTION WHEN OTHERS THEN complete := SQLSTATE; END;
        RAISE EXCEPTION 'undo' USING ERRCODE = 'ZZ999';
    EXCEPTION WHEN SQLSTATE 'ZZ999' THEN NULL;
    END;
    after := CASE use_it('unchanged') WHEN (SELECT well FROM before_change) THEN 'well' ELSE 'WRONG' END;
    PERFORM idem_forget('unchanged');
END $$;
CREATE TABLE before_change AS SELECT :open_token::bigint AS token, :'well'::text AS well;
CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE FUNCTION itself() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';

--
-- Refused: what the calls can't honour, or can't work with
--
CREATE SCHEMA regress_idem_elsewhere;
\pset format unaligned
SELECT change, t.* FROM unnest(ARRAY[
    'ALTER TABLE idempotency_keys DROP response',
    'ALTER TABLE idempotency_keys DROP note',
    'ALTER TABLE idempotency_keys RENAME response TO answer',
    'ALTER TABLE idempotency_keys ALTER response TYPE json USING NULL',
    'ALTER TABLE idempotency_keys ALTER attempt TYPE bigint',
    'ALTER TABLE idempotency_keys ALTER status TYPE text',
    'ALTER TABLE idempotency_keys DROP note, ADD note text',
    'ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey',
    'ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey, ADD PRIMARY KEY (key, scope)',
    'ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey, ADD PRIMARY KEY (scope, key, token)',
    'ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey, ADD PRIMARY KEY (scope, key) DEFERRABLE',
    'ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey, ADD UNIQUE (scope, key)',
    'ALTER TABLE idempotency_keys ALTER key TYPE text COLLATE "POSIX"',
    'ALTER TABLE idempotency_keys SET UNLOGGED',
    'ALTER TABLE idempotency_keys RENAME TO other_keys',
    'ALTER TABLE idempotency_keys SET SCHEMA regress_idem_elsewhere',
    'ALTER SEQUENCE idempotency_keys_token_seq RENAME TO other_seq',
    'ALTER TABLE idempotency_keys ADD hash text GENERATED ALWAYS AS (md5(key)) STORED',
    'CREATE RULE r AS ON INSERT TO idempotency_keys DO INSTEAD NOTHING',
    'CREATE RULE r AS ON UPDATE TO idempotency_keys DO ALSO NOTHING',
    'CREATE TRIGGER t BEFORE INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION itself()',
    'CREATE TRIGGER t BEFORE UPDATE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION itself()',
    'CREATE TRIGGER t BEFORE DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION itself()',
    'CREATE TRIGGER t BEFORE INSERT ON idempotency_keys EXECUTE FUNCTION nothing()',
    'CREATE TRIGGER t AFTER INSERT ON idempotency_keys EXECUTE FUNCTION nothing()',
    'CREATE TRIGGER t AFTER UPDATE ON idempotency_keys EXECUTE FUNCTION nothing()',
    'CREATE TRIGGER t AFTER DELETE ON idempotency_keys EXECUTE FUNCTION nothing()',
    'CREATE CONSTRAINT TRIGGER t AFTER INSERT ON idempotency_keys DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION nothing()',
    'CREATE CONSTRAINT TRIGGER t AFTER UPDATE ON idempotency_keys DEFERRABLE FOR EACH ROW EXECUTE FUNCTION nothing()',
    'CREATE TRIGGER t AFTER UPDATE OF status ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION nothing()',
    'CREATE TRIGGER t AFTER INSERT ON idempotency_keys REFERENCING NEW TABLE AS n FOR EACH ROW EXECUTE FUNCTION nothing()',
    'CREATE TRIGGER t AFTER UPDATE ON idempotency_keys REFERENCING OLD TABLE AS o FOR EACH ROW EXECUTE FUNCTION nothing()']) change,
    try_change(change) t;
\pset format aligned
-- What it says
BEGIN;
ALTER TABLE idempotency_keys RENAME response TO answer;
\set VERBOSITY default
SELECT outcome FROM idem_claim('done', '{"n": 1}');
ROLLBACK;
BEGIN;
ALTER TABLE idempotency_keys SET UNLOGGED;
SELECT idem_complete('open');
ROLLBACK;
\set VERBOSITY sqlstate

--
-- Honoured: the calls go on as before
--
\pset format unaligned
SELECT change, t.* FROM unnest(ARRAY[
    'ALTER TABLE idempotency_keys ADD tenant text',
    'ALTER TABLE idempotency_keys ADD tenant text NOT NULL DEFAULT ''nobody''',
    'ALTER TABLE idempotency_keys ADD noted timestamptz DEFAULT clock_timestamp()',
    'ALTER TABLE idempotency_keys ADD n bigserial',
    'ALTER TABLE idempotency_keys ADD x int; ALTER TABLE idempotency_keys DROP x',
    'CREATE INDEX ON idempotency_keys (expires_at)',
    'CREATE INDEX ON idempotency_keys USING brin (expires_at)',
    'CREATE INDEX ON idempotency_keys USING hash (key)',
    'CREATE INDEX ON idempotency_keys USING gin (response)',
    'CREATE INDEX ON idempotency_keys (lower(key)) INCLUDE (status)',
    'CREATE INDEX ON idempotency_keys (expires_at) WHERE status = ''processing''',
    'ALTER TABLE idempotency_keys DROP note; ALTER TABLE idempotency_keys ADD note text',
    'CREATE UNIQUE INDEX ON idempotency_keys (token)',
    'UPDATE idempotency_keys SET due_at = due_at + token * interval ''1 s''; CREATE UNIQUE INDEX ON idempotency_keys (due_at)',
    'UPDATE idempotency_keys SET due_at = due_at + token * interval ''1 s''; ALTER TABLE idempotency_keys ADD EXCLUDE USING btree (due_at WITH =)',
    'ALTER TABLE idempotency_keys ADD UNIQUE (token) DEFERRABLE INITIALLY DEFERRED',
    'ALTER TABLE idempotency_keys ADD CHECK (length(key) < 200), ADD CHECK (attempt > 0) NOT VALID',
    'ALTER TABLE idempotency_keys ALTER response SET STORAGE EXTERNAL, SET (fillfactor = 50, autovacuum_enabled = false)',
    'ALTER TABLE idempotency_keys SET (toast_tuple_target = 128)',
    'ALTER TABLE idempotency_keys ALTER operation SET DEFAULT ''other'', ALTER ttl DROP NOT NULL',
    'ALTER TABLE idempotency_keys ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY',
    'ALTER TABLE idempotency_keys REPLICA IDENTITY FULL',
    'ALTER TABLE idempotency_keys CLUSTER ON idempotency_keys_pkey',
    'ALTER INDEX idempotency_keys_pkey RENAME TO other_pkey',
    'CREATE UNIQUE INDEX new_pkey ON idempotency_keys (scope, key); ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey, ADD PRIMARY KEY USING INDEX new_pkey',
    'CREATE STATISTICS s ON scope, operation FROM idempotency_keys',
    'ALTER TYPE idem_status ADD VALUE ''paused''',
    'ALTER SEQUENCE idempotency_keys_token_seq INCREMENT 10 CACHE 5',
    'CREATE TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION nothing()',
    'CREATE CONSTRAINT TRIGGER t AFTER INSERT OR UPDATE OR DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION nothing()',
    'TRUNCATE idempotency_keys',
    'REINDEX TABLE idempotency_keys',
    'CLUSTER idempotency_keys USING idempotency_keys_pkey']) change,
    try_change(change) t;
\pset format aligned

-- An added column: new rows get its default, old ones keep what they have.
ALTER TABLE idempotency_keys ADD tenant text DEFAULT 'before';
ALTER TABLE idempotency_keys ALTER tenant SET DEFAULT 'after ' || current_setting('search_path'), ADD x int NOT NULL DEFAULT 7, ADD y int;
SELECT outcome, response FROM idem_claim('done', '{"n": 1}');
SELECT token FROM idem_claim('added') \gset
SELECT key, tenant, x, y FROM idempotency_keys WHERE key IN ('done', 'added') ORDER BY key;
UPDATE idempotency_keys SET tenant = key, y = 8 WHERE key IN ('done', 'added');
SELECT idem_fail('added', token => :token, disposition => 'retry');
SELECT outcome, attempt FROM idem_claim('added');
SELECT key, tenant, x, y FROM idempotency_keys WHERE key IN ('done', 'added') ORDER BY key;
-- A key that has expired counts as absent: claimed anew, it is a new row.
SELECT c.outcome, idem_complete('expires', ttl => '1 us') FROM idem_claim('expires') c;
UPDATE idempotency_keys SET tenant = key, x = 1, y = 8 WHERE key = 'expires';
SELECT outcome FROM idem_claim('expires');
SELECT key, tenant, x, y FROM idempotency_keys WHERE key = 'expires';
-- A default that changes the very row
CREATE FUNCTION change_itself() RETURNS int LANGUAGE plpgsql AS $$ BEGIN UPDATE public.idempotency_keys SET note = 'meddled' WHERE key = 'expires'; RETURN 1; END $$;
ALTER TABLE idempotency_keys ADD meddled int;
ALTER TABLE idempotency_keys ALTER meddled SET DEFAULT change_itself();
SELECT idem_complete('expires', token => token, ttl => '1 us') FROM idempotency_keys WHERE key = 'expires';
SELECT outcome FROM idem_claim('expires');
ALTER TABLE idempotency_keys DROP meddled;
SELECT outcome FROM idem_claim('expires');
-- The same in batches, and of the other calls
SELECT key, outcome FROM idem_claim_many('{batch-2,added,batch-1}');
SELECT * FROM idem_once_many('{once-2,added,once-1}');
SELECT idem_once('once-3'), outcome FROM idem_execute('executed', 'SELECT 1');
SELECT key, tenant, x, y FROM idempotency_keys WHERE key ~ '^(batch|once|executed)' ORDER BY key;
UPDATE idempotency_keys SET tenant = key, y = 9 WHERE key LIKE 'batch%';
SELECT idem_complete_many(array_agg(key ORDER BY key), array_agg(token ORDER BY key), '{1,2}') FROM idempotency_keys WHERE key LIKE 'batch%';
SELECT key, tenant, x, y, response FROM idempotency_keys WHERE key LIKE 'batch%' ORDER BY key;
ALTER TABLE idempotency_keys DROP x;
SELECT use_it('dropped') = :'well' AS well;
-- One that must be given, and isn't
ALTER TABLE idempotency_keys ADD z int;
ALTER TABLE idempotency_keys ADD CHECK (z IS NOT NULL) NOT VALID;
SELECT outcome FROM idem_claim('no z');
SELECT outcome FROM idem_claim('done', '{"n": 1}');
ALTER TABLE idempotency_keys DROP z, DROP y, DROP tenant;
SELECT outcome FROM idem_claim('no z');

-- A CHECK that says no leaves nothing behind.
ALTER TABLE idempotency_keys ADD CONSTRAINT short CHECK (length(key) < 30);
SELECT outcome FROM idem_claim(repeat('k', 30));
SELECT outcome FROM idem_claim(repeat('k', 29));
SELECT count(*) FROM idem_get(repeat('k', 30));
ALTER TABLE idempotency_keys DROP CONSTRAINT short;
SELECT outcome FROM idem_claim(repeat('k', 30));

-- Indexes are kept up to date through the life of a row.
CREATE INDEX by_status ON idempotency_keys (status);
CREATE INDEX by_response ON idempotency_keys USING gin (response);
CREATE INDEX by_lower_key ON idempotency_keys (lower(key)) WHERE attempt > 1;
CREATE INDEX by_completed ON idempotency_keys USING brin (completed_at);
SELECT token FROM idem_claim('Indexed') \gset
SELECT idem_fail('Indexed', token => :token, disposition => 'retry');
SELECT token FROM idem_claim('Indexed') \gset
SELECT idem_complete('Indexed', '{"find": "me"}', :token);
SET enable_seqscan = off;
SELECT key FROM idempotency_keys WHERE status = 'completed' AND key = 'Indexed';
SELECT key FROM idempotency_keys WHERE response @> '{"find": "me"}';
SELECT key FROM idempotency_keys WHERE lower(key) = 'indexed' AND attempt > 1;
SELECT key FROM idempotency_keys WHERE completed_at > '2000-01-01' AND key = 'Indexed';
SELECT count(*) FROM idempotency_keys WHERE status = 'retryable' AND key = 'Indexed';
RESET enable_seqscan;
DROP INDEX by_status, by_response, by_lower_key, by_completed;

--
-- AFTER ROW triggers: run as the owner of the table, with a search_path of his
--
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app', true);
CREATE TABLE log (n serial, trigger text, op text, key text, old_status text, new_status text, who name, path text);
CREATE FUNCTION write_log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.log (trigger, op, key, old_status, new_status, who, path)
        VALUES (TG_NAME, TG_OP, coalesce(NEW.key, OLD.key), OLD.status, NEW.status, CASE current_user WHEN (SELECT tableowner FROM pg_tables WHERE tablename = 'idempotency_keys') THEN 'owner' ELSE current_user END,
                current_setting('search_path'));
    RETURN NULL;
END $$;
CREATE TRIGGER every AFTER INSERT OR UPDATE OR DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION write_log();
CREATE TRIGGER settled AFTER UPDATE ON idempotency_keys FOR EACH ROW WHEN (NEW.status = 'completed') EXECUTE FUNCTION write_log();
SET ROLE regress_idem_app;
SET search_path = pg_temp, public;
SELECT idem_complete('done', '"old"', :done_token);
SELECT outcome FROM idem_claim('done', '{"n": 1}');
SELECT outcome FROM idem_claim('done', '{"n": 2}');
SELECT token FROM idem_claim('logged') \gset
SELECT outcome FROM idem_claim('logged');
SELECT idem_fail('logged', token => :token, disposition => 'retry');
SELECT token FROM idem_claim('logged') \gset
SELECT idem_complete('logged', '1', :token), idem_complete('logged', '1', :token);
SELECT idem_forget('logged');
SELECT key, outcome FROM public.idem_claim_many('{logged-2,done,logged-1,logged-2}');
BEGIN;
SELECT count(*) FROM idem_claim_many('{logged-4,logged-3}');
SELECT idem_complete_many('{logged-4,logged-3,logged-4}', NULL);
COMMIT;
SELECT * FROM idem_once_many('{logged-6,done,logged-5}');
SELECT idem_once('logged-7'), idem_once('logged-7');
SELECT outcome, response FROM idem_execute('logged-8', 'SELECT count(*) FROM idem_claim_many(''{logged-8,logged-9}'')');
SELECT outcome FROM idem_execute('logged-10', 'SELECT 1 / (count(*) - 1) FROM idem_claim(''logged-11'')');
SELECT current_user, current_setting('search_path');
RESET search_path;
RESET ROLE;
SELECT trigger, op, key, old_status, new_status, who, path FROM log ORDER BY n;
TRUNCATE log;
DROP TRIGGER every ON idempotency_keys;
DROP TRIGGER settled ON idempotency_keys;
-- One that says no: nothing has happened.
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'ZZ001'; END $$;
CREATE TRIGGER refuse AFTER INSERT OR UPDATE OR DELETE ON idempotency_keys FOR EACH ROW WHEN (pg_trigger_depth() = 0) EXECUTE FUNCTION refuse();
SELECT outcome FROM idem_claim('refused');
SELECT count(*) FROM idem_get('refused');
SELECT idem_complete('open', '1', :open_token);
SELECT idem_forget('open');
SELECT outcome FROM idem_claim_many('{refused-1,refused-2}');
SELECT idem_complete_many('{open}', ARRAY[:open_token]);
SELECT idem_once('refused');
SELECT * FROM idem_once_many('{refused,refused-1}');
SELECT idem_execute('refused', 'SELECT 1');
SELECT count(*) FROM unnest('{refused,refused-1,refused-2}'::text[]) k, idem_get(k);
SELECT current_user <> 'regress_idem_app' AS myself, status FROM idem_get('open');
ALTER TABLE idempotency_keys DISABLE TRIGGER refuse;
SELECT outcome FROM idem_claim('refused');
DROP TRIGGER refuse ON idempotency_keys;
-- One that works on other keys, and on the same
CREATE FUNCTION mark() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.log (trigger, key, new_status) SELECT TG_NAME, o.outcome, s.outcome FROM public.idem_claim('mark of ' || NEW.key) o, public.idem_claim(NEW.key) s;
    RETURN NULL;
END $$;
CREATE TRIGGER mark AFTER INSERT ON idempotency_keys FOR EACH ROW WHEN (NEW.key NOT LIKE 'mark of %') EXECUTE FUNCTION mark();
SELECT outcome FROM idem_claim('marked');
SELECT trigger, key, new_status FROM log ORDER BY n;
SELECT status FROM idem_get('mark of marked');
SELECT key, outcome FROM idem_claim_many('{marked-2,marked-1}');
SELECT idem_once('marked-3'), outcome, response FROM idem_execute('marked-4', 'SELECT status FROM idem_get(''mark of marked-4'')');
SELECT trigger, key, new_status FROM log ORDER BY n;
DROP TRIGGER mark ON idempotency_keys;
-- One that finds the extension altered, in the midst of a batch, and takes it back
CREATE FUNCTION hide() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    ALTER SEQUENCE public.idempotency_keys_token_seq RENAME TO hidden;
    PERFORM public.idem_get('any');
    RETURN NULL;
EXCEPTION WHEN object_not_in_prerequisite_state THEN
    RAISE NOTICE '%', SQLERRM;
    RETURN NULL;
END $$;
CREATE TRIGGER hide AFTER INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION hide();
SELECT key, outcome FROM idem_claim_many('{hidden-1,hidden-2,hidden-3}');
DROP TRIGGER hide ON idempotency_keys;

--
-- Foreign keys: whoever refers to a claim keeps it from being forgotten, and
-- from nothing else
--
SET statement_timeout = '20s';
CREATE TABLE payments (scope text, key text, amount int, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
BEGIN;
SELECT outcome FROM idem_claim('paid');
INSERT INTO payments VALUES ('', 'paid', 10);
SELECT idem_complete('paid', '10');
COMMIT;
INSERT INTO payments VALUES ('', 'unpaid', 10);
SET ROLE regress_idem_app;
SELECT outcome, response FROM idem_claim('paid');
SELECT idem_forget('paid');
RESET ROLE;
SELECT status FROM idem_get('paid');
DELETE FROM payments;
SELECT idem_forget('paid');
ALTER TABLE payments DROP CONSTRAINT payments_scope_key_fkey, ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE ON UPDATE CASCADE;
SELECT token FROM idem_claim('paid') \gset
INSERT INTO payments VALUES ('', 'paid', 10);
SELECT idem_complete('paid', '10', :token);
SET ROLE regress_idem_app;
SELECT idem_forget('paid');
RESET ROLE;
SELECT count(*) FROM payments;
DROP TABLE payments;
-- The same of a row that this transaction has locked by hand
SELECT token FROM idem_claim('locked') \gset
BEGIN;
SELECT key FROM idempotency_keys WHERE key = 'locked' FOR KEY SHARE;
SELECT idem_renew('locked', :token) IS NOT NULL AS renewed;
SELECT key FROM idempotency_keys WHERE key = 'locked' FOR UPDATE;
SELECT idem_checkpoint('locked', :token, 'x') IS NOT NULL AS noted;
SELECT key FROM idempotency_keys WHERE key = 'locked' FOR SHARE;
SELECT idem_fail('locked', token => :token, disposition => 'retry');
SELECT key FROM idempotency_keys WHERE key = 'locked' FOR SHARE;
SELECT outcome, attempt FROM idem_claim('locked');
SELECT key FROM idempotency_keys WHERE key = 'locked' FOR UPDATE;
SELECT idem_forget('locked');
COMMIT;
RESET statement_timeout;

--
-- Maintenance, in transactions of its own
--
SELECT outcome FROM idem_claim('kept', '{"n": 1}');
SELECT token FROM idempotency_keys WHERE key = 'kept' \gset
REINDEX INDEX idempotency_keys_pkey;
SELECT outcome FROM idem_claim('kept', '{"n": 1}');
REINDEX TABLE CONCURRENTLY idempotency_keys;
SELECT outcome FROM idem_claim('kept', '{"n": 1}');
SELECT outcome FROM idem_claim('kept', '{"n": 2}');
SELECT idem_renew('kept', :token, '1 hour') IS NOT NULL AS renewed;
VACUUM FULL idempotency_keys;
SELECT outcome FROM idem_claim('kept', '{"n": 1}');
SELECT idem_checkpoint('kept', :token, 'x') IS NOT NULL AS noted;
CLUSTER idempotency_keys USING idempotency_keys_pkey;
SELECT idem_fail('kept', token => :token, disposition => 'retry');
VACUUM (FREEZE, ANALYZE) idempotency_keys;
SELECT outcome, attempt FROM idem_claim('kept', '{"n": 1}');
VACUUM (FREEZE) idempotency_keys;
SELECT idem_complete('kept', '1', token) FROM idempotency_keys WHERE key = 'kept';
ALTER TABLE idempotency_keys SET TABLESPACE pg_default;
CREATE INDEX CONCURRENTLY extra ON idempotency_keys (token);
SELECT outcome, response FROM idem_claim('kept', '{"n": 1}');
DROP INDEX CONCURRENTLY extra;
ALTER TABLE idempotency_keys SET UNLOGGED;
SELECT outcome FROM idem_claim('kept', '{"n": 1}');
ALTER TABLE idempotency_keys SET LOGGED;
SELECT outcome, response FROM idem_claim('kept', '{"n": 1}');
ALTER TABLE idempotency_keys RENAME response TO answer;
SELECT outcome FROM idem_claim('kept', '{"n": 1}');
ALTER TABLE idempotency_keys RENAME answer TO response;
SELECT outcome, response FROM idem_claim('kept', '{"n": 1}');
SELECT use_it('after it all') = :'well' AS well;
TRUNCATE idempotency_keys;
SELECT outcome FROM idem_claim('kept', '{"n": 2}');
SELECT count(*) FROM idempotency_keys;

DROP FUNCTION use_it, try_change, nothing, itself, write_log, refuse, mark;
DROP TABLE before_change, log;
DROP SCHEMA regress_idem_elsewhere;
SELECT idem_revoke('regress_idem_app');
DROP ROLE regress_idem_app;
-- Dropped columns are all that is left of it.
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;

--
-- A rule that has been dropped is no rule (the catalog's flag stays a while)
--
CREATE RULE regress_idem_rule AS ON INSERT TO idempotency_keys DO ALSO NOTHING;
DROP RULE regress_idem_rule ON idempotency_keys;
SELECT outcome FROM idem_claim('after a rule');
