// A payment that is taken once, however often it is asked for: the two ways.
//
// placeOrder     the work is in this database: claim, work and result in one
//                transaction, so they commit together or not at all.
// chargePayment  the work is outside: claim on a lease, call out, complete.

export class Declined extends Error {} // final: every retry gets it again
export class KeyReused extends Error {} // the key came with another request: HTTP 422
export class TryLater extends Error {} // nothing to answer with yet: HTTP 409 and Retry-After

// One round trip: make the key, claim it, and name it for the outside.
const CLAIM = `
  SELECT c.outcome, c.token, c.attempt, c.response, k.key, idem_uuid(k.key) AS uuid,
         ceil(extract(epoch FROM c.retry_after))::int AS retry_after
  FROM idem_key($1, $2) AS k(key),
       idem_claim(k.key, request => $3, lease => $4, wait => $5) AS c`;

// A claim that waits keeps its connection: the pool needs more than may wait at once.
async function claimKey(db, orderId, step, request, { leaseMs = 60_000, waitMs = 10_000 } = {}) {
  const { rows } = await db.query(CLAIM, [
    orderId, step, request, `${leaseMs} milliseconds`, `${waitMs} milliseconds`,
  ]);
  return rows[0];
}

// What to answer when somebody else has or had the key.
function answerOf({ key, outcome, response, retry_after: retryAfter }) {
  switch (outcome) {
    case 'completed': return response;
    case 'failed': throw new Declined(response?.code);
    case 'mismatch': throw new KeyReused(`${key} was used for another request`);
    default: // processing, retryable; unknown, which waits for idem_resolve() and has no retryAfter
      throw Object.assign(new TryLater(`${key} is ${outcome}`), { outcome, retryAfter });
  }
}

export async function placeOrder(pool, order, options) {
  const client = await pool.connect();
  let broken; // a connection that died is not given back to the pool
  const onError = (error) => { broken = error; };
  client.on('error', onError);
  try {
    await client.query('BEGIN');
    const claim = await claimKey(client, order.id, 'PlaceOrder', order, options);
    if (claim.outcome !== 'claimed') {
      await client.query('ROLLBACK');
      return answerOf(claim);
    }
    const { rows: [receipt] } = await client.query(
      'INSERT INTO orders (id, amount) VALUES ($1, $2) RETURNING number, amount', [order.id, order.amount]);
    await client.query('SELECT idem_complete($1, $2)', [claim.key, receipt]); // our own claim: no token
    await client.query('COMMIT');
    return receipt;
  } catch (error) {
    // The rollback frees the key, as would the end of the connection.
    await client.query('ROLLBACK').catch(onError);
    throw error;
  } finally {
    client.off('error', onError);
    client.release(broken);
  }
}

// provider(uuid, request, signal) calls out and answers { status, body }.
export async function chargePayment(pool, provider, { id, ...request }, options = {}) {
  const claim = await claimKey(pool, id, 'ChargePayment', request, options);
  if (claim.outcome !== 'claimed') return answerOf(claim);
  const { key, token, uuid } = claim;
  try {
    let charge;
    try {
      charge = await renewing(pool, claim, options, (signal) => provider(uuid, request, signal));
    } catch (error) {
      if (lostClaim(error)) throw error;
      charge = { status: 503 }; // no answer: it may have charged or not
    }
    if (charge.status < 300) {
      await pool.query('SELECT idem_complete($1, $2, $3)', [key, charge.body, token]);
      return charge.body;
    }
    if (charge.status === 402) {
      await pool.query('SELECT idem_fail($1, $2, $3, http_status => 402)', [key, charge.body, token]);
      throw new Declined(charge.body.code);
    }
    // Trying again can't charge twice, because the provider knows the UUID.  With
    // one that takes no idempotency key it could: then the disposition is 'unknown'.
    await pool.query(
      "SELECT idem_fail($1, token => $2, disposition => 'retry', retry_after => '1s')", [key, token]);
    throw Object.assign(new TryLater(`provider answered ${charge.status}`), { outcome: 'retryable', retryAfter: 1 });
  } catch (error) {
    // We were too slow and somebody took over: what they get is the answer.
    if (lostClaim(error)) return chargePayment(pool, provider, { id, ...request }, options);
    throw error;
  }
}

const lostClaim = (error) => error.code === 'IK410' || error.code === 'IK404';

// Do the work and renew the lease all the while; abort the work if the claim is lost.
async function renewing(pool, { key, token }, { leaseMs = 60_000 }, work) {
  const lost = new AbortController();
  const timer = setInterval(() => {
    pool.query('SELECT idem_renew($1, $2, $3)', [key, token, `${leaseMs} milliseconds`]).catch((error) => {
      if (lostClaim(error)) lost.abort(error); // anything else: the next beat tries again
    });
  }, leaseMs / 3);
  try {
    return await work(lost.signal);
  } finally {
    clearInterval(timer);
  }
}

export const httpProvider = (url) => async (uuid, request, signal) => {
  const response = await fetch(url, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json', 'Idempotency-Key': uuid },
    body: JSON.stringify(request),
    signal,
  });
  return { status: response.status, body: await response.json() };
};
