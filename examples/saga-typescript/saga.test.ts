import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { randomUUID } from 'node:crypto';
import { EventEmitter, once } from 'node:events';
import { createServer, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { text } from 'node:stream/consumers';
import { after, test, type TestContext } from 'node:test';
import { fileURLToPath } from 'node:url';
import pg from 'pg';
import { fulfil, type Order } from './order.js';
import { runStepIdempotent, StepFailed, StepPending, type Json, type Saga } from './saga.js';

const pool = new pg.Pool({ max: 30 });
pool.on('error', () => {}); // a connection that a test has killed
after(() => pool.end());

const newOrder = (): Order => ({ id: `order-${randomUUID()}`, items: ['apple', 'book', 'cup', 'door', 'egg'], amount: 4999 });
const newSaga = (options: Partial<Saga> = {}): Saga => ({ id: `saga-${randomUUID()}`, pool, ...options });
const attemptOf = async (saga: string, step: string): Promise<number> =>
  (await pool.query('SELECT attempt FROM idem_get(idem_key($1, $2))', [saga, step])).rows[0].attempt;

// The services outside: they honour idempotency keys, and count what they have
// done.  'call' is emitted when a call has had its effect; `swallow` says that
// its answer never comes.
class Services extends EventEmitter {
  done = new Map<string, string>(); // by key
  calls: string[] = [];
  swallow: (path: string, effects: number) => boolean = () => false;
  refuse = new Map<string, number>(); // status by path
  url = '';

  static async start(t: TestContext): Promise<Services> {
    const services = new Services();
    const server = createServer(async (request, response: ServerResponse) => {
      const path = request.url!;
      const key = `${path} ${request.headers['idempotency-key']}`;
      await text(request);
      services.calls.push(path);
      const status = services.refuse.get(path);
      if (status) return response.writeHead(status).end('refused');
      if (!services.done.has(key)) services.done.set(key, randomUUID());
      const swallowed = services.swallow(path, services.effects(path));
      services.emit('call', path, swallowed);
      if (!swallowed) response.end(services.done.get(key));
    }).listen(0, '127.0.0.1');
    await once(server, 'listening');
    services.url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
    t.after(() => { server.close(); server.closeAllConnections(); });
    return services;
  }

  effects(path: string): number {
    return [...this.done.keys()].filter((key) => key.startsWith(`${path} `)).length;
  }

  async swallowed(): Promise<void> {
    for (;;) if ((await once(this, 'call'))[1]) return;
  }

  assertOnce(order: Order): void {
    assert.deepEqual(['/reserve', '/charge', '/ship'].map((path) => this.effects(path)), [order.items.length, 1, 1]);
  }
}

function startOrchestrator(t: TestContext, services: Services, order: Order, leaseMs: number) {
  const child = spawn(process.execPath,
    [fileURLToPath(new URL('orchestrator.js', import.meta.url)), services.url, JSON.stringify(order), String(leaseMs)],
    { stdio: ['ignore', 'pipe', 'inherit'] });
  t.after(() => { child.kill('SIGKILL'); });
  return { kill: (signal: NodeJS.Signals) => child.kill(signal), result: text(child.stdout).then((out) => out && JSON.parse(out)) };
}

test('a saga that is run again gives the same result and calls nobody', async (t) => {
  const services = await Services.start(t);
  const order = newOrder();
  const saga = { id: order.id, pool };
  const first = await fulfil(saga, order, services.url);
  const calls = services.calls.length;
  assert.deepEqual(await fulfil(saga, order, services.url), first);
  assert.equal(services.calls.length, calls);
  services.assertOnce(order);
});

test('a crash in every place: the next orchestrator goes on from the checkpoint', async (t) => {
  const services = await Services.start(t);
  const order = newOrder();
  const places: [string, number][] = [['/reserve', 3], ['/charge', 1], ['/ship', 1]];
  for (const [place, effects] of places) {
    services.swallow = (path, count) => path === place && count === effects;
    const stuck = services.swallowed();
    const { kill, result } = startOrchestrator(t, services, order, 1500);
    await stuck; // the service has done it, and the orchestrator does not know
    kill('SIGKILL');
    assert.equal(await result, '');
  }
  services.swallow = () => false;
  const { reserved } = await fulfil({ id: order.id, pool }, order, services.url);
  assert.equal(reserved.length, order.items.length);
  services.assertOnce(order);
  // Only the call without an answer was made again, in each step.
  assert.equal(services.calls.length, order.items.length + 2 + places.length);
  for (const step of ['Reserve', 'ChargePayment', 'Ship']) assert.equal(await attemptOf(order.id, step), 2);
});

test('two orchestrators race: each step is run by one, and both get its result', async (t) => {
  const services = await Services.start(t);
  const order = newOrder();
  const [one, two] = [startOrchestrator(t, services, order, 60_000), startOrchestrator(t, services, order, 60_000)];
  const results = await Promise.all([one.result, two.result, ...Array.from({ length: 8 }, () =>
    fulfil({ id: order.id, pool }, order, services.url))]);
  for (const result of results) assert.deepEqual(result, results[0]);
  services.assertOnce(order);
  assert.equal(services.calls.length, order.items.length + 2);
});

test('an orchestrator that was stopped wakes up too late, and takes its successor\'s results', async (t) => {
  const services = await Services.start(t);
  const order = newOrder();
  services.swallow = (path) => path === '/charge';
  const stuck = services.swallowed();
  const late = startOrchestrator(t, services, order, 1500);
  await stuck;
  late.kill('SIGSTOP');
  services.swallow = () => false;
  const result = await fulfil({ id: order.id, pool }, order, services.url);
  late.kill('SIGCONT'); // its heartbeat finds the claim lost
  assert.deepEqual(await late.result, result);
  services.assertOnce(order);
});

test('the database connections die in the middle of a step', async () => {
  const name = `saga-${randomUUID()}`;
  const saga = newSaga({ pool: new pg.Pool({ application_name: name }) });
  saga.pool.on('error', () => {});
  let runs = 0;
  const result = await runStepIdempotent(saga, 'Step', async ({ save }) => {
    runs += 1;
    const dead = once(saga.pool, 'error');
    await pool.query('SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1', [name]);
    await dead;
    await save('after');
    return { runs };
  });
  assert.deepEqual(result, { runs: 1 });
  assert.deepEqual(await runStepIdempotent(saga, 'Step', () => assert.fail('it is done')), { runs: 1 });
  await saga.pool.end();
});

test('a step that failed for good stays so; one that threw runs again', async (t) => {
  const services = await Services.start(t);
  const declined = newOrder();
  services.refuse.set('/charge', 402);
  for (let i = 0; i < 2; i++) {
    await assert.rejects(fulfil({ id: declined.id, pool }, declined, services.url), new StepFailed('refused'));
  }
  assert.equal(services.calls.filter((path) => path === '/charge').length, 1);

  const order = newOrder();
  services.refuse.set('/charge', 503);
  await assert.rejects(fulfil({ id: order.id, pool }, order, services.url), /answered 503/);
  services.refuse.clear();
  await fulfil({ id: order.id, pool }, order, services.url);
  assert.equal(await attemptOf(order.id, 'ChargePayment'), 2);
});

test('what a step gives back comes back the same, and another request is refused', async () => {
  const saga = newSaga();
  const values: Json[] = [null, [], {}, [1, [2]], '', 'text', 0, false, { a: null }];
  for (const value of values) {
    const step = JSON.stringify(value);
    assert.deepEqual(await runStepIdempotent(saga, step, async () => value), value);
    assert.deepEqual(await runStepIdempotent(saga, step, () => assert.fail('it is done')), value);
  }
  await runStepIdempotent(saga, 'Step', async () => null, { amount: 1 });
  await assert.rejects(runStepIdempotent(saga, 'Step', async () => null, { amount: 2 }), /another request/);
});

test('no patience: a step that is being run is pending', async () => {
  const saga = newSaga();
  await runStepIdempotent(saga, 'Step', async () => {
    await assert.rejects(runStepIdempotent({ ...saga, patienceMs: 0 }, 'Step', async () => null),
      (error) => error instanceof StepPending && error.outcome === 'processing');
    return null;
  });
});

test('parts that contain the separator name different steps', async () => {
  const [a, b] = [newSaga({ id: `${randomUUID()}:x` }), randomUUID()];
  assert.equal(await runStepIdempotent({ ...a, id: `${b}:x` }, 'y', async () => 1), 1);
  assert.equal(await runStepIdempotent({ ...a, id: b }, 'x:y', async () => 2), 2);
});
