// Deletes expired idempotency keys on a schedule: node-cron and one CALL.
//
//   node cleanup.js '*/5 * * * *'
//
// The connection is what PGHOST, PGDATABASE and the like say, as a role that has
// idem_grant(role, admin => true).  Any number of processes may do this at once:
// their sweeps take nothing from each other and wait for nobody.
import { pathToFileURL } from 'node:url';
import cron from 'node-cron';
import pg from 'pg';

// One sweep, on a connection of its own, so that it takes none from the service's
// pool.  The CALL has to be a statement by itself: it commits after each batch, so
// no BEGIN before it, and no other statement in the same query string.  A signal
// that is aborted ends it; what its batches have deleted stays deleted.
export async function sweep({ config, signal, log = console } = {}) {
  const client = new pg.Client({ application_name: 'cleanup', ...config });
  client.on('error', (error) => log.error(`cleanup: ${error.message}`));
  client.on('notice', ({ severity, message, detail }) =>
    log.warn(`cleanup: ${severity}: ${message}${detail ? ` (${detail})` : ''}`));
  await client.connect();
  const cancel = () => cancelBackend(config, client.processID).catch((error) => log.error(`cleanup: ${error.message}`));
  try {
    signal?.throwIfAborted();
    signal?.addEventListener('abort', cancel, { once: true });
    await client.query('CALL idem_sweep_all()');
  } finally {
    signal?.removeEventListener('abort', cancel);
    await client.end().catch(() => {});
  }
}

async function cancelBackend(config, pid) {
  const client = new pg.Client({ application_name: 'cleanup', ...config });
  await client.connect();
  try {
    await client.query('SELECT pg_cancel_backend($1)', [pid]);
  } finally {
    await client.end();
  }
}

// Sweeps on a schedule until stop() is called.  A run that fails is logged, and the
// next one does its work; one that takes longer than the schedule is not doubled.
export function startCleanup(schedule, { config, log = console } = {}) {
  const abort = new AbortController();
  let running = Promise.resolve();
  const run = () => {
    running = sweep({ config, log, signal: abort.signal }).catch((error) => {
      if (!abort.signal.aborted) log.error(`cleanup: ${error.message}`);
    });
    return running;
  };
  const task = cron.schedule(schedule, run, { name: 'idempotency cleanup', noOverlap: true });
  return {
    async stop() {
      await task.destroy();
      abort.abort();
      await running;
    },
  };
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? '').href) {
  const cleanup = startCleanup(process.argv[2] ?? '*/5 * * * *');
  for (const name of ['SIGINT', 'SIGTERM']) process.once(name, () => cleanup.stop());
}
