// A saga: reserve what was ordered, item by item, charge it, ship it.
import { runStepIdempotent, StepFailed, type Json, type Saga } from './saga.js';

export interface Order { id: string; items: string[]; amount: number }

/** Calls a service that honours idempotency keys. */
async function post(url: string, key: string, body: Json, signal: AbortSignal): Promise<string> {
  const response = await fetch(url, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', 'Idempotency-Key': key },
    body: JSON.stringify(body),
    signal,
  });
  const answer = await response.text();
  if (response.status === 402) throw new StepFailed(answer);
  if (!response.ok) throw new Error(`${url} answered ${response.status}`);
  return answer;
}

export async function fulfil(saga: Saga, order: Order, services: string) {
  // Many effects in one step: a checkpoint after each, so that no more than the
  // last of them is repeated.  The service may see that one twice; its key says so.
  const reserved = await runStepIdempotent(saga, 'Reserve', async ({ state, uuid, signal, save }) => {
    const receipts = (state ?? []) as string[];
    for (const item of order.items.slice(receipts.length)) {
      receipts.push(await post(`${services}/reserve`, `${uuid}/${receipts.length}`, { item }, signal));
      await save(`reserved ${receipts.length}`, receipts);
    }
    return receipts;
  }, order.items);

  const charge = await runStepIdempotent(saga, 'ChargePayment', ({ uuid, signal }) =>
    post(`${services}/charge`, uuid, { amount: order.amount }, signal), { amount: order.amount });

  const parcel = await runStepIdempotent(saga, 'Ship', ({ uuid, signal }) =>
    post(`${services}/ship`, uuid, { reserved }, signal), { reserved });

  return { reserved, charge, parcel };
}
