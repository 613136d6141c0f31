// Saga steps that run once: each step is an idempotency key, {saga}:{step}.
//
// An orchestrator that is started again, or twice, calls the same steps.  Those
// that are done give back their result; the one that was interrupted goes on
// from its checkpoint; one that another orchestrator is at is waited for.

import { setTimeout as sleep } from 'node:timers/promises';
import type { Pool } from 'pg';

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };

export interface Saga {
  id: string;
  pool: Pool; // a step that waits keeps a connection, so one to spare for the steps that work
  leaseMs?: number; // how long after a crash another orchestrator may take over
  patienceMs?: number; // how long to wait for an orchestrator that is at a step
}

export interface Attempt {
  attempt: number;
  checkpoint: string | null; // how far the last attempt got, and what it noted
  state: Json;
  uuid: string; // the step's name for an outside API: the same at every attempt
  signal: AbortSignal; // aborted when another orchestrator has taken over
  save(checkpoint: string, state?: Json): Promise<void>;
}

/** The step has failed for good: what every retry gets. Throw it in a step to say so. */
export class StepFailed extends Error {
  constructor(readonly detail: Json) {
    super(`step failed: ${JSON.stringify(detail)}`);
  }
}

/** There is no result yet: start the saga again later, or (unknown) after idem_resolve(). */
export class StepPending extends Error {
  constructor(step: string, readonly outcome: string) {
    super(`step ${step} is ${outcome}`);
  }
}

const CLAIM = `
  SELECT c.outcome, c.token, c.attempt, c.response, c.checkpoint, c.state, k.key, idem_uuid(k.key) AS uuid,
         extract(epoch FROM c.retry_after)::float8 * 1000 AS "retryMs"
  FROM idem_key($1, $2) AS k(key),
       idem_claim(k.key, request => $3, lease => $4, wait => $5) AS c`;

interface Claim {
  outcome: 'claimed' | 'processing' | 'completed' | 'failed' | 'retryable' | 'unknown' | 'mismatch';
  token: string;
  attempt: number;
  response: Json;
  checkpoint: string | null;
  state: Json;
  key: string;
  uuid: string;
  retryMs: number | null;
}

/** `request` is what the step was asked to do: a later call that asks for something else is refused. */
export async function runStepIdempotent<T extends Json>(
  saga: Saga, step: string, fn: (attempt: Attempt) => Promise<T>, request: Json = {},
): Promise<T> {
  const { pool, leaseMs = 60_000, patienceMs = 120_000 } = saga;
  const lease = `${leaseMs} milliseconds`;
  for (const end = Date.now() + patienceMs; ;) {
    const wait = `${Math.max(0, end - Date.now())} milliseconds`;
    const { rows: [claim] } = await pool.query<Claim>(
      CLAIM, [saga.id, step, JSON.stringify(request), lease, wait]);
    switch (claim!.outcome) {
      case 'claimed':
        try {
          return await runAttempt(saga, claim!, fn);
        } catch (error) {
          if (!isLost(error)) throw error;
          continue; // another orchestrator took over: its result is ours
        }
      case 'completed':
        return claim!.response as T;
      case 'failed':
        throw new StepFailed(claim!.response);
      case 'mismatch':
        throw new Error(`step ${step} of saga ${saga.id} was begun with another request`);
      case 'retryable':
        if (Date.now() + claim!.retryMs! > end) throw new StepPending(step, claim!.outcome);
        await sleep(claim!.retryMs!);
        continue;
      default: // processing: out of patience; unknown: somebody has to look
        throw new StepPending(step, claim!.outcome);
    }
  }
}

async function runAttempt<T extends Json>(
  { pool, leaseMs = 60_000 }: Saga, claim: Claim, fn: (attempt: Attempt) => Promise<T>,
): Promise<T> {
  const { key, token, attempt, checkpoint, state, uuid } = claim;
  const lease = `${leaseMs} milliseconds`;
  const lost = new AbortController();
  const heartbeat = setInterval(() => {
    pool.query('SELECT idem_renew($1, $2, $3)', [key, token, lease]).catch((error: unknown) => {
      if (isLost(error)) lost.abort(error); // anything else: the next beat tries again
    });
  }, leaseMs / 3);
  const save = async (name: string, noted: Json = null) => {
    await pool.query('SELECT idem_checkpoint($1, $2, $3, $4, lease => $5)',
      [key, token, name, JSON.stringify(noted), lease]);
  };
  let result: T;
  try {
    result = await fn({ attempt, checkpoint, state, uuid, signal: lost.signal, save });
    lost.signal.throwIfAborted();
  } catch (error) {
    if (isLost(error)) throw error;
    if (error instanceof StepFailed) {
      await pool.query('SELECT idem_fail($1, $2, $3)', [key, JSON.stringify(error.detail), token]);
    } else {
      await pool.query("SELECT idem_fail($1, token => $2, disposition => 'retry')", [key, token]);
    }
    throw error;
  } finally {
    clearInterval(heartbeat);
  }
  await pool.query('SELECT idem_complete($1, $2, $3)', [key, JSON.stringify(result), token]);
  return result;
}

// IK410: the token is no longer the current one; IK404: the key has expired.
const isLost = (error: unknown): boolean =>
  error instanceof Error && 'code' in error && (error.code === 'IK410' || error.code === 'IK404');
