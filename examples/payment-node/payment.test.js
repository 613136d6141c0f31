import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { EventEmitter, once } from 'node:events';
import { createServer } from 'node:http';
import { text } from 'node:stream/consumers';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import pg from 'pg';
import { chargePayment, Declined, httpProvider, KeyReused, placeOrder, TryLater } from './payment.js';

const CLIENTS = 20;
const pool = new pg.Pool({ max: CLIENTS + 5 });
const newOrder = (amount = 4999) => ({ id: `order-${randomUUID()}`, amount });
const one = async (sql, ...values) => Object.values((await pool.query(sql, values)).rows[0] ?? {})[0];
const ordersOf = ({ id }) => one('SELECT count(*)::int FROM orders WHERE id = $1', id);
const together = (work) => Promise.all(Array.from({ length: CLIENTS }, work));

async function until(what, condition) {
  for (const end = Date.now() + 60_000; !(await condition()); await sleep(20)) {
    assert.ok(Date.now() < end, `in vain: ${what}`);
  }
}

// A payment provider that honours idempotency keys and counts what it charges.
// 'call' is emitted when a call arrives; the answer waits for `gate`.
class Provider extends EventEmitter {
  charges = new Map();
  calls = 0;
  gate = undefined;
  decide = () => 201;

  async start() {
    this.server = createServer(async (request, response) => {
      const uuid = request.headers['idempotency-key'];
      const { amount } = JSON.parse(await text(request));
      this.calls += 1;
      const status = this.decide(this.calls);
      if (status === 201 && !this.charges.has(uuid)) this.charges.set(uuid, { charge: randomUUID(), amount });
      this.emit('call');
      await this.gate;
      response.writeHead(status, { 'Content-Type': 'application/json' });
      response.end(JSON.stringify(status === 201 ? this.charges.get(uuid) : { code: `status-${status}` }));
    }).listen(0, '127.0.0.1');
    await once(this.server, 'listening');
    this.url = `http://127.0.0.1:${this.server.address().port}/charges`;
    this.charge = httpProvider(this.url);
    return this;
  }

  hold() {
    let open;
    this.gate = new Promise((resolve) => { open = resolve; });
    return open;
  }
}

async function withProvider(t) {
  const provider = await new Provider().start();
  t.after(() => { provider.server.close(); provider.server.closeAllConnections(); });
  return provider;
}

function startWorker(t, provider, order, options) {
  const child = spawn(process.execPath, ['worker.js', provider.url, JSON.stringify(order), JSON.stringify(options)],
    { stdio: ['ignore', 'pipe', 'inherit'] });
  t.after(() => child.kill('SIGKILL'));
  child.output = text(child.stdout);
  return child;
}

before(() => pool.query(`
  CREATE TABLE IF NOT EXISTS orders (number int GENERATED ALWAYS AS IDENTITY, id text NOT NULL, amount int NOT NULL)`));
after(() => pool.end());
pool.on('error', () => {}); // a connection that a test has killed

test('one transaction: many clients, one order, one receipt', async () => {
  const order = newOrder();
  const receipts = await together(() => placeOrder(pool, order));
  for (const receipt of receipts) assert.deepEqual(receipt, receipts[0]);
  assert.equal(await ordersOf(order), 1);
});

test('one transaction: another amount is refused', async () => {
  const order = newOrder();
  await placeOrder(pool, order);
  await assert.rejects(placeOrder(pool, { ...order, amount: 1 }), KeyReused);
  assert.equal(await ordersOf(order), 1);
});

test('one transaction: its connection is killed in the middle, a retry orders once', async () => {
  const order = newOrder();
  const blocker = await pool.connect();
  await blocker.query('BEGIN');
  await blocker.query('LOCK TABLE orders IN SHARE MODE');
  const attempt = assert.rejects(placeOrder(pool, order), { code: '57P01' });
  const stuck = `FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`;
  await until('the order waits for the lock', () => one(`SELECT count(*) = 1 ${stuck}`));
  await assert.rejects(placeOrder(pool, order, { waitMs: 0 }), { name: 'Error', outcome: 'processing' });
  await pool.query(`SELECT pg_terminate_backend(pid) ${stuck}`);
  await attempt;
  await blocker.query('COMMIT');
  blocker.release();
  const receipt = await placeOrder(pool, order);
  assert.deepEqual(await placeOrder(pool, order), receipt);
  assert.equal(await ordersOf(order), 1);
});

