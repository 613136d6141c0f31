--
-- sweep_hostile: a sweep runs unasked, and often as a superuser: code that others
-- have attached to the table must not become its code
--
TRUNCATE idempotency_keys;
\pset null -
\set SHOW_CONTEXT never
CREATE TABLE regress_idem_runs (what text, who text);
GRANT INSERT ON regress_idem_runs TO PUBLIC;
CREATE PROCEDURE pg_temp.pause(seconds float) LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(seconds); END $$;
CREATE VIEW pg_temp.left_over AS SELECT coalesce(string_agg(key, ' ' ORDER BY key), '') AS keys FROM idempotency_keys;
-- what somebody ran: as whom, and never as us
CREATE VIEW pg_temp.runs AS SELECT what, replace(who, current_user::text, 'OURSELVES') AS who, count(*) > 0 AS ran FROM regress_idem_runs GROUP BY 1, 2;
CREATE ROLE regress_idem_child;
GRANT REFERENCES, SELECT ON idempotency_keys TO regress_idem_child;
CREATE SCHEMA regress_idem_child AUTHORIZATION regress_idem_child;

--
-- The table of a role that may do nothing but refer to keys
--
SET ROLE regress_idem_child;
CREATE TABLE regress_idem_child.child (scope text DEFAULT '', key text,
    FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE);
CREATE TABLE regress_idem_child.later (n int);
CREATE FUNCTION regress_idem_child.run(what text) RETURNS int LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.regress_idem_runs VALUES (what, current_user); RETURN 1; END $$;
CREATE FUNCTION regress_idem_child.deferred() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM regress_idem_child.run('deferred trigger'); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER deferred AFTER INSERT ON regress_idem_child.later DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION regress_idem_child.deferred();
CREATE FUNCTION regress_idem_child.trap() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM regress_idem_child.run('trigger');
    IF OLD.key = 'cursor' THEN EXECUTE 'DECLARE regress_idem_held CURSOR WITH HOLD FOR SELECT regress_idem_child.run(''held cursor'')'; END IF;
    IF OLD.key = 'deferred' THEN SET CONSTRAINTS ALL DEFERRED; INSERT INTO regress_idem_child.later VALUES (1); END IF;
    IF OLD.key = 'immediate' THEN INSERT INTO regress_idem_child.later VALUES (1); END IF;
    IF OLD.key = 'undone' THEN SET CONSTRAINTS ALL DEFERRED; END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER trap AFTER DELETE ON regress_idem_child.child FOR EACH ROW EXECUTE FUNCTION regress_idem_child.trap();
RESET ROLE;

-- keys NAME...: expired ones, each with a row that refers to it
CREATE PROCEDURE pg_temp.fill(VARIADIC names text[]) LANGUAGE plpgsql AS $$
BEGIN
    TRUNCATE idempotency_keys CASCADE;
    TRUNCATE regress_idem_runs;
    PERFORM idem_once_many(names, ttl => '1 us');
    INSERT INTO regress_idem_child.child (key) SELECT unnest(names);
    COMMIT;
    PERFORM pg_sleep(0.02);
END $$;
SET client_min_messages = warning;

-- A cursor would be read when the sweep commits: refused, and its row alone stays.
CALL pg_temp.fill('cursor', 'harmless');
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
SELECT idem_sweep();
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;

-- So is a trigger that would run then.
CALL pg_temp.fill('deferred', 'harmless');
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;

-- One that is deferrable runs at once.
CALL pg_temp.fill('immediate', 'harmless');
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;

-- Whoever undoes that for a row does not for the next ones.
CALL pg_temp.fill('undone', 'undone-after');
SET ROLE regress_idem_child;
ALTER TABLE regress_idem_child.child DROP CONSTRAINT child_scope_key_fkey;
ALTER TABLE regress_idem_child.child ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED;
RESET ROLE;
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;

-- In the caller's transaction the constraints are the caller's.
CALL pg_temp.fill('harmless');
BEGIN;
SELECT idem_sweep();
SET CONSTRAINTS ALL IMMEDIATE;
SELECT idem_sweep();
COMMIT;
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;

-- A key that is forgotten takes them along, too, and closes their tables; what
-- they may leave behind is no more.
CALL pg_temp.fill('cursor');
SELECT idem_forget('cursor');
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
CALL pg_temp.fill('harmless');
SELECT idem_forget('harmless');
SELECT * FROM pg_temp.runs ORDER BY what;

