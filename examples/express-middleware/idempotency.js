// Express middleware for the Idempotency-Key header (IETF draft
// draft-ietf-httpapi-idempotency-key-header), with its answers in PostgreSQL.
//
// The handler's answer is held back until it is stored: nobody hears of a result
// that a crash could still make undone.  Answer and replay leave by the same
// function, so they are the same byte for byte.

import { createHash } from 'node:crypto';

// A key that was settled by hand, with idem_resolve(), has a response alone.
const CLAIM = `
  SELECT outcome, token, attempt, checkpoint, state, idem_uuid($1, $2) AS uuid,
         coalesce(http_status, CASE outcome WHEN 'failed' THEN 500 ELSE 200 END) AS status,
         coalesce(headers, '[["Content-Type", "application/json"]]') AS headers,
         coalesce(body, convert_to(response::text, 'UTF8'), '') AS body,
         ceil(extract(epoch FROM retry_after))::int AS retry_after
  FROM idem_claim($1, scope => $2, operation => $3, request_hash => $4, lease => $5, wait => $6)`;
const COMPLETE = `
  SELECT idem_complete($1, scope => $2, token => $3, http_status => $4, headers => $5, body => $6)`;
const FAIL = `
  SELECT idem_fail($1, scope => $2, token => $3, http_status => $4, headers => $5, body => $6)`;
const RETRY = `SELECT idem_fail($1, scope => $2, token => $3, disposition => 'retry')`;

// What one connection or one moment says for itself is neither stored nor replayed.
const NOT_KEPT = new Set([
  'connection', 'content-length', 'date', 'keep-alive', 'trailer', 'transfer-encoding', 'upgrade']);

// For the body parsers, as in express.json({ verify: keepRawBody }): requests are
// compared by their bytes.
export const keepRawBody = (req, _res, raw) => { req.rawBody = raw; };

const hasBody = ({ headers }) => 'transfer-encoding' in headers || Number(headers['content-length'] ?? 0) > 0;

// db(req)      the pg pool (a tenant's role may be confined to its scope)
// scope(req)   whose key it is: the same key in two scopes is two keys
// lease        longer than a handler takes; one that needs more renews req.idempotency
// wait         how long a duplicate waits for the first one's answer before its 409
// waiters      of that many at once: each keeps a connection, and the pool must have some left
// maxBytes     of an answer; not above idempotency.max_response_size
export function idempotency({
  db, scope = () => '', lease = '1 minute', wait = '0', waiters = 5, maxBytes = 1024 * 1024, methods = ['POST', 'PATCH'],
}) {
  let asking = 0;
  return async (req, res, next) => {
    if (!methods.includes(req.method)) return next();
    const key = parseKey(req.get('Idempotency-Key'));
    if (!key) return send(res, problem(400, 'This request needs an Idempotency-Key header'));

    const refuse = (error) => {
      const answer = problemOf(error);
      if (answer) send(res, answer);
      else next(error);
    };
    if (req.rawBody === undefined && hasBody(req)) {
      return next(new Error('idempotency: no body parser with keepRawBody has read this body'));
    }
    const pool = db(req);
    const name = [key, scope(req)];
    const operation = `${req.method} ${req.baseUrl}${req.path}`;
    const hash = createHash('sha256').update(`${req.originalUrl}\n`).update(req.rawBody ?? '').digest();
    const ask = async () => {
      const patience = asking < waiters ? wait : '0';
      asking += 1;
      try {
        return (await pool.query(CLAIM, [...name, operation, hash, lease, patience])).rows[0];
      } finally {
        asking -= 1;
      }
    };
    let claim;
    try {
      claim = await ask();
    } catch (error) {
      return refuse(error);
    }
    if (claim.outcome !== 'claimed') return send(res, answerOf(claim));

    const { token, attempt, checkpoint, state, uuid } = claim;
    req.idempotency = { key, scope: name[1], token, attempt, checkpoint, state, uuid };
    const capture = captureAnswer(res, maxBytes);
    next();
    const made = await capture.answer;
    try {
      const answer = await settle(pool, [...name, token], made).catch(async (error) => {
        if (error.code !== 'IK410' && error.code !== 'IK404') throw error;
        // The handler outlived its lease.  Whoever has the key now gives the answer.
        const current = await ask();
        if (current.outcome === 'claimed') await pool.query(RETRY, [...name, current.token]); // nobody: the next one
        return answerOf(current);
      });
      capture.release();
      return send(res, answer);
    } catch (error) {
      capture.release();
      return refuse(error);
    }
  };
}

// What to answer without running anything.
function answerOf({ outcome, status, headers, body, retry_after: retryAfter }) {
  switch (outcome) {
    case 'completed':
    case 'failed':
      return { status, headers: [...headers, ['Idempotency-Replayed', 'true']], body };
    case 'mismatch':
      return problem(422, 'This Idempotency-Key was used for another request');
    case 'retryable':
      return problem(503, 'It failed for now', retryAfter);
    case 'unknown': // held until somebody calls idem_resolve()
      return problem(409, 'Nobody knows how the request with this Idempotency-Key ended');
    default:
      return problem(409, 'A request with this Idempotency-Key is being processed', retryAfter ?? 1);
  }
}