test('lease: many clients, one charge, one receipt', async (t) => {
  const provider = await withProvider(t);
  const order = newOrder();
  const receipts = await together(() => chargePayment(pool, provider.charge, order));
  for (const receipt of receipts) assert.deepEqual(receipt, receipts[0]);
  assert.equal(provider.calls, 1);
  const uuid = await one('SELECT idem_uuid(idem_key($1, $2))', order.id, 'ChargePayment');
  assert.deepEqual([...provider.charges.keys()], [uuid]);
  await assert.rejects(chargePayment(pool, provider.charge, { ...order, amount: 1 }), KeyReused);
});

test('lease: a decline is final and replayed', async (t) => {
  const provider = await withProvider(t);
  provider.decide = () => 402;
  const order = newOrder();
  for (let i = 0; i < 3; i++) {
    await assert.rejects(chargePayment(pool, provider.charge, order), new Declined('status-402'));
  }
  assert.equal(provider.calls, 1);
});

test('lease: an outage of the provider is retried, after a while', async (t) => {
  const provider = await withProvider(t);
  provider.decide = (call) => (call === 1 ? 503 : 201);
  const order = newOrder();
  await assert.rejects(chargePayment(pool, provider.charge, order), { outcome: 'retryable', retryAfter: 1 });
  let receipt;
  await until('it may be retried', async () => {
    receipt = await chargePayment(pool, provider.charge, order).catch((error) => {
      assert.equal(error.outcome, 'retryable');
    });
    return receipt;
  });
  assert.equal(receipt.amount, order.amount);
  assert.equal(provider.calls, 2);
  assert.equal(provider.charges.size, 1);
});

test('lease: a worker is killed after the provider charged, its successor does not charge again', async (t) => {
  const provider = await withProvider(t);
  const order = newOrder();
  provider.hold();
  const called = once(provider, 'call');
  const worker = startWorker(t, provider, order, { leaseMs: 2000 });
  await called;
  worker.kill('SIGKILL');
  await once(worker, 'exit');
  provider.gate = undefined;
  const receipt = await chargePayment(pool, provider.charge, order, { waitMs: 60_000 });
  assert.equal(receipt.amount, order.amount);
  assert.equal(await one('SELECT attempt FROM idem_get(idem_key($1, $2))', order.id, 'ChargePayment'), 2);
  assert.equal(provider.calls, 2);
  assert.equal(provider.charges.size, 1);
});

test('lease: a worker that wakes up too late gets its successor\'s receipt', async (t) => {
  const provider = await withProvider(t);
  const order = newOrder();
  const open = provider.hold();
  const called = once(provider, 'call');
  const worker = startWorker(t, provider, order, { leaseMs: 2000 });
  await called;
  worker.kill('SIGSTOP');
  provider.gate = undefined;
  const receipt = await chargePayment(pool, provider.charge, order, { waitMs: 60_000 });
  open();
  worker.kill('SIGCONT');
  assert.deepEqual(JSON.parse(await worker.output), receipt);
  assert.equal(provider.charges.size, 1);
  assert.equal(await one('SELECT attempt FROM idem_get(idem_key($1, $2))', order.id, 'ChargePayment'), 2);
});

test('lease: a slow provider outlasts the lease, because the heartbeat renews it', async (t) => {
  const provider = await withProvider(t);
  const order = newOrder();
  const open = provider.hold();
  const called = once(provider, 'call');
  const charging = chargePayment(pool, provider.charge, order, { leaseMs: 3000 });
  await called;
  const row = 'FROM idem_get(idem_key($1, $2))';
  const end = await one(`SELECT lease_until ${row}`, order.id, 'ChargePayment');
  await until('the first lease is over', () => one('SELECT clock_timestamp() > $1', end));
  await assert.rejects(chargePayment(pool, provider.charge, order, { waitMs: 0 }), (error) =>
    error instanceof TryLater && error.outcome === 'processing' && error.retryAfter >= 1);
  open();
  assert.equal((await charging).amount, order.amount);
  assert.equal(await one(`SELECT attempt ${row}`, order.id, 'ChargePayment'), 1);
  assert.equal(provider.calls, 1);
});
