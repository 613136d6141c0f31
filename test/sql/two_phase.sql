--
-- two_phase: claims and results in prepared transactions
--
TRUNCATE idempotency_keys;
\pset null -
-- Without max_prepared_transactions there is nothing to test (see two_phase_1.out).
SELECT current_setting('max_prepared_transactions')::int = 0 AS cannot_prepare \gset
\if :cannot_prepare
\quit
\endif
\set VERBOSITY sqlstate

-- A claim that is prepared is an open claim of somebody else, for everybody.
BEGIN;
SELECT outcome FROM idem_claim('claimed', '{"n": 1}', operation => 'pay');
PREPARE TRANSACTION 'regress_idem_1';
SELECT outcome, retry_after > '0' AS retry FROM idem_claim('claimed', '{"n": 1}', operation => 'pay');
SELECT outcome FROM idem_claim('claimed', '{"n": 2}', operation => 'pay');
SELECT outcome FROM idem_claim('claimed', '{"n": 1}', operation => 'pay', wait => '50 ms');
SELECT count(*) FROM idem_get('claimed');
SELECT idem_complete('claimed', '1', 1);
COMMIT PREPARED 'regress_idem_1';
SELECT outcome, attempt FROM idem_claim('claimed', '{"n": 1}', operation => 'pay');
SELECT idem_complete('claimed');
SELECT idem_complete('claimed', '1', token) FROM idempotency_keys WHERE key = 'claimed';

-- Rolled back, it is none.
BEGIN;
SELECT outcome FROM idem_claim('rolled back');
PREPARE TRANSACTION 'regress_idem_2';
SELECT outcome FROM idem_claim('rolled back');
ROLLBACK PREPARED 'regress_idem_2';
SELECT outcome, attempt FROM idem_claim('rolled back');

-- Claim, work and result
BEGIN;
SELECT outcome FROM idem_claim('completed');
SELECT idem_complete('completed', '"done"');
PREPARE TRANSACTION 'regress_idem_3';
SELECT outcome, response FROM idem_claim('completed');
COMMIT PREPARED 'regress_idem_3';
SELECT outcome, response FROM idem_claim('completed');

-- A result of an earlier claim: processing until it is decided
SELECT token FROM idem_claim('result') \gset
BEGIN;
SELECT idem_complete('result', '"done"', :token);
PREPARE TRANSACTION 'regress_idem_4';
SELECT outcome FROM idem_claim('result');
SELECT status FROM idem_get('result');
ROLLBACK PREPARED 'regress_idem_4';
SELECT outcome FROM idem_claim('result');
SELECT idem_complete('result', '"after all"', :token);
SELECT outcome, response FROM idem_claim('result');

-- A command, a message and a batch
BEGIN;
SELECT outcome, response FROM idem_execute('executed', 'SELECT count(*) FROM idem_claim_many(''{batch-1,batch-2}'')');
SELECT idem_once('message'), idem_complete_many('{batch-1}', NULL);
PREPARE TRANSACTION 'regress_idem_9';
SELECT outcome, replayed FROM idem_execute('executed', 'SELECT 1', wait => '0');
SELECT outcome, replayed FROM idem_execute('executed', 'SELECT 1', wait => '50 ms');
SELECT key, outcome FROM idem_claim_many('{batch-2,new,batch-1,message}');
SET statement_timeout = '100ms';
SELECT outcome FROM idem_execute('executed', 'SELECT 1');
SELECT idem_once('message');
SELECT * FROM idem_once_many('{other,message}');
RESET statement_timeout;
SELECT count(*) FROM idem_get('other');
COMMIT PREPARED 'regress_idem_9';
SELECT outcome, response, replayed FROM idem_execute('executed', 'SELECT 1');
SELECT idem_once('message');
SELECT * FROM idem_once_many('{other,message}');
SELECT key, outcome FROM idem_claim_many('{batch-2,new,batch-1,message}');
BEGIN;
SELECT outcome FROM idem_execute('executed back', 'SELECT 1');
SELECT * FROM idem_once_many('{message-back}');
PREPARE TRANSACTION 'regress_idem_9';
ROLLBACK PREPARED 'regress_idem_9';
SELECT idem_once('message-back'), outcome, replayed FROM idem_execute('executed back', 'SELECT 1');
-- A command that meets somebody's lock: the request isn't to blame.
CREATE TABLE stock AS SELECT 1 AS item, 10 AS n;
BEGIN;
UPDATE stock SET n = n - 1;
PREPARE TRANSACTION 'regress_idem_9';
SET lock_timeout = '50ms';
SELECT idem_execute('locked', 'UPDATE stock SET n = n - 1');
SELECT idem_execute('locked', 'SELECT n FROM stock FOR UPDATE NOWAIT');
RESET lock_timeout;
SET statement_timeout = '50ms';
SELECT idem_execute('locked', 'UPDATE stock SET n = n - 1');
RESET statement_timeout;
SELECT count(*) FROM idem_get('locked');
COMMIT PREPARED 'regress_idem_9';
SELECT outcome, attempt, response FROM idem_execute('locked', 'UPDATE stock SET n = n - 1 RETURNING n');
DROP TABLE stock;

-- An end to it by an administrator waits, like any other change of the row.
BEGIN;
SELECT outcome FROM idem_claim('waited for');
PREPARE TRANSACTION 'regress_idem_5';
COMMIT PREPARED 'regress_idem_5';
SELECT token FROM idempotency_keys WHERE key = 'waited for' \gset
BEGIN;
SELECT idem_renew('waited for', :token, '2 hours') IS NOT NULL AS renewed;
PREPARE TRANSACTION 'regress_idem_6';
SET statement_timeout = '100ms';
SELECT idem_forget('waited for');
SELECT idem_complete('waited for', '1', :token);
RESET statement_timeout;
ROLLBACK PREPARED 'regress_idem_6';
SELECT idem_complete('waited for', '1', :token);
-- The one who must lose loses at once.
SELECT token FROM idem_claim('loser') \gset
BEGIN;
SELECT idem_renew('loser', :token, '2 hours') IS NOT NULL AS renewed;
PREPARE TRANSACTION 'regress_idem_7';
SET statement_timeout = '10s';
SELECT idem_complete('loser', '1', :token + 1);
RESET statement_timeout;
COMMIT PREPARED 'regress_idem_7';
-- Somebody who refers to the key stands in nobody's way but idem_forget's.
CREATE TABLE payments (scope text, key text, FOREIGN KEY (scope, key) REFERENCES idempotency_keys);
SELECT token FROM idem_claim('referred') \gset
BEGIN;
INSERT INTO payments VALUES ('', 'referred');
PREPARE TRANSACTION 'regress_idem_8';
SET statement_timeout = '10s';
SELECT idem_checkpoint('referred', :token, 'x') IS NOT NULL AS noted;
SELECT idem_fail('referred', token => :token, disposition => 'retry');
SELECT outcome, attempt FROM idem_claim('referred');
SELECT idem_complete('referred', '1', token) FROM idempotency_keys WHERE key = 'referred';
SET statement_timeout = '100ms';
SELECT idem_forget('referred');
RESET statement_timeout;
COMMIT PREPARED 'regress_idem_8';
SELECT idem_forget('referred');
SELECT status FROM idem_get('referred');
DROP TABLE payments;
SELECT count(*) FROM pg_prepared_xacts WHERE gid LIKE 'regress_idem%';
