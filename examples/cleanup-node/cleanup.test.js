import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { text } from 'node:stream/consumers';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import { startCleanup, sweep } from './cleanup.js';

const EVERY_SECOND = '* * * * * *';
const pool = new pg.Pool();
const one = async (sql, ...values) => Object.values((await pool.query(sql, values)).rows[0] ?? {})[0];
const count = () => one('SELECT count(*)::int FROM idempotency_keys');
const sweeper = (column) =>
  one(`SELECT ${column} FROM pg_stat_activity WHERE application_name = 'cleanup' AND query LIKE 'CALL%' AND state = 'active' LIMIT 1`);

async function until(what, condition) {
  for (const end = Date.now() + 60_000; !(await condition()); await sleep(20)) {
    assert.ok(Date.now() < end, `in vain: ${what}`);
  }
}

// What is logged, for the test to look at.
function newLog() {
  const lines = [];
  return { lines, error: (line) => lines.push(line), warn: (line) => lines.push(line) };
}

async function fill(expired) {
  await pool.query('TRUNCATE idempotency_keys');
  await one(`SELECT count(idem_once('old-' || n, ttl => '1 ms')) FROM generate_series(1, $1::int) n`, expired);
  await one(`SELECT idem_once('live')`);
  await one(`SELECT outcome FROM idem_claim('leased', ttl => '1 ms')`);
  await until('they expire', () =>
    one('SELECT count(*) = 2 FROM idempotency_keys WHERE expires_at > clock_timestamp()'));
}

before(() => pool.query('SELECT 1'));
after(() => pool.end());

test('on schedule, what has expired goes and the rest stays', async () => {
  await fill(2500);
  const log = newLog();
  const cleanup = startCleanup(EVERY_SECOND, { log });
  await until('it is swept', async () => (await count()) === 2);
  await one(`SELECT idem_once('another', ttl => '1 ms')`);
  await until('the next run sweeps what has expired since', async () => (await count()) === 2);
  await cleanup.stop();
  assert.deepEqual(log.lines, []);
  assert.equal(await one(`SELECT string_agg(key, ' ' ORDER BY key) FROM idempotency_keys`), 'leased live');
});

test('several processes at once', async () => {
  await fill(5000);
  await Promise.all(Array.from({ length: 5 }, () => sweep()));
  assert.equal(await count(), 2);
});

test('a role that may not sweep, a server that is not there: logged, and tried again', async () => {
  await fill(10);
  const log = newLog();
  const lost = startCleanup(EVERY_SECOND, { log, config: { host: '/nonexistent' } });
  await until('two runs have failed', () => log.lines.length >= 2);
  await lost.stop();
  await pool.query('DROP ROLE IF EXISTS cleanup_app; CREATE ROLE cleanup_app LOGIN');
  try {
    await assert.rejects(sweep({ config: { user: 'cleanup_app' } }), { code: '42501' });
    await one(`SELECT idem_grant('cleanup_app', admin => true)`);
    await sweep({ config: { user: 'cleanup_app' } });
    assert.equal(await count(), 2);
  } finally {
    await pool.query('DROP OWNED BY cleanup_app; DROP ROLE cleanup_app');
  }
});

test('a connection that dies in the middle: the next run does the rest', async () => {
  await fill(100);
  await pool.query(`ALTER DATABASE ${pg.escapeIdentifier(await one('SELECT current_database()'))} SET idempotency.sweep_batch_size = 10`);
  await pool.query(`ALTER DATABASE ${pg.escapeIdentifier(await one('SELECT current_database()'))} SET idempotency.sweep_pause = '1 h'`);
  const log = newLog();
  const cleanup = startCleanup(EVERY_SECOND, { log });
  try {
    await until('it pauses', async () => (await count()) === 92);
    await pool.query(`ALTER DATABASE ${pg.escapeIdentifier(await one('SELECT current_database()'))} RESET idempotency.sweep_pause`);
    await one('SELECT pg_terminate_backend($1)', await sweeper('pid'));
    await until('the next run is through', async () => (await count()) === 2);
    assert.ok(log.lines.length > 0);
  } finally {
    await cleanup.stop();
    await pool.query(`ALTER DATABASE ${pg.escapeIdentifier(await one('SELECT current_database()'))} RESET ALL`);
  }
});

test('SIGTERM ends a run that pauses; what it has deleted stays deleted', async (t) => {
  await fill(100);
  const child = spawn(process.execPath, ['cleanup.js', EVERY_SECOND], {
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { ...process.env, PGOPTIONS: `-c idempotency.sweep_batch_size=10 -c idempotency.sweep_pause=1h` },
  });
  t.after(() => child.kill('SIGKILL'));
  const output = Promise.all([text(child.stdout), text(child.stderr)]);
  await until('it pauses', async () => (await count()) === 92);
  child.kill('SIGTERM');
  const [code] = await once(child, 'exit');
  assert.equal(code, 0);
  assert.deepEqual(await output, ['', '']);
  assert.equal(await count(), 92);
  assert.equal(await sweeper('pid'), undefined);
});