// Store the answer; returns what to send.
async function settle(pool, own, answer) {
  try {
    if (!answer) throw Object.assign(new Error('answer too large'), { code: 'IK413' });
    if (answer.status >= 500) await pool.query(RETRY, own);
    else await pool.query(COMPLETE, [...own, ...columns(answer)]);
    return answer;
  } catch (error) {
    if (error.code !== 'IK413') throw error;
    const refusal = problemOf(error); // the work is done, so no retry may do it again
    await pool.query(FAIL, [...own, ...columns(refusal)]);
    return refusal;
  }
}

// The draft wants a structured-field string, "..."; many clients send the bare key.
function parseKey(value = '') {
  const quoted = /^"((?:[ !#-[\]-~]|\\["\\])+)"$/.exec(value);
  if (quoted) return quoted[1].replace(/\\(.)/g, '$1');
  return /^[!#-+\--~]+$/.test(value) ? value : undefined; // with a comma it was sent twice
}

// Keep what the handler answers, until it ends, instead of sending it.  The
// answer is undefined if it is too large.
function captureAnswer(res, maxBytes) {
  const { writeHead, flushHeaders, write, end } = res;
  const outer = new Set(res.getHeaderNames()); // of the middleware before us
  const chunks = [];
  let size = 0;
  const keep = (chunk, encoding) => {
    if (typeof chunk !== 'string' && !(chunk instanceof Uint8Array)) return;
    const bytes = Buffer.from(chunk, typeof encoding === 'string' ? encoding : 'utf8');
    size += bytes.length;
    if (size <= maxBytes) chunks.push(bytes);
  };
  const callbackIn = (...args) => args.find((arg) => typeof arg === 'function') ?? (() => {});

  const answer = new Promise((resolve) => {
    res.flushHeaders = () => {};
    res.writeHead = (status, ...rest) => {
      res.statusCode = status;
      setHeaders(res, pairsOf(rest.find((arg) => typeof arg === 'object') ?? {}));
      return res;
    };
    res.write = (...args) => {
      keep(...args);
      process.nextTick(callbackIn(...args));
      return true;
    };
    res.end = (...args) => {
      keep(...args);
      res.once('finish', callbackIn(...args));
      res.writeHead(res.statusCode); // who adds headers at the last moment does it now
      res.write = res.end = () => res;
      const headers = pairsOf(res.getHeaders(), res.getRawHeaderNames())
        .filter(([name]) => !NOT_KEPT.has(name.toLowerCase()));
      resolve(size > maxBytes ? undefined : { status: res.statusCode, headers, body: Buffer.concat(chunks) });
      return res;
    };
  });
  const release = () => {
    Object.assign(res, { writeHead, flushHeaders, write, end });
    for (const name of res.getHeaderNames()) if (!outer.has(name)) res.removeHeader(name);
  };
  return { answer, release };
}

// Headers as [name, value] pairs, which keep order and repeated names.
function pairsOf(headers, names = Object.keys(headers)) {
  if (Array.isArray(headers)) {
    return Array.isArray(headers[0]) ? headers : headers.flatMap((name, i) => (i % 2 ? [] : [[name, headers[i + 1]]]));
  }
  return names.flatMap((name) => [headers[name] ?? headers[name.toLowerCase()]].flat().map((value) => [name, String(value)]));
}

function setHeaders(res, pairs) {
  const values = new Map();
  for (const [name, value] of pairs) values.set(name, [...(values.get(name) ?? []), value].flat());
  for (const [name, list] of values) res.setHeader(name, list.length > 1 ? list : list[0]);
}

const columns = ({ status, headers, body }) => [status, JSON.stringify(headers), body];

function send(res, { status, headers, body }) {
  res.statusCode = status;
  setHeaders(res, headers);
  if (status !== 204 && status !== 304) res.setHeader('Content-Length', body.length);
  res.end(body);
}

function problem(status, title, retryAfter) {
  const headers = [['Content-Type', 'application/problem+json']];
  if (retryAfter) headers.push(['Retry-After', String(retryAfter)]);
  return { status, headers, body: Buffer.from(JSON.stringify({ status, title })) };
}

// What the contract's errors mean to a client; undefined for any other error.
function problemOf(error) {
  switch (error.code) {
    case 'IK400': return problem(400, error.message);
    case 'IK413': return problem(413, 'It was done, but its answer is too large to be kept');
    case '42501': return problem(403, 'No right to use this Idempotency-Key');
    case '25006': return problem(503, 'Read-only at the moment', 1);
    default: return undefined;
  }
}