-- A second role's table, a superuser's even: harmless as long as a deletion doesn't
-- change it. Else the code of one would run as the other.
CREATE ROLE regress_idem_second;
GRANT REFERENCES ON idempotency_keys TO regress_idem_second;
CREATE TABLE regress_idem_second (scope text DEFAULT '', key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
ALTER TABLE regress_idem_second OWNER TO regress_idem_second;
CALL pg_temp.fill('harmless');
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
ALTER TABLE regress_idem_second DROP CONSTRAINT regress_idem_second_scope_key_fkey;
ALTER TABLE regress_idem_second ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE SET NULL;
CALL pg_temp.fill('harmless');
CALL idem_sweep_all();
SELECT idem_forget('harmless');
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
DROP TABLE regress_idem_second;
-- Over a table of ours: by its deletion, by its update, by its rule; and as a partition of it.
ALTER TABLE regress_idem_child.child RENAME TO direct;
CREATE TABLE regress_idem_child.child (scope text DEFAULT '', key text);
ALTER TABLE regress_idem_child.direct DROP CONSTRAINT child_scope_key_fkey;
CREATE TABLE regress_idem_own (scope text DEFAULT '', key text UNIQUE, part int DEFAULT 1, FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE);
CREATE TABLE regress_idem_child.leaf (key text REFERENCES regress_idem_own (key) ON DELETE CASCADE);
ALTER TABLE regress_idem_child.leaf OWNER TO regress_idem_child;
CREATE TRIGGER trap AFTER DELETE OR UPDATE ON regress_idem_child.leaf FOR EACH ROW EXECUTE FUNCTION regress_idem_child.trap();
CALL pg_temp.fill('harmless');
INSERT INTO regress_idem_own (key) VALUES ('harmless');
INSERT INTO regress_idem_child.leaf (key) VALUES ('harmless');
CALL idem_sweep_all();
ALTER TABLE regress_idem_own DROP CONSTRAINT regress_idem_own_scope_key_fkey, ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE SET NULL;
ALTER TABLE regress_idem_child.leaf DROP CONSTRAINT leaf_key_fkey, ADD FOREIGN KEY (key) REFERENCES regress_idem_own (key) ON UPDATE CASCADE;
CALL idem_sweep_all();
ALTER TABLE regress_idem_child.leaf DROP CONSTRAINT leaf_key_fkey;
CREATE RULE regress_idem_rule AS ON UPDATE TO regress_idem_own DO ALSO DELETE FROM regress_idem_child.leaf;
CALL idem_sweep_all();
SELECT idem_forget('harmless');
DROP RULE regress_idem_rule ON regress_idem_own;
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
-- ours alone
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
DROP TABLE regress_idem_child.leaf, regress_idem_own;
CREATE TABLE regress_idem_own (scope text DEFAULT '', key text, part int DEFAULT 1,
    FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE) PARTITION BY LIST (part);
CREATE TABLE regress_idem_part PARTITION OF regress_idem_own FOR VALUES IN (1);
ALTER TABLE regress_idem_part OWNER TO regress_idem_child;
CREATE TRIGGER trap AFTER DELETE ON regress_idem_part FOR EACH ROW EXECUTE FUNCTION regress_idem_child.trap();
CALL pg_temp.fill('harmless');
INSERT INTO regress_idem_own (key) VALUES ('harmless');
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
-- all of it one role's
ALTER TABLE regress_idem_own OWNER TO regress_idem_child;
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
DROP TABLE regress_idem_own;
DROP TABLE regress_idem_child.child;
TRUNCATE regress_idem_child.direct;
ALTER TABLE regress_idem_child.direct RENAME TO child;
ALTER TABLE regress_idem_child.child ADD FOREIGN KEY (scope, key) REFERENCES idempotency_keys ON DELETE CASCADE;
-- A trigger of the keys themselves would run as that role.
CREATE FUNCTION pg_temp.own() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.regress_idem_runs VALUES ('own trigger', current_user); RETURN NULL; END $$;
CREATE TRIGGER regress_idem_own AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION pg_temp.own();
CALL pg_temp.fill('harmless');
CALL idem_sweep_all();
SELECT idem_forget('harmless');
DROP TRIGGER regress_idem_own ON idempotency_keys;
CALL idem_sweep_all();
SELECT * FROM pg_temp.left_over;
REVOKE ALL ON idempotency_keys FROM regress_idem_second;
DROP ROLE regress_idem_second;
-- An error that only looks like a lock that would be waited for is the row's, and
-- keeps nobody behind it from being swept.
SET ROLE regress_idem_child;
CREATE OR REPLACE FUNCTION regress_idem_child.trap() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.key LIKE 'locked%' THEN RAISE EXCEPTION 'no' USING ERRCODE = 'lock_not_available'; END IF;
    RETURN NULL;
END $$;
RESET ROLE;
CALL pg_temp.fill('locked1', 'locked2', 'locked3', 'locked4', 'locked5', 'locked6', 'locked7', 'locked8', 'locked9', 'locked10', 'locked11', 'x');
SELECT idem_sweep();
SELECT count(*) FROM idempotency_keys;
DROP SCHEMA regress_idem_child CASCADE;

--
-- A table's owner who is no superuser
--
SELECT rolname AS owner FROM pg_class c JOIN pg_roles r ON r.oid = c.relowner WHERE c.oid = 'idempotency_keys'::regclass \gset
CREATE SCHEMA regress_idem_child AUTHORIZATION regress_idem_child;
GRANT CREATE ON SCHEMA public TO regress_idem_child;
ALTER TABLE idempotency_keys OWNER TO regress_idem_child;
SET ROLE regress_idem_child;
CREATE FUNCTION regress_idem_child.run(what text) RETURNS int LANGUAGE plpgsql VOLATILE AS $$
BEGIN INSERT INTO public.regress_idem_runs VALUES (what, current_user); RETURN 1; END $$;
CREATE FUNCTION regress_idem_child.one(what text) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN RETURN regress_idem_child.run(what); END $$;
CREATE INDEX regress_idem_expression ON idempotency_keys ((regress_idem_child.one('index') + token));
CREATE INDEX regress_idem_predicate ON idempotency_keys (token) WHERE regress_idem_child.one('predicate') + token > 0;
CREATE INDEX regress_idem_due ON idempotency_keys (due_at, (regress_idem_child.one('due_at') + token));
ALTER TABLE idempotency_keys ADD CONSTRAINT regress_idem_check CHECK (regress_idem_child.one('check') + token > 0),
    ADD COLUMN added int DEFAULT regress_idem_child.one('default');
RESET ROLE;
TRUNCATE regress_idem_runs;
SELECT idem_complete('c', '1', token, ttl => '1 us') FROM idem_claim('c', '1');
SELECT idem_once('o', ttl => '1 us');
CALL pg_temp.pause(0.02);
SELECT swept_rows IS NULL AS f FROM (SELECT idem_sweep() AS swept_rows) s;
CALL idem_sweep_all();
SELECT count(*) FROM idem_health();
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
ALTER TABLE idempotency_keys DROP CONSTRAINT regress_idem_check, DROP COLUMN added;
-- His trigger makes the table one that we refuse, and is undone with its row; or
-- not, if it catches the error.
CREATE FUNCTION regress_idem_child.nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$;
CREATE FUNCTION regress_idem_child.nested() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.regress_idem_runs VALUES ('trigger of ' || OLD.key, current_user);
    IF OLD.key = 'n1' THEN
        CREATE TRIGGER refused BEFORE INSERT ON public.idempotency_keys FOR EACH ROW EXECUTE FUNCTION regress_idem_child.nothing();
        PERFORM public.idem_claim('nested');
    ELSIF OLD.key = 'n2' THEN
        BEGIN
            CREATE TRIGGER refused BEFORE INSERT ON public.idempotency_keys FOR EACH ROW EXECUTE FUNCTION regress_idem_child.nothing();
            PERFORM public.idem_claim('nested');
        EXCEPTION WHEN object_not_in_prerequisite_state THEN
            INSERT INTO public.regress_idem_runs VALUES ('refused', current_user);
        END;
    END IF;
    RETURN NULL;
END $$;
ALTER FUNCTION regress_idem_child.nothing() OWNER TO regress_idem_child;
ALTER FUNCTION regress_idem_child.nested() OWNER TO regress_idem_child;
SELECT idem_grant('regress_idem_child');
CREATE TRIGGER nested AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION regress_idem_child.nested();
TRUNCATE idempotency_keys, regress_idem_runs;
SELECT idem_once('n' || n, ttl => '1 us') FROM generate_series(1, 3) n;
CALL pg_temp.pause(0.02);
SELECT idem_sweep();
SELECT current_user = session_user AS ourselves;
CREATE TEMP TABLE regress_idem_temp ();
DROP TABLE regress_idem_temp;
SELECT * FROM pg_temp.left_over;
SELECT * FROM pg_temp.runs ORDER BY what;
DROP TRIGGER nested ON idempotency_keys;
-- A claim's triggers run as the owner, and so may leave nothing behind for the
-- commit of another caller; nor may those of a deletion.
CREATE OR REPLACE FUNCTION regress_idem_child.nested() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE 'DECLARE regress_idem_held CURSOR WITH HOLD FOR SELECT regress_idem_child.run(''held cursor'')';
    RETURN NULL;
END $$;
CREATE TRIGGER nested AFTER INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION regress_idem_child.nested();
TRUNCATE idempotency_keys, regress_idem_runs;
SELECT idem_claim('c');
SET ROLE regress_idem_child;
SELECT outcome FROM idem_claim('c');
RESET ROLE;
SELECT * FROM pg_temp.runs ORDER BY what;
DROP TRIGGER nested ON idempotency_keys;
CREATE TRIGGER nested AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION regress_idem_child.nested();
SELECT idem_forget('c');
DROP TRIGGER nested ON idempotency_keys;
SELECT idem_revoke('regress_idem_child');
TRUNCATE idempotency_keys;
DROP INDEX regress_idem_expression, regress_idem_predicate, regress_idem_due;
ALTER TABLE idempotency_keys OWNER TO :"owner";
REVOKE CREATE ON SCHEMA public FROM regress_idem_child;
REVOKE ALL ON idempotency_keys FROM regress_idem_child;
DROP SCHEMA regress_idem_child CASCADE;
DROP ROLE regress_idem_child;
DROP TABLE regress_idem_runs CASCADE;
