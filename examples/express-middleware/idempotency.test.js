import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { createHash, randomUUID } from 'node:crypto';
import { EventEmitter, once } from 'node:events';
import http from 'node:http';
import { Readable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import { buffer, json } from 'node:stream/consumers';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import express from 'express';
import pg from 'pg';
import { idempotency, keepRawBody } from './idempotency.js';

const CLIENTS = 20;
const WAITERS = 4;
const JSON_TYPE = { 'Content-Type': 'application/json' };
const roles = { a: `tenant_a_${process.pid}`, b: `tenant_b_${process.pid}` };
const admin = new pg.Pool({ max: 2 });
const pools = Object.fromEntries(Object.entries(roles).map(([tenant, user]) => [tenant, new pg.Pool({ user })]));
for (const pool of [admin, ...Object.values(pools)]) pool.on('error', () => {}); // a test kills connections

// What each key has led to, and a gate for the handlers that wait.
const runs = new Map();
const runsOf = (key) => runs.get(key) ?? 0;
const events = new EventEmitter();
let gate;
function hold() {
  let open;
  gate = new Promise((resolve) => { open = resolve; });
  return open;
}

const bytes = Buffer.from(Array.from({ length: 4096 }, (_, i) => i % 256));
let port;
let server;

function application() {
  const app = express().set('env', 'test'); // errors are not logged
  app.use((req, _res, next) => { req.tenant = req.get('X-Tenant') ?? 'a'; next(); }); // stands for a login
  app.use(express.json({ verify: keepRawBody }), express.raw({ verify: keepRawBody }));
  app.use(idempotency({
    db: (req) => pools[req.tenant],
    scope: (req) => req.get('X-Scope') ?? req.tenant,
    wait: '60s',
    waiters: WAITERS,
  }));
  app.use((req, _res, next) => {
    const key = req.idempotency?.key;
    if (key) runs.set(key, runsOf(key) + 1);
    next();
  });
  app.get('/', (_req, res) => res.send('no key needed'));
  app.post('/payments', async (req, res) => {
    events.emit('run');
    await gate;
    res.status(201).json({ amount: req.body.amount, tenant: req.tenant, attempt: req.idempotency.attempt });
  });
  app.post('/raw', async (_req, res) => {
    res.setHeader('X-MiXeD-Case', ['one', 'two']);
    res.writeHead(202, 'Accepted', [['Content-Type', 'application/octet-stream'], ['Set-Cookie', 'a=1; Path=/'], ['Set-Cookie', 'b=2']]);
    res.write(bytes);
    res.write('00ff', 'hex');
    res.end(bytes, () => events.emit('sent'));
  });
  app.post('/stream', async (req, res) => {
    res.cookie('a', '1').cookie('b', '2').set('Transfer-Encoding', 'chunked').type('bin');
    await pipeline(Readable.from([bytes, req.body, bytes]), res);
  });
  app.post('/nothing', (_req, res) => res.sendStatus(204));
  app.post('/teapot', (_req, res) => res.status(418).send('short and stout'));
  app.post('/flaky', (req, res) => {
    if (req.idempotency.attempt === 1) throw new Error('not now');
    res.json({ attempt: req.idempotency.attempt });
  });
  app.post('/large', (_req, res) => res.set('X-Large', 'yes').send(Buffer.alloc(1024 * 1024 + 1)));
  app.post('/setting', (_req, res) => res.send(Buffer.alloc(1024 * 1024)));
  return app;
}

async function call(path, { key, tenant, scope, method = 'POST', headers = JSON_TYPE, body = '{"amount":4999}', to = port, signal } = {}) {
  const request = http.request({
    host: '127.0.0.1', port: to, path, method, agent: false, signal,
    headers: {
      ...headers,
      'Content-Length': Buffer.byteLength(body),
      ...(key !== undefined && { 'Idempotency-Key': key }),
      ...(tenant && { 'X-Tenant': tenant }),
      ...(scope && { 'X-Scope': scope }),
    },
  });
  request.end(body);
  const [response] = await once(request, 'response');
  const answer = await buffer(response);
  return {
    status: response.statusCode,
    headers: response.headers,
    replayed: response.headers['idempotency-replayed'] === 'true',
    body: answer,
    json: () => JSON.parse(answer),
    // As it was sent: in order, with the names' case and with repeated names.
    exact: [response.statusCode, createHash('sha256').update(answer).digest('hex'), ...pairs(response.rawHeaders).filter(
      ([name]) => !['Connection', 'Date', 'Idempotency-Replayed'].includes(name))],
  };
}
const pairs = (raw) => raw.flatMap((name, i) => (i % 2 ? [] : [[name, raw[i + 1]]]));

async function until(what, condition) {
  for (const end = Date.now() + 60_000; !(await condition()); await sleep(20)) {
    assert.ok(Date.now() < end, `in vain: ${what}`);
  }
}
const statusOf = async (key, scope = 'a') =>
  (await admin.query('SELECT status FROM idem_get($1, $2)', [key, scope])).rows[0]?.status;

before(async () => {
  for (const [tenant, role] of Object.entries(roles)) {
    await admin.query(`CREATE ROLE ${role} LOGIN`);
    await admin.query(`SELECT idem_grant('${role}')`);
    await admin.query(`ALTER ROLE ${role} SET idempotency.scope = '${tenant}'`);
  }
  server = application().listen(0, '127.0.0.1');
  await once(server, 'listening');
  ({ port } = server.address());
});
after(async () => {
  server.close();
  server.closeAllConnections();
  await Promise.all(Object.values(pools).map((pool) => pool.end()));
  for (const role of Object.values(roles)) {
    await admin.query(`SELECT idem_revoke('${role}')`);
    await admin.query(`DROP ROLE ${role}`);
  }
  await admin.end();
});

test('400 without a usable key; the draft\'s string and the bare key are the same', async () => {
  for (const key of [undefined, '', '""', '"open', 'one, two', '"one", "two"', 'ä', 'k'.repeat(256)]) {
    const answer = await call('/payments', { key });
    assert.equal(answer.status, 400, `key ${key}`);
    assert.equal(answer.headers['content-type'], 'application/problem+json');
  }
  assert.equal(runs.size, 0);
  assert.equal((await call('/', { method: 'GET', body: '' })).status, 200);
  const key = randomUUID();
  assert.equal((await call('/payments', { key: `"${key}"` })).status, 201);
  assert.ok((await call('/payments', { key })).replayed);
});

test('a body that nothing has read is an error, not an empty body', async () => {
  const key = randomUUID();
  assert.equal((await call('/payments', { key, headers: { 'Content-Type': 'text/plain' } })).status, 500);
  assert.equal(runsOf(key), 0);
  assert.equal(await statusOf(key), undefined);
});

test('many clients at once: one runs, some wait for its answer, 409 and Retry-After for the rest', async () => {
  const key = randomUUID();
  const open = hold();
  const ran = once(events, 'run');
  const answers = [];
  const calls = Array.from({ length: CLIENTS }, () => call('/payments', { key }).then((answer) => answers.push(answer)));
  await ran;
  await until('the rest has its answer', () => answers.length >= CLIENTS - 1 - WAITERS);
  for (const { status, headers } of answers) {
    assert.equal(status, 409);
    assert.ok(Number(headers['retry-after']) >= 1);
  }
  open();
  await Promise.all(calls);
  const served = answers.filter(({ status }) => status !== 409);
  assert.equal(served[0].status, 201);
  assert.ok(served.length > 1);
  for (const { exact } of served) assert.deepEqual(exact, served[0].exact);
  assert.equal(served.filter(({ replayed }) => !replayed).length, 1);
  assert.equal(runsOf(key), 1);
});

test('422 for another body, query or path, whatever the state', async () => {
  const key = randomUUID();
  const open = hold();
  const ran = once(events, 'run');
  const first = call('/payments', { key });
  await ran;
  const others = () => Promise.all([
    call('/payments', { key, body: '{"amount":1}' }), call('/payments?a=b', { key }), call('/teapot', { key })]);
  for (const { status } of await others()) assert.equal(status, 422);
  open();
  assert.equal((await first).status, 201);
  for (const { status } of await others()) assert.equal(status, 422);
  assert.equal(runsOf(key), 1);
});

for (const [path, options] of Object.entries({
  '/payments': {}, '/raw': {}, '/nothing': {}, '/teapot': {},
  '/stream': { headers: { 'Content-Type': 'application/octet-stream' }, body: bytes },
})) {
  test(`replay of ${path}: status, headers and body byte for byte`, async () => {
    const key = randomUUID();
    const first = await call(path, { key, ...options });
    for (let i = 0; i < 2; i++) {
      const again = await call(path, { key, ...options });
      assert.ok(again.replayed && !first.replayed);
      assert.deepEqual(again.exact, first.exact);
    }
    assert.equal(runsOf(key), 1);
    if (path === '/raw') {
      assert.deepEqual(first.headers['set-cookie'], ['a=1; Path=/', 'b=2']);
      assert.deepEqual(first.body, Buffer.concat([bytes, Buffer.from('00ff', 'hex'), bytes]));
      assert.ok(first.exact.some((pair) => pair[0] === 'X-MiXeD-Case'));
    }
    if (path === '/stream') assert.deepEqual(first.body, Buffer.concat([bytes, bytes, bytes]));
    if (path === '/nothing') assert.equal(first.status, 204);
  });
}

test('5xx is not kept: the next one runs again', async () => {
  const key = randomUUID();
  assert.equal((await call('/flaky', { key })).status, 500);
  assert.equal(await statusOf(key), 'retryable');
  const second = await call('/flaky', { key });
  assert.deepEqual([second.status, second.json(), second.replayed], [200, { attempt: 2 }, false]);
  assert.deepEqual((await call('/flaky', { key })).exact, second.exact);
  assert.equal(runsOf(key), 2);
});

test('413 for an answer too large to be kept, and no second run', async () => {
  for (const path of ['/large', '/setting']) { // the middleware's limit, and the server's
    const key = randomUUID();
    const first = await call(path, { key });
    assert.equal(first.status, 413);
    assert.equal(first.headers['x-large'], undefined);
    const again = await call(path, { key });
    assert.ok(again.replayed);
    assert.deepEqual(again.exact, first.exact);
    assert.equal(runsOf(key), 1);
  }
});

test('tenants: the same key is two keys, and none reaches the other\'s', async () => {
  const key = randomUUID();
  const a = await call('/payments', { key, tenant: 'a' });
  const b = await call('/payments', { key, tenant: 'b' });
  assert.deepEqual([a.json().tenant, b.json().tenant, runsOf(key)], ['a', 'b', 2]);
  assert.ok((await call('/payments', { key, tenant: 'b' })).replayed);
  assert.equal((await call('/payments', { key, tenant: 'b', scope: 'a' })).status, 403);
  assert.equal(runsOf(key), 2);
});

test('a client that hangs up gets the answer when it comes back', async () => {
  const key = randomUUID();
  const open = hold();
  const ran = once(events, 'run');
  const hangUp = new AbortController();
  const first = call('/payments', { key, signal: hangUp.signal });
  await ran;
  hangUp.abort();
  await assert.rejects(first, { name: 'AbortError' });
  open();
  const second = await call('/payments', { key });
  assert.ok(second.replayed);
  assert.equal(second.status, 201);
  assert.equal(runsOf(key), 1);
});

test('the connections to the database die in the middle: the answer is kept all the same', async () => {
  const key = randomUUID();
  const open = hold();
  const ran = once(events, 'run');
  const first = call('/payments', { key });
  await ran;
  const { rowCount } = await admin.query(
    'SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1', [roles.a]);
  assert.ok(rowCount > 0);
  await until('the pool has noticed', () => pools.a.totalCount === 0);
  open();
  const answer = await first;
  assert.equal(answer.status, 201);
  assert.deepEqual((await call('/payments', { key })).exact, answer.exact);
  assert.equal(runsOf(key), 1);
});

test('a handler that outlived its lease answers with what its successor did', async () => {
  const key = randomUUID();
  const open = hold();
  const ran = once(events, 'run');
  const first = call('/payments', { key });
  await ran;
  await admin.query('SELECT idem_resolve($1, $2, scope => $3)', [key, 'retryable', 'a']); // as if its lease had ended
  gate = undefined;
  const second = await call('/payments', { key });
  assert.equal(second.json().attempt, 2);
  open();
  const answer = await first;
  assert.ok(answer.replayed);
  assert.deepEqual(answer.exact, second.exact);
});

test('a key that was settled by hand answers with what was given', async () => {
  const key = randomUUID();
  const open = hold();
  const ran = once(events, 'run');
  const first = call('/payments', { key });
  await ran;
  await admin.query("SELECT idem_resolve($1, 'completed', '{\"by\": \"hand\"}', scope => 'a')", [key]);
  const second = await call('/payments', { key });
  assert.deepEqual([second.status, second.json()], [200, { by: 'hand' }]);
  open();
  assert.deepEqual((await first).json(), { by: 'hand' });
  assert.equal(runsOf(key), 1);
});

test('the service is killed in the middle; meanwhile 409, then one charge', async (t) => {
  const charges = new Map();
  const calls = [];
  const provider = http.createServer(async (request, response) => {
    const uuid = request.headers['idempotency-key'];
    const { amount } = await json(request);
    if (!charges.has(uuid)) charges.set(uuid, { charge: randomUUID(), amount });
    calls.push(uuid);
    events.emit('charge');
    if (calls.length > 1) response.writeHead(201, JSON_TYPE).end(JSON.stringify(charges.get(uuid)));
  }).listen(0, '127.0.0.1');
  await once(provider, 'listening');
  const start = async () => {
    const child = spawn(process.execPath, ['server.js'], {
      stdio: ['ignore', 'pipe', 'inherit'],
      env: { ...process.env, PORT: '0', LEASE: '5s', PROVIDER: `http://127.0.0.1:${provider.address().port}/` },
    });
    t.after(() => child.kill('SIGKILL'));
    const [line] = await once(child.stdout, 'data');
    return { child, to: Number(line) };
  };
  t.after(() => { provider.close(); provider.closeAllConnections(); });

  const key = randomUUID();
  const one = await start();
  const two = await start();
  const charged = once(events, 'charge');
  const lost = assert.rejects(call('/payments', { key, to: one.to }), { code: 'ECONNRESET' });
  await charged;
  one.child.kill('SIGKILL');
  await lost;
  const refused = await call('/payments', { key, to: two.to });
  assert.equal(refused.status, 409);
  const seconds = Number(refused.headers['retry-after']);
  assert.ok(seconds >= 1 && seconds <= 5, `Retry-After: ${seconds}`);
  let answer;
  await until('the lease is over', async () => {
    answer = await call('/payments', { key, to: two.to });
    return answer.status !== 409;
  });
  assert.equal(answer.status, 201);
  assert.equal(answer.json().attempt, 2);
  assert.ok((await call('/payments', { key, to: two.to })).replayed);
  assert.equal(calls.length, 2);
  assert.equal(charges.size, 1);
});
